"""The control plane alone: the fence, and ranks that have finished."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import accelpact
from accelpact._boundary import Boundary
from accelpact._control import ControlPlane
from tests.distributed import ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


class TestFence:
    """A rank that has pledged commits nothing until the release."""

    def test_pledged_rank_does_not_step_until_the_release(self) -> None:
        """The step hook waits while the repair of others is under way."""
        ranks.values(ranks.run(_step_while_pledged, world_size=1))

    def test_step_under_way_is_committed_before_the_pledge(self) -> None:
        """The frontier that is published counts the step that had already begun."""
        ranks.values(ranks.run(_pledge_while_stepping, world_size=1))

    def test_pledge_without_a_verdict_ends_the_process(self) -> None:
        """A rank that is left alone with its pledge gives up at the deadline."""
        (result,) = ranks.run(_pledge_without_a_verdict, world_size=1)

        assert accelpact.EXIT_STATUS == result.status
        assert result.reports

    def test_refused_generation_ends_the_process_with_its_reason(self) -> None:
        """The control thread does it, since the training thread may be blocked."""
        (result,) = ranks.run(_abort_after_pledge, world_size=1)

        assert accelpact.EXIT_STATUS == result.status
        assert ["abort: said so"] == result.reports


class TestKeys:
    """Keys of a generation go when nobody needs them any more, and not before."""

    def test_late_reader_finds_the_verdict(self) -> None:
        """Both control threads have read it long before the training thread of one member does."""
        ranks.values(ranks.run(_read_verdict_late, world_size=1))

    def test_generation_that_is_over_cannot_be_claimed(self) -> None:
        """Its claim was deleted, and a rank that has not looked since must not take it for new."""
        ranks.values(ranks.run(_claim_what_is_over, world_size=1))


class TestFarewell:
    """A rank that has finished closes its end of the control plane."""

    def test_control_thread_ends(self) -> None:
        """Whether or not it has taken part in a repair."""
        ranks.values(ranks.run(_close_all, world_size=1))

    def test_others_are_not_disturbed(self) -> None:
        """They are told nothing, step on, and their threads go on waiting."""
        ranks.values(ranks.run(_close_one, world_size=1))

    def test_nothing_is_left_of_a_repair_after_it(self) -> None:
        """Who has left deletes nothing any more: the others do not wait for that."""
        ranks.values(ranks.run(_repair_after_a_farewell, world_size=1))

    def test_closing_while_pledged_ends_with_the_release(self) -> None:
        """A rank that finishes during the repair of others does not wait for the deadline."""
        ranks.values(ranks.run(_close_while_pledged, world_size=1))


def _planes(rank: Rank, deadline: float = 20.0) -> list[ControlPlane]:
    """Two ranks' ends of one control plane, in one process."""
    return [
        ControlPlane(
            rank.store,
            prefix="fence",
            rank=number,
            world_size=2,
            boundary=Boundary(),
            deadline=deadline,
            patience=deadline,
            on_abort=lambda reason, _: rank.report(reason),
        )
        for number in range(2)
    ]


def _announce(plane: ControlPlane) -> None:
    plane.announce(1, group="g", ranks=[0], completed=-1, trigger="exception")


def _frontiers(plane: ControlPlane) -> list[int]:
    return [standing.frontier for standing in plane.admit(1, ranks=[0], completed=-1).values()]


def _step_while_pledged(rank: Rank) -> None:
    member, bystander = _planes(rank)
    for plane in (member, bystander):
        plane.boundary.commit(5)
    _announce(member)
    assert [5, 5] == _frontiers(member)
    step = _Started(bystander.before_step)
    assert not step.ended_within(0.3)
    assert bystander.boundary.declared
    member.release(1, members=1)
    assert step.ended_within(10)
    assert not bystander.boundary.declared


def _pledge_while_stepping(rank: Rank) -> None:
    member, bystander = _planes(rank)
    member.boundary.commit(6)
    bystander.boundary.commit(5)
    bystander.before_step()
    _announce(member)
    answers: list[list[int]] = []
    asked = _Started(lambda: answers.append(_frontiers(member)))
    assert not asked.ended_within(0.3)
    bystander.boundary.commit(6)
    assert asked.ended_within(10)
    assert [[6, 6]] == answers


