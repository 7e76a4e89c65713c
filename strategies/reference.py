"""No recovery: what every other contender is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies._base import Outcome, Strategy

if TYPE_CHECKING:
    from strategies._base import Failure, Job, Settings, Timeouts


class Reference(Strategy):
    """Trains without a fault; two of them in a block show that training is deterministic."""

    name = "reference"
    summary = "uninterrupted training, no recovery"

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Restart nothing: it would no longer be uninterrupted."""
        del num_faults
        return super().settings(timeouts, num_faults=0, backend=backend)

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Give up: nothing was to fail here."""
        return Outcome.EXIT
