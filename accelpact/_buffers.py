"""Copies of those buffers of a model that its forward passes change.

At first all are copied. Then those that the updates so far have changed, as their version counters
say, or, after the first of them, their contents: batch normalization changes its running means and
variances and no counter (torch 2.13.0 and 2.14.1). Most models have none, and the copy is empty.
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
        lost = [
            name
            for position, (name, buffer) in enumerate(self.buffers)
            if position not in self.copies and buffer._version != self.versions[position]
        ]
        if lost:
            raise Rejected(
                Reason.UNCOMMITTED_BOUNDARY,
                f"expected an update to change the buffers that updates before it have changed; "
                f"found {', '.join(lost[:3])} changed too, of which there is no copy",
            )
        with torch.no_grad():
            for position, copy in self.copies.items():
                if not torch.equal(self.buffers[position][1], copy):
                    self.buffers[position][1].copy_(copy)


class Buffers:
    """Copies the buffers of one model, again and again."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Collect them."""
        self._buffers = [
            (name, buffer) for name, buffer in model.named_buffers() if not buffer.is_inference()
        ]
        self._first: int | None = None
        self._first_copies: dict[int, torch.Tensor] = {}
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
        self._changing |= {
            position
            for position, copy in self._first_copies.items()
            if not torch.equal(copy, self._buffers[position][1])
        }
        is_first = frontier == self._first
        wanted = range(len(versions)) if is_first else self._changing
        copies = {position: self._buffers[position][1].clone() for position in wanted}
        self._first_copies = copies if is_first else {}
        return BufferCopies(self._buffers, versions, copies)
