"""The state of the one training loop, as strategies and checkpoints see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import accelpact

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accelpact import StateDigest
    from harness.events import Recorder
    from harness.workload.data import Loader
    from harness.workload.training import Training
    from strategies import Attempt, Groups


@dataclasses.dataclass(kw_only=True)
class TrainingJob:
    """What one rank trains. Satisfies `strategies.Job`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    training: Training
    loader: Loader
    attempt: Attempt
    groups: Groups
    recorder: Recorder
    frontier: int = 0

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event to the run's record."""
        self.recorder.emit(event, **fields)

    def state(self) -> Mapping[str, torch.Tensor | int]:
        """This rank's S_app as it is now, without copies."""
        return accelpact.application_state(
            self.model, self.optimizer, cursor=self.loader.cursor, frontier=self.frontier
        )

    def digest(self) -> StateDigest:
        """Digest this rank's S_app as it is now."""
        return accelpact.tree_digest(self.state())
