"""What the ranks tell one another through the store."""

from __future__ import annotations

import dataclasses
import json

RELEASE = "release"
"""The verdict on a generation that went well."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank is, as it publishes it."""

    frontier: int
    """Last committed update."""
    completed: int = -1
    """Collectives of the failed group that it has completed at boundaries; -1: not counted."""

    def encode(self) -> str:
        """Return it as a value for the store."""
        return json.dumps([self.frontier, self.completed])

    @classmethod
    def decode(cls, value: bytes) -> Standing:
        """Return what `encode` made a value of."""
        frontier, completed = json.loads(value)
        return cls(frontier=frontier, completed=completed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What a rank tells all ranks of a failure."""

    generation: int
    group: str
    ranks: tuple[int, ...]
    """Members of the group; or the rank that is silent."""
    by: int
    """Rank that tells."""
    frontier: int
    """Its last committed update."""
    completed: int
    """Collectives of the group that it has completed at boundaries; -1: not counted."""
    trigger: str
    """`exception`, `heartbeat` or `audit`: what was noticed first."""
    refused: bool = False
    """There is nothing to repair: the verdict has been given."""

    def encode(self) -> str:
        """Return it as a value for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> Notice:
        """Return what `encode` made a value of."""
        fields = json.loads(value)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})