def _pledge_without_a_verdict(rank: Rank) -> None:
    member, _ = _planes(rank, deadline=1.0)
    _announce(member)
    threading.Event().wait(20)


def _abort_after_pledge(rank: Rank) -> None:
    member, _ = _planes(rank)
    # Its own thread would end the same process: only one of the two may report.
    member.close()
    _announce(member)
    member.abort(1, "said so")
    threading.Event().wait(20)


def _read_verdict_late(rank: Rank) -> None:
    prompt, late = _planes(rank)
    prompt.announce(1, group="g", ranks=[0, 1], completed=-1, trigger="exception")
    admitted = [_Started(lambda each=each: _frontiers(each)) for each in (prompt, late)]
    assert all(each.ended_within(10) for each in admitted)
    board = late._main
    store = board.store
    late._main = SimpleNamespace(
        count_done=board.count_done, verdict=lambda each: reading.wait(20) and board.verdict(each)
    )
    reading = threading.Event()
    released = _Started(lambda: late.release(1, members=2))
    ranks.wait_until(lambda: store.check(["done/1"]))
    prompt.release(1, members=2)
    assert ranks.wait_until(lambda: late.released == 1)
    assert not released.ended_within(0.3)
    reading.set()
    assert released.ended_within(10)
    assert ranks.wait_until(lambda: not store.check(["verdict/1"]))


def _claim_what_is_over(rank: Rank) -> None:
    member, bystander = _planes(rank)
    assert member.claim("g") == 1
    _announce(member)
    _frontiers(member)
    member.release(1, members=1)
    ranks.wait_until(lambda: [1, 1] == [plane.released for plane in (member, bystander)])
    keys = rank.store().num_keys()
    assert not bystander._claim(bystander._main, 1, "another")
    assert keys == rank.store().num_keys()
    assert bystander.claim("another") == 2


def _close_all(rank: Rank) -> None:
    planes = _planes(rank)
    _announce(planes[0])
    _frontiers(planes[0])
    planes[0].release(1, members=1)
    ranks.wait_until(lambda: [1, 1] == [plane.released for plane in planes])
    for plane in planes:
        plane.close()
    assert 0 == _control_threads()


def _close_one(rank: Rank) -> None:
    leaving, staying = _planes(rank)
    leaving.close()
    assert 1 == _control_threads()
    for update in range(1, 4):
        assert _Started(staying.before_step).ended_within(10)
        staying.boundary.commit(update)
    assert (3, 0, 0) == (staying.boundary.frontier, staying.pledged, staying.released)
    staying.close()
    assert 0 == _control_threads()


def _repair_after_a_farewell(rank: Rank) -> None:
    leaving, staying = _planes(rank)
    meetings = [_Started(lambda each=each: each.meet([])) for each in (leaving, staying)]
    assert all(each.ended_within(10) for each in meetings)
    leaving.close()
    assert ranks.wait_until(lambda: {0} == staying.ended)
    keys = rank.store().num_keys()
    staying.closure = lambda _: (1,)  # as where the two share no group
    staying.announce(1, group="g", ranks=[1], trigger="exception")
    staying.admit(1, ranks=[1])
    staying.release(1, members=1)
    # One less: what woke the control thread that has left goes too.
    assert ranks.wait_until(lambda: keys - 1 == rank.store().num_keys())
    staying.close()


def _close_while_pledged(rank: Rank) -> None:
    member, bystander = _planes(rank)
    _announce(member)
    _frontiers(member)
    closing = _Started(bystander.close)
    assert not closing.ended_within(0.3)
    member.release(1, members=1)
    assert closing.ended_within(5)


def _control_threads() -> int:
    return sum(thread.name == "accelpact-control" for thread in threading.enumerate())


class _Started:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=function, daemon=True)
        self._thread.start()

    def ended_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()
