"""The six phases of a repair (the paper, section IV), for a failure at a committed boundary."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accelpact import _communicator
from accelpact._errors import Reason, Rejected
from accelpact._guard import check_boundary
from accelpact._rebind import rebind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from accelpact._pact import Pact


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What a repair did on this rank."""

    group: ProcessGroup
    """The replacement."""
    generation: int
    frontier: int
    ranks: tuple[int, ...]
    """Members of the group, R."""
    phases_ms: dict[str, float]
    """guard, admit, retire, rebuild, rebind, validate, release."""
    holders: tuple[str, ...]
    """Paths of the references that were rebound."""


def repair(pact: Pact, group: ProcessGroup) -> Repair:
    """Replace `group` in place of restarting; every member calls this, nobody else.

    1 observe: the caller has an exception, or the notice of a peer's.
    2 guard: this rank is at a committed boundary, its device is idle.
    3 admit: all of W pledge their frontier, and all are equal.
    4 retire and rebuild: the old communicator goes, a new one takes its name.
    5 rebind: every cached reference to the old group names the new one.
    6 validate and release: the new group computes; W is let go.

    Raises:
        Rejected: any phase failed. All of W have been told and end themselves;
            the caller must end this process with `EXIT_STATUS`.
    """
    control = pact.control
    clock = _PhaseClock()
    generation = control.released + 1
    try:
        with clock.phase("guard"):
            description = _communicator.describe(group)
            generation = control.claim(description.name)
            # first of all: the others answer while this rank looks at itself
            control.announce(generation, group=description.name, ranks=description.ranks)
            check_boundary(pact.watches, declared=control.declared)
        with clock.phase("admit"):
            frontier = _agree(control.frontiers(generation), own=control.frontier)
        with clock.phase("retire"):
            holders = pact.index.holders(group)
            pact.reaper.take(group)
            _communicator.retire(group, description, deadline=pact.deadline)
        with clock.phase("rebuild"):
            new = _communicator.rebuild(
                description,
                store=control.rendezvous(generation, description.name),
                rank=pact.rank,
            )
        with clock.phase("rebind"):
            rebind(holders, new)
            _require_none_left(pact, group)
        with clock.phase("validate"):
            _communicator.probe(new, description)
        with clock.phase("release"):
            control.release(generation, members=len(description.ranks))
    except Exception as error:
        control.abort(generation, f"rank {pact.rank}: {error}")
        if isinstance(error, Rejected):
            raise
        raise Rejected(Reason.DEADLINE, f"a phase of the repair failed: {error}") from error
    finally:
        pact.reaper.release()
    return Repair(
        group=new,
        generation=generation,
        frontier=frontier,
        ranks=description.ranks,
        phases_ms=clock.ms,
        holders=tuple(reference.label for reference in holders),
    )


def _agree(frontiers: list[int], *, own: int) -> int:
    """Return the frontier that all ranks share, or refuse."""
    if set(frontiers) != {own}:
        raise Rejected(
            Reason.FRONTIER_MISMATCH,
            f"expected all ranks to have committed update {own}, as this one has; "
            f"found {dict(enumerate(frontiers))}",
        )
    return own


def _require_none_left(pact: Pact, group: ProcessGroup) -> None:
    left = [reference.label for reference in pact.index.holders(group)]
    if left:
        raise Rejected(
            Reason.STALE_REFERENCE,
            f"expected no reference to the retired group; found {', '.join(left)}",
        )


class _PhaseClock:
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
