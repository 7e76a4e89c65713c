"""The built-in workloads: a decoder that predicts the next byte of a text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.workload.corpus import Corpus
from harness.workload.data import Sequences
from harness.workload.model import Block, Decoder, initializer, next_token_loss
from harness.workload.presets import Workload
from harness.workload.training import Given, Training


def maker(workload: Workload, data: str | None = None) -> Callable[[Given], Training]:
    """Return the function that builds `workload` on the text `data` (see `Corpus.load`)."""
    return functools.partial(_build, workload, data)


def _build(workload: Workload, data: str | None, given: Given) -> Training:
    corpus = Corpus.load(data)
    corpus.check(
        seq_len=workload.seq_len, microbatch=workload.microbatch, world_size=given.world_size
    )
    with torch.device("meta"):
        model = Decoder(workload.model)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=workload.lr,
            betas=workload.betas,
            eps=workload.eps,
            weight_decay=workload.weight_decay,
            fused=True,  # the other implementations hold temporary copies of every parameter
        )

    return Training(
        model=model,
        optimizer=optimizer,
        data=Sequences(corpus, workload.seq_len),
        loss=next_byte_loss,
        blocks=(Block,),
        initialize=initializer(model, given.device),
        microbatch=workload.microbatch,
        accumulation=workload.accumulation,
        clip_norm=workload.clip_norm,
        tokens=workload.seq_len,
    )


def next_byte_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each of `tokens` [B, T + 1] from those before it."""
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
