"""A small real job: FSDP1 HYBRID_SHARD over 2x2 ranks, dropout on, two microbatches an update."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import accelpact
from harness.job import TrainingJob
from harness.workload import decoder, hsdp
from harness.workload.config import ModelConfig
from harness.workload.corpus import VOCAB_SIZE
from harness.workload.data import Loader
from harness.workload.model import next_token_loss
from harness.workload.presets import Workload
from strategies._base import connect_native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelpact import Pact, Repair
    from tests.distributed.ranks import Rank

NUM_LAYERS = 4
NUM_UNITS = NUM_LAYERS + 1
"""FSDP modules: the layers and the root."""
GROUP_TIMEOUT_S = 2.0
SHARD_TIMEOUT_S = 30.0
SEED = 7

WORKLOAD = Workload(
    name="small",
    summary="as small as it can be with 4 layers",
    model=ModelConfig(
        vocab_size=VOCAB_SIZE, dim=32, num_layers=NUM_LAYERS, num_heads=2, num_kv_heads=1,
        ffn_dim=64, max_seq_len=32, dropout=0.1,
    ),
    seq_len=32, microbatch=1, accumulation=2, lr=3e-3,
)  # fmt: skip


class Silent:
    """A recorder that records nothing."""

    def emit(self, event: str, **fields: Any) -> None:
        """Forget it."""


def make(rank: Rank) -> TrainingJob:
    """Connect, and build model, optimizer and data as the harness does."""
    torch.manual_seed(0)
    attempt = rank.attempt(group_timeout=GROUP_TIMEOUT_S, shard_timeout=SHARD_TIMEOUT_S)
    groups = connect_native(attempt)
    model, optimizer, training = hsdp.build(
        decoder.maker(WORKLOAD),
        layout=attempt.layout,
        groups=groups,
        device=attempt.device,
        dtype=torch.float32,
        activation_checkpointing=False,
        seed=SEED,
    )
    loader = Loader(
        training,
        rank=rank.number,
        world_size=rank.world_size,
        seed=SEED,
        device=attempt.device,
    )
    return TrainingJob(
        model=model,
        optimizer=optimizer,
        training=training,
        loader=loader,
        attempt=attempt,
        groups=groups,
        recorder=Silent(),  # type: ignore[arg-type]
    )


def protect(rank: Rank, job: TrainingJob, *, replacement: str = "rebuild", **options: Any) -> Pact:
    """Attach the runtime; why it ends this process, if it does, is reported."""
    return accelpact.attach(
        job.model,
        job.optimizer,
        store=rank.store,
        prefix="accelpact/0",
        frontier=job.frontier,
        on_abort=rank.report,
        drive="manual",
        replacement=replacement,
        patience=options.get("deadline", 30.0),
        **options,
    )


def update(job: TrainingJob, pact: Pact | None = None) -> torch.Tensor:
    """Do and commit one update; return this rank's mean loss."""
    done = hsdp.train_update(job.model, job.optimizer, job.loader, job.training)
    job.frontier += 1
    if pact is not None:
        pact.commit(job.frontier)
    return done.loss


def accumulate(job: TrainingJob, *, synchronized: bool) -> None:
    """Do the forward and backward pass of one microbatch and nothing with its gradient."""
    tokens, _ = job.loader.next_batch()
    with contextlib.nullcontext() if synchronized else job.model.no_sync():
        next_token_loss(job.model(tokens[:, :-1]), tokens[:, 1:]).backward()


def repair(job: TrainingJob, pact: Pact) -> Repair:
    """Replace this rank's replicate group."""
    done = pact.repair(job.groups.replicate)
    job.groups.replicate = done.group
    return done


def train(
    rank: Rank,
    updates: int,
    absent: Mapping[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train; at the boundary after update u, rank `absent[u]` stays away from the all-reduce.

    Its peers time out, and its whole replicate group repairs.

    Returns:
        `roots`: digest of S_app after every update. `repairs`: what was done.
        `generation`: at the end. `name`: of the replicate group at the beginning.
    """
    job = make(rank)
    pact = protect(rank, job, **options)
    roots, repairs, name = [], [], job.groups.replicate.group_name
    while job.frontier < updates:
        loss = update(job, pact)
        roots.append(job.digest().root)
        if not reduce_loss(rank, job, loss, absent=(absent or {}).get(job.frontier)):
            repairs.append(_summary(job, repair(job, pact)))
    dist.barrier()
    generation = pact.generation
    pact.close()
    return {"roots": roots, "repairs": repairs, "generation": generation, "name": name}


def reduce_loss(rank: Rank, job: TrainingJob, loss: torch.Tensor, *, absent: int | None) -> bool:
    """Sum the loss over the replicas; whether that went well."""
    store = dist.PrefixStore("notice", rank.store())
    if rank.number == absent:
        store.get(str(job.frontier))
        return False
    try:
        dist.all_reduce(loss, group=job.groups.replicate)
    except RuntimeError:
        store.set(str(job.frontier), "failed")
        return False
    return True


def _summary(job: TrainingJob, done: Repair) -> dict[str, Any]:
    index = accelpact.ReferenceIndex(job.model, accelpact.FRAMEWORKS)
    return {
        "generation": done.generation,
        "frontier": done.frontier,
        "ranks": done.ranks,
        "phases": list(done.phases_ms),
        "holders": sorted(done.holders),
        "naming_it": len(index.holders(done.group)),
        "name": done.group.group_name,
        "resolved": dist.distributed_c10d._resolve_process_group(done.group.group_name)
        is done.group,
    }
