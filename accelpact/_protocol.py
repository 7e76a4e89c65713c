"""The six phases of a repair (the paper, section IV), for a failure at a committed boundary."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accelpact import _communicator
from accelpact._admission import demand_none
from accelpact._envelope import L1
from accelpact._errors import Reason, Rejected
from accelpact._exchange import Exchange
from accelpact._guard import check_boundary
from accelpact._messages import BOUNDARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed import ProcessGroup

    from accelpact._communicator import Description
    from accelpact._messages import Notice, Standing
    from accelpact._pact import Pact


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What a repair did on this rank."""

    group: ProcessGroup
    """The replacement: another object after a rebuild, the same one after a reconfiguration."""
    generation: int
    frontier: int
    ranks: tuple[int, ...]
    """Members of the group, R."""
    replacement: str
    """`rebuild` or `reconfigure`."""
    trigger: str
    """`exception` here, or the `notice` of a peer's."""
    phases_ms: dict[str, float]
    """guard, admit, retire, rebuild, rebind, validate, release."""
    holders: tuple[str, ...]
    """Paths of the references that were rebound."""

    @classmethod
    def of(
        cls,
        exchange: Exchange,
        *,
        generation: int,
        frontier: int,
        trigger: str,
        phases_ms: dict[str, float],
    ) -> Repair:
        """Sum up what has become of one group."""
        return cls(
            group=exchange.new,
            generation=generation,
            frontier=frontier,
            ranks=exchange.description.ranks,
            replacement=exchange.step.name,
            trigger=trigger,
            phases_ms=phases_ms,
            holders=tuple(reference.label for reference in exchange.holders),
        )

    @property
    def in_place(self) -> bool:
        """Whether the group is the same object as before."""
        return self.replacement == "reconfigure"


def repair(
    pact: Pact, group: ProcessGroup, *, completed: int = -1, notice: Notice | None = None
) -> Repair:
    """Replace `group` in place of restarting; every member calls this, nobody else.

    1 observe: the caller has an exception, or the notice of a peer's.
    2 guard: this rank is at a committed boundary.
    3 admit: all that depend on a member pledge their frontier, and all are equal.
    4 retire and rebuild: the old communicator goes, the device is idle, a new one takes its name.
    5 rebind: every cached reference to the old group names the new one.
    6 validate and release: the new group computes; all are let go.

    Args:
        pact: the runtime of this rank.
        group: the group that failed.
        completed: collectives of `group` that completed here at boundaries, which must be as many
            on all members; -1 if nobody counts.
        notice: a peer's notice of this failure, if that is why.

    Raises:
        Rejected: any phase failed. All that depend on a member have been told and end themselves;
            the caller must end this process with `EXIT_STATUS`.
    """
    control = pact.control
    clock = PhaseClock()
    generation = notice.generation if notice else control.released + 1
    trigger = "notice" if notice else "exception"
    try:
        with clock.phase("guard"):
            description = _communicator.describe(group)
            if notice is None:
                generation = _claim(pact, description)
                # first of all: the others answer while this rank looks at itself
                control.announce(
                    generation,
                    group=description.name,
                    ranks=description.ranks,
                    completed=completed,
                    trigger=trigger,
                )
            exchange = Exchange(pact, group)
            demand_none(pact.admission.ask(BOUNDARY, L1, [exchange.step.name]))
            check_boundary(pact.watches, pact.boundary)
        with clock.phase("admit"):
            standings = control.admit(generation, ranks=description.ranks, completed=completed)
            frontier = agree(standings, description.ranks, own=standings[pact.rank])
        with clock.phase("retire"):
            exchange.retire()
        with clock.phase("rebuild"):
            exchange.rebuild(generation)
        with clock.phase("rebind"):
            exchange.rebind()
        with clock.phase("validate"):
            exchange.validate()
        with clock.phase("release"):
            control.release(generation, members=len(description.ranks))
    except Exception as error:
        raise given_up(pact, generation, error, trigger=trigger, group=group.group_name) from error
    done = Repair.of(
        exchange, generation=generation, frontier=frontier, trigger=trigger, phases_ms=clock.ms
    )
    pact.audits.begin(done)
    return done


def given_up(
    pact: Pact, generation: int, error: Exception, *, trigger: str, group: str | None = None
) -> Rejected:
    """Tell all that take part that `generation` has failed here; return why for the caller.

    It is recorded first: once the others know, this process may be ended at any moment.
    """
    pact.audits.abandon()
    if isinstance(error, Rejected):
        rejection = error
    else:
        rejection = Rejected(Reason.DEADLINE, f"a phase of the repair failed: {error}")
    pact.reject(rejection.reason, str(rejection), trigger=trigger, group=group)
    pact.control.abort(generation, f"rank {pact.rank}: {error}")
    return rejection


def _claim(pact: Pact, description: Description) -> int:
    """Get the generation of this repair, after those that need this rank and came first."""
    while True:
        claimed = pact.control.claim(description.name)
        if isinstance(claimed, int):
            return claimed
        if claimed.discards:
            raise Rejected(
                Reason.ONE_SIDED,
                f"a collective of group {description.name} failed after update "
                f"{claimed.frontier}, which rank {claimed.by} has left behind: it takes back "
                f"update {claimed.frontier + 1}",
            )
        other = claimed.group
        counted = -1 if claimed.completed < 0 else pact.boundary.completed[other]
        pact.joined[other] = repair(
            pact, _communicator.find(other), completed=counted, notice=claimed
        )


def agree(standings: Mapping[int, Standing], members: tuple[int, ...], *, own: Standing) -> int:
    """Return the frontier that all share, or refuse.

    Raises:
        Rejected: frontiers differ, or a member has completed the collective that failed here.
    """
    frontiers = {rank: standing.frontier for rank, standing in standings.items()}
    if set(frontiers.values()) != {own.frontier}:
        raise Rejected(
            Reason.FRONTIER_MISMATCH,
            f"expected all ranks that depend on the group to have committed update "
            f"{own.frontier}, as this one has; found {frontiers}",
        )
    completed = {rank: standings[rank].completed for rank in members}
    if set(completed.values()) != {own.completed}:
        raise Rejected(
            Reason.ONE_SIDED,
            f"expected all members to have completed {own.completed} collectives of the group "
            f"at boundaries, as this one has; found {completed}",
        )
    return own.frontier


class PhaseClock:
    """Milliseconds per phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = (time.perf_counter() - start) * 1e3
