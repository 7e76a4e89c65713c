"""Which ranks depend on one another: those that a chain of the model's groups joins.

Ranks that share a group of the model need each other at every update. So do ranks that share a
group with one of those, and so on: a failure of any group concerns all of its chains, and nobody
else. HSDP's replicate and shard groups make one chain of the whole job; replicas that are wrapped
with DDP over groups of their own make one each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Chains:
    """The chains of one job, fixed when its ranks have met."""

    def __init__(self, world_size: int, groups: Iterable[Iterable[int]]) -> None:
        """Join the members of each of `groups`.

        Args:
            world_size: number of ranks in W.
            groups: global ranks of every group of the model, of all ranks' models.
        """
        self._chain: dict[int, set[int]] = {rank: {rank} for rank in range(world_size)}
        for group in groups:
            self._join(group)

    def _join(self, group: Iterable[int]) -> None:
        joined: set[int] = set()
        for rank in group:
            joined |= self._chain[rank]
        for rank in joined:
            self._chain[rank] = joined

    def closure(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all that depend on any of `ranks`, themselves included, in order."""
        return tuple(sorted(set().union(*(self._chain[rank] for rank in ranks))))
