"""8 and 16 ranks: a repair while everybody else is in the next update, and deaths during it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import accelpact
from accelpact import _replacement
from accelpact._board import Board
from tests.distributed import ranks, wrappers

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelpact import Pact
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

SILENCE_S = 2.0
NOTICED_S = 10.0
"""Silence, with room for 16 processes on few cores; a collective would take 60 s."""
FAILS_AFTER = 2
MEMBER, BYSTANDER = 4, 3
"""One rank of the first column, which repairs, and one of the other."""


class TestManyRanks:
    """Two shards per replica; the first column's replicate group fails after an update."""

    @pytest.mark.parametrize("world_size", [8, 16])
    def test_every_rank_goes_on_bitwise(self, world_size: int) -> None:
        """The other column waits in the next update, and is not disturbed."""
        found = ranks.values(ranks.run(_train_twice, world_size=world_size))

        for bare, repaired in found:
            assert bare == repaired

    @pytest.mark.parametrize(
        ("world_size", "when"),
        [(8, "asked"), (8, "joining"), (8, "probing"), (8, "releasing"), (16, "building")],
    )
    def test_death_during_it_ends_all_soon(self, world_size: int, when: str) -> None:
        """Each with the same status, none with the repair done: nobody trains on alone."""
        found = ranks.run(_lose_one, when, world_size=world_size, deadline=90.0)
        victim = found.pop(BYSTANDER if when == "asked" else MEMBER)

        assert -signal.SIGKILL == victim.status
        assert {accelpact.EXIT_STATUS} == {result.status for result in found}, found
        assert NOTICED_S > max(result.ended for result in found) - victim.ended


def _train_twice(rank: Rank) -> tuple[list[str], list[str]]:
    wrappers.connect(rank, timeout=60.0)
    bare = wrappers.train(wrappers.fsdp2(replicas=rank.world_size // 2))
    return bare, _train(rank, lambda _: None)


def _lose_one(rank: Rank, when: str) -> None:
    wrappers.connect(rank, timeout=60.0)
    _train(rank, lambda pact: _have_it_die(rank, when, pact))


def _train(rank: Rank, prepare: Callable[[Pact], None]) -> list[str]:
    wrapped = wrappers.fsdp2(replicas=rank.world_size // 2)

    def attach(model: Any, optimizer: Any) -> Pact:
        pact = accelpact.attach(
            model, optimizer, store=rank.store, prefix="test", silence=SILENCE_S
        )
        prepare(pact)
        return pact

    def at_boundary(pact: Pact, update: int) -> None:
        if update == FAILS_AFTER and rank.number % 2 == 0:
            wrapped.held["replicate"] = pact.mend(wrapped.group("replicate"))

    return wrappers.train(wrapped, attach=attach, at_boundary=at_boundary)


def _have_it_die(rank: Rank, when: str, pact: Pact) -> None:
    """End one process as it comes to that step of the repair."""

    def die(*_: object, **__: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.number == BYSTANDER and when == "asked":
        Board.publish = die  # type: ignore[method-assign]
    elif rank.number == MEMBER and when == "joining":
        pact.control.admit = die  # type: ignore[method-assign]
    elif rank.number == MEMBER and when == "building":
        for step in (_replacement.Rebuild, _replacement.Reconfigure):
            step.build = die  # type: ignore[method-assign]
    elif rank.number == MEMBER and when == "probing":
        accelpact._communicator.probe = die
    elif rank.number == MEMBER and when == "releasing":
        pact.control.release = die  # type: ignore[method-assign]
