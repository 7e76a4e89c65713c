"""Taking back an update that failed, and replacing every group that it has poisoned.

A failure inside an update leaves no rank of the chain at a boundary. Some wait in other collectives
of the same update, which those that failed will never come to; getting them out breaks these groups
too. So all groups of the model are replaced (the closure of what failed), every rank of the chain
takes the update back, and it is executed again: weights and optimizer state change only in the
optimizer's step, which is why that is all there is to undo.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import traceback
from typing import TYPE_CHECKING

from accelpact import _communicator
from accelpact._admission import demand_none
from accelpact._envelope import DISCARD, STEP
from accelpact._errors import Reason, Rejected
from accelpact._exchange import Exchange
from accelpact._guard import check_boundary
from accelpact._protocol import PhaseClock, Repair, agree, given_up
from accelpact._state import parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

    from accelpact._messages import Standing
    from accelpact._pact import Pact

MAX_DISCARDS = 3
"""How often one update is taken back before its failure is left to the launcher."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Discard:
    """What taking back an update did on this rank."""

    generation: int
    frontier: int
    """Last committed update F; F + 1 was taken back."""
    ranks: tuple[int, ...]
    """All that took it back."""
    phase: str
    """Where it struck the rank that told the others: `forward`, `backward`, or `update` for the
    rest of it."""
    trigger: str
    """`exception` here, or the `notice` of a peer's."""
    phases_ms: dict[str, float]
    """guard, admit, discard, retire, rebuild, rebind, validate, release."""
    lost_s: float
    """What this rank had spent on the update."""
    repairs: tuple[Repair, ...]
    """One per group that was replaced."""


def discard(pact: Pact, error: BaseException | None, *, began: float) -> Discard:
    """Take back the update under way; all ranks of the chain call this, by their training threads.

    1 observe: the caller has an exception, or the notice of a peer's.
    2 guard: the optimizer has not begun to step.
    3 admit: all ranks of the chain have come, at the same frontier, and say which groups are
      poisoned.
      discard: gradients and the frameworks' state go; random states and the loader go back.
    4 retire and rebuild, 5 rebind, 6 validate and release: as in `accelpact._protocol.repair`, for
      every poisoned group that this rank is a member of, in the order of their names.

    Args:
        pact: the runtime of this rank.
        error: what ended the update here, if anything did.
        began: when this rank began the update, by `time.monotonic`.

    Raises:
        Rejected: a phase failed; all of the chain have been told and end themselves.
    """
    control = pact.control
    clock = PhaseClock()
    notice = control.pending
    if notice is not None and not notice.discards:
        notice = None  # of a boundary that this rank has left: whoever is there refuses
    generation = notice.generation if notice else control.released + 1
    ranks = control.closure([pact.rank])
    phase = notice.phase if notice else _phase(pact, error)
    trigger = "notice" if notice else "exception"
    lost_s = time.monotonic() - began
    try:
        with clock.phase("guard"):
            steps = _steps(pact)
            # Asked, and recorded, before a peer that cannot take it back ends this process.
            objection = pact.admission.ask(phase, DISCARD, steps)
            if notice is None:
                generation = _claim(pact, ranks)
                control.announce(
                    generation, group=_title(pact, ranks), ranks=ranks, trigger=trigger, phase=phase
                )
            demand_none(objection)
            _require_discardable(pact, error)
        with clock.phase("admit"):
            standings = control.admit(generation, ranks=ranks, groups=pact.poisoned())
            frontier = agree(standings, ranks, own=standings[pact.rank])
            exchanges = list(_exchanges(pact, standings, ranks))
            needed = {exchange.step.name for exchange in exchanges}
            if not needed <= steps:  # a peer's failure concerns groups that this rank had not seen
                demand_none(pact.admission.ask(phase, DISCARD, needed | steps))
        with clock.phase("discard"):
            # What else is under way on them ends now, and lets the device go that `undo` waits for.
            _communicator.stop(
                [exchange.old for exchange in exchanges], deadline=pact.settings.deadline
            )
            _forget(error)
            undo(pact)
        for name in ("retire", "rebuild", "rebind", "validate"):
            with clock.phase(name):
                for exchange in exchanges:
                    step = getattr(exchange, name)
                    step(generation) if name == "rebuild" else step()
        pact.boundary.poisoned.clear()
        with clock.phase("release"):
            control.release(generation, members=len(ranks))
    except Exception as failure:
        raise given_up(pact, generation, failure, trigger=trigger) from failure
    repairs = tuple(
        Repair.of(
            exchange, generation=generation, frontier=frontier, trigger=trigger, phases_ms=clock.ms
        )
        for exchange in exchanges
    )
    for each in repairs:
        pact.audits.begin(each)
    return Discard(
        generation=generation,
        frontier=frontier,
        ranks=ranks,
        phase=phase,
        trigger=trigger,
        phases_ms=clock.ms,
        lost_s=lost_s,
        repairs=repairs,
    )


