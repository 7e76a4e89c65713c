"""The model in its wrapper with its optimizer, and one update of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from harness.workload import wrappers
from harness.workload.data import Loader
from harness.workload.model import Block, Decoder, next_token_loss
from harness.workload.presets import Workload
from harness.workload.seeds import derive_seed
from strategies import Groups, Layout

COMPILER_BACKEND = "aot_eager"
"""All of the compiler but the code generator, which needs a C++ compiler on the machine."""


class Update(NamedTuple):
    """What one update did on this rank."""

    loss: Tensor
    """Mean loss of this rank's own samples, a float32 scalar on the device."""
    samples: list[int]
    """Places in the data order that were consumed."""
    tokens: int


def build(
    workload: Workload,
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    seed: int,
    wrapper: str = "fsdp1",
    compiled: bool = False,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build the wrapped model and its optimizer; a collective of every rank.

    Parameters, gradients and both moments have `dtype`. Weights start equal on
    all ranks, since they depend on `seed` alone; the global generators are
    then seeded for this rank, so that dropout differs between ranks. If it is to be `compiled`,
    every block is, by itself.

    Raises:
        SpecError: the mesh is none for that wrapper.
    """
    chosen = wrappers.find(wrapper)
    chosen.check_layout(layout)
    torch.manual_seed(seed)
    with torch.device("meta"):
        decoder = Decoder(workload.model).to(dtype)
    model = chosen.wrap(decoder, layout=layout, groups=groups, device=device)
    if activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if compiled:
        for module in model.modules():
            if isinstance(module, Block):
                module.compile(backend=COMPILER_BACKEND, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=workload.lr,
        betas=workload.betas,
        eps=workload.eps,
        weight_decay=workload.weight_decay,
        fused=True,  # the other implementations hold temporary copies of every parameter
    )
    # The rank of the layout, never a group's: a contender's group may number its own way.
    torch.manual_seed(derive_seed(seed, "rank", layout.rank))
    return model, optimizer


def train_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    workload: Workload,
    *,
    wrapper: str = "fsdp1",
    may_commit: Callable[[], bool] = lambda: True,
) -> Update | None:
    """Do one optimizer update and leave no gradient behind.

    Only the last microbatch's backward pass communicates, and brings the
    accumulated gradients of all ranks with it.

    Args:
        model: from `build`.
        optimizer: from `build`.
        loader: of this rank.
        workload: as for `build`.
        wrapper: as for `build`.
        may_commit: asked when the gradients are complete.

    Returns:
        None if the optimizer has not stepped because it might not.
    """
    chosen = wrappers.find(wrapper)
    losses: list[Tensor] = []
    samples: list[int] = []
    for microbatch in range(workload.accumulation):
        last = microbatch == workload.accumulation - 1
        tokens, places = loader.next_batch()
        samples += places
        with chosen.microbatch(model, last=last):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            (loss / workload.accumulation).backward()
        losses.append(loss.detach())
    chosen.clip_grad_norm(model, workload.clip_norm)
    permitted = may_commit()
    if permitted:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not permitted:
        return None
    return Update(torch.stack(losses).mean(), samples, len(samples) * workload.seq_len)
