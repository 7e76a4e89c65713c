"""Hybrid sharding with FSDP1: sharded in a replica, averaged between replicas."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from harness.spec import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from harness.workload.training import Training
    from strategies import Groups, Layout


def check_layout(layout: Layout) -> None:
    """Refuse meshes in which FSDP1 would silently stop averaging replicas.

    With one shard FSDP1 replaces HYBRID_SHARD by NO_SHARD over the shard group
    (torch 2.13 and 2.14, `_init_core_state`), so that no gradient would ever
    reach the replicate group.

    Raises:
        SpecError: fewer than 2 shards.
    """
    if layout.shard_size < 2:
        raise SpecError(
            f"mesh: expected at least 2 shards for fsdp1; found "
            f"{layout.num_replicas}x{layout.shard_size}, for which it would not average the "
            f"replicas; use {layout.num_replicas}x2"
        )


def wrap(
    training: Training,
    units: Sequence[nn.Module],
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
) -> FullyShardedDataParallel:
    """Make every one of `units` an FSDP unit, and the rest another."""
    del layout  # the groups say it all
    blocks = {id(unit) for unit in units}
    return FullyShardedDataParallel(
        training.model,
        process_group=(groups.shard, groups.replicate),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in blocks),
        param_init_fn=training.initialize,
        device_id=device,
        use_orig_params=True,
    )


def microbatch(
    model: FullyShardedDataParallel, *, last: bool
) -> contextlib.AbstractContextManager[object]:
    """Communicate in the backward pass of the last one alone."""
    return contextlib.nullcontext() if last else model.no_sync()


def clip_grad_norm(model: FullyShardedDataParallel, max_norm: float) -> None:
    """Clip by the norm over all shards."""
    model.clip_grad_norm_(max_norm)
