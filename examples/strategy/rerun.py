"""A contender of another package: the training function runs again in the same processes.

Any failure leaves the training function on every rank, which then drops its groups, waits for the
others and calls it again; the loop restores the last checkpoint. It is what one writes without any
package for it. `docs/adding-a-strategy.md` explains the parts.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from strategies import Failure, Job, Outcome, Settings, Strategy, Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategies import Attempt

_MEETING = timedelta(seconds=60)


class Rerun(Strategy):
    """Restart in process without a supervisor's help."""

    name = "rerun"
    summary = "the training function is called again in the same processes, a checkpoint is loaded"
    expected_inside = "pass"

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Bound every group alike, since nobody else brings a rank out of a collective."""
        most = {"most": num_faults}
        found = super().settings(timeouts, num_faults=num_faults, backend=backend)
        return dataclasses.replace(found, shard_timeout=timeouts.group, options=most)

    def enter(self, body: Callable[[Attempt], None], attempt: Attempt) -> None:
        """Call `body` until it returns, as an attempt of its own each time."""
        most: int = attempt.settings.options["most"]
        for index in range(most + 1):
            try:
                body(dataclasses.replace(attempt, index=attempt.index + index))
            except Exception:
                if index == most:
                    raise
            else:
                return
            dist.destroy_process_group()
            store, key = attempt.store(), f"rerun/{attempt.index}/{index}"
            if store.add(key, 1) == attempt.layout.world_size:
                store.set(f"{key}/all", "1")
            store.wait([f"{key}/all"], _MEETING)

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Let the exception reach `enter`."""
        return Outcome.RERAISE
