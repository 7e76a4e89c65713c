"""torchft's registered, reconfigurable process group as the replicate group."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from strategies._base import Groups, Outcome, Strategy, connect_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategies._base import Attempt, Failure, Job


class TorchftProcessGroup(Strategy):
    """The group is a wrapper: after a failure it is given a new communicator in place."""

    name = "torchft_pg"
    summary = "torchft's process group wrapper, reconfigured in place; nothing to rebind"
    distribution = "torchft"
    variants = {"registered": {"register": True}}

    def connect(self, attempt: Attempt) -> Groups:
        """Use torch's groups for the shards and torchft's for the replicas."""
        shard = connect_shards(attempt)
        import torch.distributed as dist
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        kind = ProcessGroupNCCL if attempt.backend == "nccl" else ProcessGroupGloo
        self._group = kind(timeout=timedelta(seconds=attempt.settings.group_timeout))
        self._generation = 0
        self._configure(attempt)
        self._group.register("replicate")
        if attempt.layout.shard_size > 1:
            return Groups(replicate=self._group, shard=shard)
        # DDP on the wrapper itself would train on gradients that nobody has divided.
        hook = (self._group, _averaging(attempt.layout.num_replicas))
        return Groups(replicate=self._group, shard=shard, ddp=dist.group.WORLD, ddp_hook=hook)

    def _configure(self, attempt: Attempt) -> None:
        """Rendezvous under a prefix that was never used: a reused one fails after 15 s."""
        layout, (host, port) = attempt.layout, attempt.store_address
        self._generation += 1
        self._group.configure(
            f"{host}:{port}/torchft/{attempt.index}/{self._generation}/{layout.shard}",
            replica_id=f"replica{layout.replica}",
            rank=layout.replica,
            world_size=layout.num_replicas,
            quorum_id=self._generation,
            group_rank=layout.shard,
            group_world_size=layout.shard_size,
            global_ranks=layout.replicate_ranks(),
        )

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Configure again at a boundary; anything else is left to the launcher."""
        if failure.phase != "boundary" or failure.group is not self._group:
            job.emit("reject", reason="struck inside an update, which the wrapper cannot undo")
            return Outcome.EXIT
        start = time.perf_counter()
        self._configure(job.attempt)
        job.emit("phase", phase="reconfigure", ms=(time.perf_counter() - start) * 1e3)
        job.emit("references", generation=self._generation - 1, rebound=0, left=0)
        return Outcome.RESUMED


def _averaging(num_replicas: int) -> Callable[[Any, Any], Any]:
    """Return a communication hook that averages DDP's gradients over torchft's group."""
    import torch.distributed as dist

    def average(group, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP would read annotations
        gradients = bucket.buffer().div_(num_replicas)
        work = dist.all_reduce(gradients, group=group, async_op=True)

        def averaged(future):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            future.value()  # else a collective that failed would pass for one that did not
            return gradients

        return work.get_future().then(averaged)

    return average
