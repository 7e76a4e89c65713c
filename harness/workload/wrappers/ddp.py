"""DistributedDataParallel: every rank holds the whole model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.spec import SpecError
from harness.workload.data import batch
from harness.workload.wrappers import materialize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.workload.training import Training
    from strategies import Groups, Layout


def check_layout(layout: Layout) -> None:
    """Refuse meshes with a shard dimension, which DDP has not.

    Raises:
        SpecError: more than 1 shard.
    """
    if layout.shard_size != 1:
        raise SpecError(
            f"mesh: expected 1 shard for ddp; found {layout.num_replicas}x{layout.shard_size}; "
            f"use {layout.world_size}x1"
        )


def wrap(
    training: Training,
    units: Sequence[nn.Module],
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
) -> DistributedDataParallel:
    """Average over the replicate group, in the way that the contender wants it done."""
    del layout, units  # the groups say it all, and nothing is sharded
    model = DistributedDataParallel(
        materialize(training, device),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=groups.ddp or groups.replicate,
        broadcast_buffers=False,
    )
    if groups.ddp_hook is not None:
        model.register_comm_hook(*groups.ddp_hook)
    _lay_out_buckets(model, training, device)
    return model


def _lay_out_buckets(
    model: DistributedDataParallel, training: Training, device: torch.device
) -> None:
    """Let DDP put its gradients into their final buckets before training begins.

    It does so after its first backward pass, in the order in which gradients came. Where a gradient
    lies decides in which order the ranks' values are added. A run that restarts would go through
    the first layout again in the middle of training, and round differently from then on.
    Statistics that the forward passes gather are put back.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        training.loss(model, batch(training, [0], device)).backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def microbatch(
    model: DistributedDataParallel, *, last: bool
) -> contextlib.AbstractContextManager[object]:
    """Communicate in the backward pass of the last one alone."""
    return contextlib.nullcontext() if last else model.no_sync()


def clip_grad_norm(model: nn.Module, max_norm: float) -> None:
    """Clip by the norm, which every rank has for itself."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
