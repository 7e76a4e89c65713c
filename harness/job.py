"""The state of the one training loop, as strategies and checkpoints see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import accelpact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelpact import StateDigest
    from harness.events import Recorder
    from harness.workload.data import Loader
    from strategies import Attempt, Groups


class Place(NamedTuple):
    """What an update that is taken back has moved, apart from gradients."""

    data: dict[str, int]
    rng_cpu: torch.Tensor
    rng_cuda: torch.Tensor | None


@dataclasses.dataclass(kw_only=True)
class TrainingJob:
    """What one rank trains. Satisfies `strategies.Job`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
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

    def place(self) -> Place:
        """Note where this rank's random streams and data are."""
        cuda = self.attempt.device.type == "cuda"
        return Place(
            data=self.loader.state_dict(),
            rng_cpu=torch.get_rng_state(),
            rng_cuda=torch.cuda.get_rng_state() if cuda else None,
        )

    def go_back(self, place: Place) -> None:
        """Go back to `place`, as if nothing had been drawn since."""
        self.loader.load_state_dict(place.data)
        torch.set_rng_state(place.rng_cpu)
        if place.rng_cuda is not None:
            torch.cuda.set_rng_state(place.rng_cuda)

    def digest(self) -> StateDigest:
        """Digest this rank's S_app as it is now."""
        return accelpact.tree_digest(self.state())
