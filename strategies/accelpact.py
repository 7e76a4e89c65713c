"""AccelPact: communicators are rebuilt under their names, every cached reference rebound."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import accelpact
from strategies._base import Outcome, Strategy, root_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelpact import Pact, ReferenceIndex, Repair
    from accelpact._frameworks import Framework
    from strategies._base import Failure, Job, Settings, Timeouts

_FLOOR_IDLE_S = 0.5
_NOTES = (
    "shard groups time out before a rank's patience ends: Gloo can lose the failure of a send",
)


class AccelPact(Strategy):
    """The six phases of the paper at a committed boundary; inside an update, taking it back."""

    name = "accelpact"
    summary = "state kept, communicator rebuilt under its name, cached references rebound"
    expected_inside = "pass"
    asks_envelope = True
    variants = {
        "rebuild+rebind": {"replacement": "rebuild", "deadline_s": 30.0},
        "auto": {"replacement": "auto", "deadline_s": 30.0},
    }
    frameworks: ClassVar[Sequence[Framework]] = accelpact.FRAMEWORKS
    audit: ClassVar[bool] = True
    _pact: Pact | None = None
    _places: ReferenceIndex | None = None
    _repaired_here = False
    _taken_back = 0

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Have blocked shard peers back while the others still wait for them."""
        base = super().settings(timeouts, num_faults=num_faults, backend=backend)
        # A column that is healthy waits for one that repairs, so not as short as `group`.
        shard_timeout = max(3 * timeouts.group, self.options["deadline_s"] / 2)
        return dataclasses.replace(
            base, shard_timeout=min(timeouts.world, shard_timeout), notes=_NOTES
        )

    def attach(self, job: Job) -> None:
        """Index the references and start the control thread."""
        self._pact = accelpact.attach(
            job.model,
            job.optimizer,
            store=job.attempt.store,
            prefix=f"accelpact/{job.attempt.index}",
            frontier=job.frontier,
            deadline=self.options["deadline_s"],
            patience=self.options["deadline_s"],
            replacement=self.options["replacement"],
            drive="manual",
            audit=self.audit,
            frameworks=self.frameworks,
            loader=job.loader,
            on_abort=lambda reason: job.emit("reject", reason=reason),
        )
        # With every framework, whatever the contender knows; here, since it walks the heap.
        self._places = accelpact.ReferenceIndex(job.model, accelpact.FRAMEWORKS)

    def begin(self, job: Job) -> None:
        """Note what the update would be rewound to."""
        assert self._pact is not None
        self._pact.begin()

    def committed(self, job: Job) -> None:
        """Declare the boundary."""
        assert self._pact is not None
        self._pact.commit(job.frontier)

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Run the six phases, or take the update back; a refusal ends this process."""
        assert self._pact is not None
        if failure.phase != "boundary" or failure.group is None:
            return self.take_back(job, failure)
        old = failure.group
        try:
            repair = self._pact.repair(job.groups.replicate)
            job.groups.replicate = repair.group
        except accelpact.Rejected as rejection:
            return self.refuse(job, str(rejection))
        self._repaired_here = True
        self._record(job, repair, old=old)
        return Outcome.RESUMED

    def take_back(self, job: Job, failure: Failure) -> Outcome:
        """Undo the update on every rank and replace all groups; a refusal ends this process."""
        assert self._pact is not None
        replicate, shard = job.groups.replicate.group_name, job.groups.shard.group_name
        try:
            done = self._pact.discard(failure.error)
            groups = {repair.group.group_name: repair.group for repair in done.repairs}
            job.groups.replicate = groups.get(replicate, job.groups.replicate)
            job.groups.shard = groups.get(shard, job.groups.shard)
        except accelpact.Rejected as rejection:
            return self.refuse(job, f"{rejection} ({root_cause(failure.error)})")
        self._taken_back += 1
        for phase, ms in done.phases_ms.items():
            job.emit("phase", phase=phase, ms=ms, generation=done.generation)
        return Outcome.RESUMED

    def refuse(self, job: Job, reason: str) -> Outcome:
        """Record why, and have the process end."""
        job.emit("reject", reason=reason)
        return Outcome.EXIT

    def _record(self, job: Job, repair: Repair, *, old: object) -> None:
        """Write phases and counts; every place is looked at again, not trusted."""
        for phase, ms in repair.phases_ms.items():
            job.emit("phase", phase=phase, ms=ms, generation=repair.generation)
        assert self._places is not None
        left = [reference.label for reference in self._places.holders(old)]
        job.emit(
            "references",
            generation=repair.generation,
            rebound=len(repair.holders),
            left=len(left),
            holders=left or list(repair.holders),
        )

    def settle(self, job: Job) -> None:
        """Wait until the audit has let go of what was retired."""
        assert self._pact is not None
        self._pact.audits.join()

    def close(self, job: Job) -> None:
        """End the control thread; measure the bare cost of a repair where it is compared."""
        assert self._pact is not None
        repaired = self._pact.generation > self._taken_back
        self._pact.close()
        if repaired and job.attempt.timed:
            self._measure_floor(job)

    def _measure_floor(self, job: Job) -> None:
        """Build the repaired group's like again while the other ranks wait, as they did then."""
        import torch.distributed as dist

        store = dist.PrefixStore("floor", job.attempt.store())
        if not self._repaired_here:
            store.wait(["done"], timedelta(seconds=self.options["deadline_s"]))
            return
        for ms in accelpact.measure_floor(
            job.groups.replicate,
            store=store,
            rank=job.attempt.layout.rank,
            idle_s=_FLOOR_IDLE_S,
        ):
            job.emit("floor", ms=ms)
        store.set("done", "1")
