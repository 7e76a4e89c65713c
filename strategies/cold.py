"""Cold restart: torch's elastic launcher starts all ranks again, from the last checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from strategies._base import Outcome, Strategy

if TYPE_CHECKING:
    from strategies._base import Failure, Job, Settings, Timeouts


class Cold(Strategy):
    """Any failure ends the rank; torchrun ends its siblings and starts all of them again."""

    name = "cold"
    summary = "torchrun restarts every rank, the last DCP checkpoint is loaded, updates replay"
    expected_inside = "pass"
    expected_killed = "pass"
    expected_step = "pass"
    launcher_recovers = True
    variants = {
        "monitor-0.02s": {"monitor_interval": 0.02},
        "monitor-0.1s": {"monitor_interval": 0.1},
        "monitor-1s": {"monitor_interval": 1.0},
    }

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Allow one restart per planned fault."""
        found = super().settings(timeouts, num_faults=num_faults, backend=backend)
        note = "the launcher notices a dead rank once per monitor_interval"
        return dataclasses.replace(found, notes=(note,))

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """End this process; the launcher does the rest."""
        return Outcome.EXIT
