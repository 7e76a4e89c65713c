"""Copies of those buffers of a model that its forward passes change.

Which they are is seen from the tensors' version counters: at first all are copied, then those that
the updates so far have changed. Most models have none, and the copy is empty.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BufferCopies:
    """The buffers of one rank at one boundary."""

    buffers: Sequence[tuple[str, torch.Tensor]]
    """All of them, with their names."""
    versions: Sequence[int]
    copies: dict[int, torch.Tensor]
    """By position; those that were copied."""

    def restore(self) -> None:
        """Put back what has changed since.

        Raises:
            Rejected: `reject_uncommitted_boundary`, if one of those was not copied.
        """
        changed = [
            position
            for position, (_, buffer) in enumerate(self.buffers)
            if buffer._version != self.versions[position]
        ]
        lost = [self.buffers[position][0] for position in changed if position not in self.copies]
        if lost:
            raise Rejected(
                Reason.UNCOMMITTED_BOUNDARY,
                f"expected an update to change the buffers that updates before it have changed; "
                f"found {', '.join(lost[:3])} changed too, of which there is no copy",
            )
        with torch.no_grad():
            for position in changed:
                self.buffers[position][1].copy_(self.copies[position])


class Buffers:
    """Copies the buffers of one model, again and again."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Collect them."""
        self._buffers = [
            (name, buffer) for name, buffer in model.named_buffers() if not buffer.is_inference()
        ]
        self._first: int | None = None
        self._previous: list[int] = []
        self._changing: set[int] = set()

    def copy(self, frontier: int) -> BufferCopies:
        """Copy those that have ever changed between two calls; all, before the first update.

        Args:
            frontier: last committed update.
        """
        versions = [buffer._version for _, buffer in self._buffers]
        if self._first is None:
            self._first, self._previous = frontier, versions
        if versions != self._previous:
            pairs = enumerate(zip(self._previous, versions, strict=True))
            self._changing |= {position for position, (before, now) in pairs if before != now}
            self._previous = versions
        wanted = range(len(versions)) if frontier == self._first else self._changing
        copies = {position: self._buffers[position][1].clone() for position in wanted}
        return BufferCopies(self._buffers, versions, copies)
