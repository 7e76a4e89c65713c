"""Where this rank is: between two updates, or inside one. Plain facts, kept by hooks.

The training thread writes; the control thread reads, and the order of the writes is what the
fence in `accelpact._control` relies on.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from accelpact._forward import ForwardNotice
from accelpact._state import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_GRADIENT = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")


class Boundary:
    """What this rank has committed and whether it has begun anything since.

    Attributes:
        frontier: last committed update F.
        entered: a forward pass that keeps a graph has begun since the last commit.
        stepping: the optimizer's step has begun and is not committed.
        waiting: name of the group in whose collective the training thread is, or None.
        completed: boundary collectives that have completed, by name of the group.
        poisoned: names of groups outside the model in which a collective of the update failed.
    """

    __slots__ = (
        "_consumed",
        "_parameters",
        "completed",
        "entered",
        "frontier",
        "poisoned",
        "stepping",
        "waiting",
    )

    def __init__(self, frontier: int = 0) -> None:
        """Begin at the boundary after update `frontier`."""
        self.frontier = frontier
        self.entered = False
        self.stepping = False
        self.waiting: str | None = None
        self.completed: Counter[str] = Counter()
        self.poisoned: set[str] = set()
        self._parameters: list[torch.Tensor] = []
        self._consumed: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def declared(self) -> bool:
        """Whether nothing has begun since the last commit."""
        return not (self.entered or self.stepping)

    def commit(self, frontier: int) -> None:
        """Make `frontier` the last committed update."""
        self.frontier = frontier
        self.entered = False
        self.stepping = False

    def take_back(self) -> None:
        """Be at the boundary again that the update under way began at."""
        self.entered = False
        self.stepping = False

    def consume(self) -> None:
        """Note which gradients the optimizer's step has just applied.

        It is most of what an update costs, so it runs in C, without a bytecode per gradient.
        """
        gradients = [each for each in map(_GRADIENT, self._parameters) if each is not None]
        self._consumed = list(
            zip(map(weakref.ref, gradients), map(_VERSION, gradients), strict=True)
        )

    def outstanding(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the paths of those `gradients` that no step has consumed."""
        consumed = {(id(reference()), version) for reference, version in self._consumed}
        return [
            path
            for path, gradient in gradients
            if (id(gradient), gradient._version) not in consumed
        ]

    def notice_forward(self, model: torch.nn.Module) -> Callable[[], None]:
        """Set `entered` when `model` begins a forward pass; return what stops that."""

        def entering() -> None:
            # An evaluation without gradients leaves nothing behind that a repair could spoil.
            if torch.is_grad_enabled():
                self.entered = True

        return ForwardNotice(model, entering).remove

    def notice_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Note the gradients that `optimizer` applies; return what stops that."""
        self._parameters = parameters(optimizer)

        def stepped(*_: Any) -> None:
            self.consume()

        remove: Callable[[], None] = optimizer.register_step_post_hook(stepped).remove
        return remove
