"""torch's own reconfiguration (2.14 and later): the same group object, connected anew."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from strategies._base import Availability, Outcome, Strategy

if TYPE_CHECKING:
    from strategies._base import Failure, Job, Platform

_FUNCTIONS = ("_supports_reconfigure", "_get_reconfigure_handle", "_reconfigure")
"""Private in torch 2.14 and 2.15, and called experimental there."""


class C10dReconfigure(Strategy):
    """What an engineer would write around three functions of torch.distributed."""

    name = "c10d_reconfigure"
    summary = "torch's own reconfiguration of a group in place; nothing to rebind"
    variants = {"default": {"deadline_s": 30.0}}
    _generation = 0

    def availability(self, platform: Platform) -> Availability:
        """Look for the functions: experimental ones may go as they came."""
        found = super().availability(platform)
        import torch.distributed as dist

        missing = [name for name in _FUNCTIONS if not hasattr(dist, name)]
        if missing:
            return Availability(
                available=False,
                reason=f"{found.version} has no torch.distributed.{missing[0]} (2.14 has)",
                version=found.version,
            )
        if platform.backend == "nccl":
            return Availability(
                available=False,
                reason="NCCL groups must be made for it (the nccl2 backend); not written for here",
                version=found.version,
            )
        return found

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Reconfigure at a boundary, when the members have met; leave the rest to the launcher."""
        if failure.phase != "boundary" or failure.group is None:
            job.emit("reject", reason="struck inside an update, which reconfiguring cannot undo")
            return Outcome.EXIT
        start = time.perf_counter()
        import torch.distributed as dist

        group, layout = job.groups.replicate, job.attempt.layout
        deadline = timedelta(seconds=self.options["deadline_s"])
        self._generation += 1  # a number that is used again splits the group
        prefix = f"reconfigure/{job.attempt.index}/{self._generation}/{layout.shard}"
        store = dist.PrefixStore(prefix, job.attempt.store())
        store.set(str(layout.rank), dist._get_reconfigure_handle(group))
        members = [str(rank) for rank in layout.replicate_ranks()]
        store.wait(members, deadline)
        dist._reconfigure(
            uuid=self._generation,
            handles=[store.get(member).decode() for member in members],
            group=group,
            timeout=deadline,
        ).wait()
        job.emit("phase", phase="reconfigure", ms=(time.perf_counter() - start) * 1e3)
        job.emit("references", generation=self._generation, rebound=0, left=0)
        return Outcome.RESUMED
