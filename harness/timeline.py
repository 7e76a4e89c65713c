"""A run's events, ordered and indexed: what all measures are taken from."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from harness.records import Event


class Timeline:
    """Events of one run in order of time. Ranks share one clock."""

    def __init__(self, events: Sequence[Event], *, world_size: int) -> None:
        """Sort `events`; `world_size` is the number of ranks that should appear."""
        self.events = sorted(events, key=lambda event: event.t)
        self.world_size = world_size

    def select(
        self, name: str, *, update: int | None = None, rank: int | None = None
    ) -> list[Event]:
        """Events of that name, in order of time."""
        return [
            event
            for event in self.events
            if event.event == name
            and (update is None or event.update == update)
            and (rank is None or event.rank == rank)
        ]

    def of_rank(self, rank: int) -> list[Event]:
        """Everything that `rank` wrote."""
        return [event for event in self.events if event.rank == rank]

    def slowest(
        self, events: Sequence[Event], *, of: Collection[int] | None = None
    ) -> float | None:
        """Time at which the last rank wrote one of `events`; None unless every rank did.

        Of several by one rank the first counts.

        Args:
            events: in order of time.
            of: the ranks that should have written one; by default all.
        """
        expected = set(range(self.world_size) if of is None else of)
        first: dict[int, float] = {}
        for event in events:
            if event.rank in expected:
                first.setdefault(event.rank, event.t)
        return max(first.values()) if first.keys() == expected else None

    @property
    def launch(self) -> float | None:
        """When the supervisor started the ranks."""
        found = self.select("launch")
        return found[0].t if found else None

    @property
    def end(self) -> float | None:
        """When the launcher had ended."""
        found = self.select("end")
        return found[-1].t if found else None

    @property
    def finish(self) -> float | None:
        """When the last rank had reached the target frontier and written its results."""
        return self.slowest(self.select("finish"))

    @functools.cached_property
    def fault(self) -> Event | None:
        """The first planned fault that fired."""
        found = self.select("fault")
        return found[0] if found else None

    @functools.cached_property
    def last_notice(self) -> float | None:
        """When the last rank that takes part in the first fault had its notice."""
        if self.fault is None:
            return None
        found = [
            event for event in self.select("notice", update=self.fault.update)
            if event.t >= self.fault.t
        ]  # fmt: skip
        return max(event.t for event in found) if found else None

    @functools.cached_property
    def committed(self) -> int:
        """Last update that every rank has committed, with all before it."""
        update = 0
        while len({event.rank for event in self.select("commit", update=update + 1)}) == (
            self.world_size
        ):
            update += 1
        return update

    def final_commits(self) -> Iterator[Event]:
        """The commit that counts for every rank and update of the committed history.

        After a restore an update is committed again: the last time counts.
        """
        last: dict[tuple[int, int], Event] = {}
        for event in self.select("commit"):
            if event.rank is not None and event.update is not None:
                last[event.rank, event.update] = event
        yield from (event for (_, update), event in last.items() if update <= self.committed)

    def resumed(self) -> float | None:
        """When the slowest rank began the update after the fault, for the time that it committed.

        Healthy ranks begin it early and wait in it; a restart begins it once more.
        """
        if self.fault is None or self.fault.update is None:
            return None
        following = self.fault.update + 1
        times = []
        for rank in range(self.world_size):
            commits = self.select("commit", update=following, rank=rank)
            if not commits:
                return None
            begins = self.select("begin", update=following, rank=rank)
            before = [event.t for event in begins if event.t <= commits[0].t]
            if not before:
                return None
            times.append(max(before))
        return max(times)
