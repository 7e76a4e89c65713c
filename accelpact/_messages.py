"""What the ranks tell one another through the store."""

from __future__ import annotations

import dataclasses
import json

BOUNDARY = "boundary"
"""The phase between two updates; the others are parts of an update."""
RELEASE = "release"
"""The verdict on a generation that went well."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank is, as it publishes it."""

    frontier: int
    """Last committed update."""
    completed: int = -1
    """Collectives of the failed group that it has completed at boundaries; -1: not counted."""
    groups: tuple[str, ...] = ()
    """Names of the groups that it needs replaced, where that is more than the failed one."""

    envelope: str = ""
    """Digest of the envelope that it has read, where ranks meet for the first time."""

    def encode(self) -> str:
        """Return it as a value for the store."""
        return json.dumps([self.frontier, self.completed, self.groups, self.envelope])

    @classmethod
    def decode(cls, value: bytes) -> Standing:
        """Return what `encode` made a value of."""
        frontier, completed, groups, envelope = json.loads(value)
        return cls(frontier=frontier, completed=completed, groups=tuple(groups), envelope=envelope)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What a rank tells all ranks of a failure."""

    generation: int
    group: str
    """Its name, or which update is taken back."""
    ranks: tuple[int, ...]
    """Members of the group; all that must take an update back; or the rank that is silent."""
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
    phase: str = BOUNDARY
    """Where it struck the rank that tells."""

    @property
    def discards(self) -> bool:
        """Whether an update is taken back: then all of `ranks` come by their training threads."""
        return self.phase != BOUNDARY

    def encode(self) -> str:
        """Return it as a value for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> Notice:
        """Return what `encode` made a value of."""
        fields = json.loads(value)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})
