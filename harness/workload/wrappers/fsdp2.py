"""Hybrid sharding with `fully_shard` on a 2-D mesh."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from harness.spec import SpecError
from harness.workload.wrappers import materialize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.workload.training import Training
    from strategies import Groups, Layout


def check_layout(layout: Layout) -> None:
    """Refuse meshes that shard nothing.

    Raises:
        SpecError: fewer than 2 shards.
    """
    if layout.shard_size < 2:
        raise SpecError(
            f"mesh: expected at least 2 shards for fsdp2; found "
            f"{layout.num_replicas}x{layout.shard_size}; use {layout.num_replicas}x2, or ddp"
        )


def wrap(
    training: Training,
    units: Sequence[nn.Module],
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
) -> nn.Module:
    """Shard every one of `units` by itself and then the rest.

    The mesh is made of the groups that the contender connected.
    """
    mesh = DeviceMesh.from_group(
        [groups.replicate, groups.shard],
        device.type,
        mesh=torch.arange(layout.world_size).view(layout.num_replicas, layout.shard_size),
        mesh_dim_names=("replicate", "shard"),
    )
    model = materialize(training, device)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def microbatch(model: FSDPModule, *, last: bool) -> Iterator[None]:
    """Communicate gradients in the backward pass of the last one alone."""
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    yield


def clip_grad_norm(model: nn.Module, max_norm: float) -> None:
    """Clip by the norm over all shards."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, whole)