def undo(pact: Pact) -> None:
    """Put this rank back to its last boundary, and see that it is there.

    Raises:
        Rejected: `reject_uncommitted_boundary`, if something of the update is left.
    """
    for parameter in parameters(pact.optimizer):
        parameter.grad = None
    for parameter in pact.model.parameters():
        parameter.grad = None
    for framework in pact.frameworks:
        framework.undo(pact.model)
    pact.captured.restore()
    pact.boundary.take_back()
    check_boundary(pact.watches, pact.boundary)


def struck(error: BaseException | None) -> str:
    """Return in which part of an update `error` was raised, as its traceback has it."""
    places = {
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        for each in _chain(error)
        for frame in _frames(each)
    }
    if ("torch.autograd.graph", "_engine_run_backward") in places:
        return "backward"
    if ("torch.nn.modules.module", "_call_impl") in places:
        return "forward"
    return "update"


def _phase(pact: Pact, error: BaseException | None) -> str:
    """Say where this rank is: in the optimizer's step, or where its failure was raised."""
    return STEP if pact.boundary.stepping else struck(error)


def _steps(pact: Pact) -> set[str]:
    """Return the ways in which the groups are to be replaced that this rank knows to be poisoned.

    One that cannot be replaced is refused when all have come.
    """
    names, found = pact.poisoned(), set()
    for group in _communicator.registered():
        if group.group_name in names:
            try:
                found.add(Exchange(pact, group).step.name)
            except Rejected:
                found.add("none")
    return found


def _claim(pact: Pact, ranks: tuple[int, ...]) -> int:
    claimed = pact.control.claim(_title(pact, ranks))
    if isinstance(claimed, int):
        return claimed
    if claimed.discards and claimed.ranks == ranks:
        return claimed.generation
    raise Rejected(
        Reason.ONE_SIDED,
        f"update {pact.frontier + 1} failed here; rank {claimed.by} repairs group {claimed.group} "
        f"after update {claimed.frontier}, which this rank has left behind",
    )


def _title(pact: Pact, ranks: tuple[int, ...]) -> str:
    """Say which update of which chain is taken back; the same on all ranks of it."""
    return f"update {pact.frontier + 1} of ranks {ranks[0]}-{ranks[-1]}"


def _require_discardable(pact: Pact, error: BaseException | None) -> None:
    if pact.boundary.stepping:
        raise Rejected(
            Reason.UNCOMMITTED_BOUNDARY,
            f"update {pact.frontier + 1} failed while the optimizer stepped: weights may be half "
            f"written ({_first_line(error)})",
        )
    if pact.discards >= MAX_DISCARDS:
        raise Rejected(
            Reason.UNCOMMITTED_BOUNDARY,
            f"update {pact.frontier + 1} has been taken back {MAX_DISCARDS} times and fails again "
            f"({_first_line(error)})",
        )


def _exchanges(
    pact: Pact, standings: Mapping[int, Standing], ranks: tuple[int, ...]
) -> Iterator[Exchange]:
    """Yield every poisoned group of this rank in an order that all ranks have.

    Raises:
        Rejected: `reject_unsupported`, if a group has members that do not take part.
    """
    names = set(itertools.chain.from_iterable(each.groups for each in standings.values()))
    for group in sorted(_communicator.registered(), key=lambda each: str(each.group_name)):
        if group.group_name not in names:
            continue
        exchange = Exchange(pact, group)
        outside = set(exchange.description.ranks) - set(ranks)
        if outside:
            raise Rejected(
                Reason.UNSUPPORTED,
                f"expected a poisoned group of ranks {list(ranks)}, which take the update back; "
                f"group {group.group_name} has ranks {sorted(outside)} too",
            )
        yield exchange


def _forget(error: BaseException | None) -> None:
    """Let go of what the frames of the failed update hold: its graph, and retired groups."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> Iterable[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _first_line(error: BaseException | None) -> str:
    return "on a peer" if error is None else str(error).strip().split("\n", 1)[0]
