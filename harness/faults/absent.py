"""`absent@boundary`: a rank stays away from the all-reduce of the loss that follows a commit.

The absent rank issues nothing on its groups until the notice of the failure
reaches it. If it simply went on, its next collective would pair with the one
its peers wait in: a wrong sum of the same size, or an abort of the process.
Every contender gets the same notice, over the supervisor's store. `kill@boundary` ends the rank
there with SIGKILL instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from strategies import root_cause

if TYPE_CHECKING:
    import torch

    from harness.faults.notices import Notices
    from harness.job import TrainingJob
    from strategies import Strategy


class CollectiveFailed(RuntimeError):
    """The all-reduce at a boundary failed, on this rank or, by notice, on a peer."""


class Boundary:
    """What happens between a commit and the next update: the loss is averaged and logged."""

    def __init__(self, strategy: Strategy, notices: Notices) -> None:
        """Ask `strategy` whether a collective that returned has failed all the same."""
        self._strategy = strategy
        self._notices = notices

    def reduce_loss(self, job: TrainingJob, loss: torch.Tensor) -> float:
        """Average the loss over the replicate group.

        Raises:
            CollectiveFailed: a planned fault, or a real one.
        """
        fault = self._notices.due(job)
        if fault is not None and not fault.inside:
            raise CollectiveFailed(self._notices.strike(job, fault))
        total = loss.detach().clone()
        try:
            dist.all_reduce(total, group=job.groups.replicate)
            swallowed = self._strategy.swallowed(job)
            message = None if swallowed is None else root_cause(swallowed)
        except Exception as error:  # noqa: BLE001  backends raise what they like
            # Not the error itself: it leads to the work that failed, which holds a thread.
            message = root_cause(error)
        if message is not None:
            job.emit("failure", update=job.frontier, error=message)
            self._notices.tell(job, message)
            raise CollectiveFailed(message)
        return float(total.item()) / job.attempt.layout.num_replicas
