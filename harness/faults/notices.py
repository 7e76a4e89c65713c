"""How a failure is made known to the rank that stayed away, and which faults have fired already."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store

    from harness.job import TrainingJob
    from harness.spec import Fault

_PATIENCE_S = 60.0
"""How long an absent rank waits for the notice, beyond the group's timeout."""


class Notices:
    """The same for every contender, over the supervisor's store."""

    def __init__(self, faults: tuple[Fault, ...], *, store: Store) -> None:
        """Plan `faults`; `store` remembers what has fired, whatever restarts."""
        self._faults = {fault.frontier: fault for fault in faults}
        self._store = store
        self._known: set[int] = set()

    def due(self, job: TrainingJob) -> Fault | None:
        """Return the fault that this rank is to commit at the present frontier, if any is left."""
        layout, fault = job.attempt.layout, self._faults.get(job.frontier)
        if fault is None or layout.rank != layout.world_size - 1:
            return None
        return None if self._store.check([_fired(job)]) else fault

    def strike(self, job: TrainingJob, fault: Fault) -> str:
        """Do to this rank what is planned; return what came of it, if it still lives."""
        return self._kill(job, fault) if fault.kind == "kill" else self.stay_away(job, fault)

    def _kill(self, job: TrainingJob, fault: Fault) -> str:
        """End this process as nothing can be caught; the store remembers that it was."""
        self._store.set(_fired(job), "1")
        job.emit("fault", update=job.frontier, role="killed", phase=fault.phase)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def fail(self, job: TrainingJob, fault: Fault) -> NoReturn:
        """Raise here what a collective that failed would raise; nobody stays away."""
        self._store.set(f"fired/{job.frontier}", "1")
        job.emit("fault", update=job.frontier, phase=fault.phase)
        raise dist.DistBackendError("injected: a collective of the optimizer's step failed")

    def stay_away(self, job: TrainingJob, fault: Fault) -> str:
        """Issue nothing until a peer has told of the failure; return what came of it."""
        self._store.set(_fired(job), "1")
        job.emit("fault", update=job.frontier, role="absent", phase=fault.phase)
        patience = job.attempt.settings.group_timeout + _PATIENCE_S
        try:
            self._store.wait([_key(job)], timedelta(seconds=patience))
        except dist.DistStoreError:
            return f"no peer reported a failure within {patience:g} s of the fault"
        self._have(job)
        return "notice of a peer's failure"

    def tell(self, job: TrainingJob, message: str) -> None:
        """Tell the absent rank, if there is one, that a collective has failed here."""
        if self._store.check([_fired(job)]):
            self._store.set(_key(job), message)
        self._have(job)

    def _have(self, job: TrainingJob) -> None:
        """Record when this rank had its notice; what the same failure leads to is none."""
        if job.frontier not in self._known:
            self._known.add(job.frontier)
            job.emit("notice", update=job.frontier)


def _fired(job: TrainingJob) -> str:
    return f"fired/{job.frontier}"


def _key(job: TrainingJob) -> str:
    # Not by attempt: where each replica has its own launcher, ranks count theirs differently.
    return f"notice/{job.frontier}"
