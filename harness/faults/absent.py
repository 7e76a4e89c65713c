"""`absent@boundary`: a rank stays away from the all-reduce of the loss that follows a commit.

The absent rank issues nothing on its groups until the notice of the failure
reaches it. If it simply went on, its next collective would pair with the one
its peers wait in: a wrong sum of the same size, or an abort of the process.
Every contender gets the same notice, over the supervisor's store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from strategies import root_cause

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from harness.job import TrainingJob
    from harness.spec import Fault

_PATIENCE_S = 60.0
"""How long the absent rank waits for the notice, beyond the group's timeout."""


class CollectiveFailed(RuntimeError):
    """The all-reduce at a boundary failed, on this rank or, by notice, on a peer."""


class Boundary:
    """What happens between a commit and the next update: the loss is averaged and logged."""

    def __init__(self, faults: tuple[Fault, ...], *, store: Store) -> None:
        """Plan `faults`; `store` carries the notices and remembers what has fired."""
        self._faults = {fault.update: fault for fault in faults}
        self._store = store

    def reduce_loss(self, job: TrainingJob, loss: torch.Tensor) -> float:
        """Average the loss over the replicate group.

        Raises:
            CollectiveFailed: a planned fault, or a real one.
        """
        update = job.frontier
        if self._is_absent(job, update):
            self._stay_away(job, update)
        total = loss.detach().clone()
        try:
            dist.all_reduce(total, group=job.groups.replicate)
        except Exception as error:  # noqa: BLE001  backends raise what they like
            message = root_cause(error)
            job.emit("failure", update=update, error=message)
            self._store.set(_notice(job, update), message)
            job.emit("notice", update=update)
            raise CollectiveFailed(message) from None
        return float(total.item()) / job.attempt.layout.num_replicas

    def _is_absent(self, job: TrainingJob, update: int) -> bool:
        layout = job.attempt.layout
        if update not in self._faults or layout.rank != layout.world_size - 1:
            return False
        return int(self._store.add(f"fired/{update}", 1)) == 1

    def _stay_away(self, job: TrainingJob, update: int) -> None:
        job.emit("fault", update=update, role="absent")
        patience = job.attempt.settings.group_timeout + _PATIENCE_S
        try:
            self._store.wait([_notice(job, update)], timedelta(seconds=patience))
        except dist.DistStoreError:
            raise CollectiveFailed(
                f"no peer reported a failure within {patience:g} s of the fault"
            ) from None
        job.emit("notice", update=update)
        raise CollectiveFailed("notice of a peer's failure")


def _notice(job: TrainingJob, update: int) -> str:
    return f"notice/{job.attempt.index}/{update}"
