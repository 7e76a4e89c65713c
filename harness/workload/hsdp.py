"""Hybrid sharding with FSDP1: sharded in a replica, averaged between replicas."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from harness.spec import SpecError
from harness.workload.data import Loader
from harness.workload.model import Block, Decoder, initializer, next_token_loss
from harness.workload.presets import Workload
from harness.workload.seeds import derive_seed
from strategies import Groups, Layout


class Update(NamedTuple):
    """What one update did on this rank."""

    loss: Tensor
    """Mean loss of this rank's own samples, a float32 scalar on the device."""
    samples: list[int]
    """Places in the data order that were consumed."""
    tokens: int


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


def build(
    workload: Workload,
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    seed: int,
) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """Build the sharded model and its optimizer; a collective of every rank.

    Every `Block` is one FSDP unit and the rest is another: num_layers + 1.
    Parameters, gradients and both moments have `dtype`. Weights start equal on
    all ranks, since they depend on `seed` alone; the global generators are
    then seeded for this rank, so that dropout differs between ranks.

    Raises:
        SpecError: the mesh has fewer than 2 shards.
    """
    check_layout(layout)
    torch.manual_seed(seed)
    with torch.device("meta"):
        decoder = Decoder(workload.model).to(dtype)
    model = FullyShardedDataParallel(
        decoder,
        process_group=(groups.shard, groups.replicate),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        param_init_fn=initializer(decoder, device),
        device_id=device,
        use_orig_params=True,
    )
    if activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
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
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    workload: Workload,
) -> Update:
    """Do one optimizer update and leave no gradient behind.

    The first accumulation - 1 microbatches run under `no_sync`; only the last
    one's backward pass communicates, and brings the accumulated gradients of
    all ranks with it.
    """
    losses: list[Tensor] = []
    samples: list[int] = []
    for microbatch in range(workload.accumulation):
        last = microbatch == workload.accumulation - 1
        tokens, places = loader.next_batch()
        samples += places
        with contextlib.nullcontext() if last else model.no_sync():
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            (loss / workload.accumulation).backward()
        losses.append(loss.detach())
    model.clip_grad_norm_(workload.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(torch.stack(losses).mean(), samples, len(samples) * workload.seq_len)
