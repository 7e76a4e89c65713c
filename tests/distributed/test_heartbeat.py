"""Ranks that end: in silence, with a farewell, or needed by nobody."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import accelpact
from accelpact._board import Board
from accelpact._heartbeat import Heartbeat
from tests.distributed import ranks, scripts, wrappers

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SILENCE_S = 1.0
FROZEN_S = 7
"""For how long nothing of a frozen process runs, unless all others have ended before."""
NOTICED_S = 6.0
"""Silence, and as long again without getting on, with room for a busy machine."""
SILENT = accelpact.Reason.RANK_SILENT.value
GONE = accelpact.Reason.RANK_GONE.value
REFUSED = accelpact.EXIT_STATUS
REPAIRED = ["repaired/0", "repaired/2"]
_ALIVE: list[int] = []
"""Descriptor of this process that says that it lives."""


class TestHeartbeat:
    """Several ranks' heartbeats in one process."""

    def test_silence_is_noticed_by_all_and_ends_with_the_next_beat(self) -> None:
        """One watches, the others read what it has found."""
        ranks.values(ranks.run(_fall_silent, world_size=1))

    def test_farewell_is_no_silence(self) -> None:
        """Whoever said it is gone, and the ring closes around it."""
        ranks.values(ranks.run(_say_farewell, world_size=1))


def _beating(rank: Rank, num: int) -> list[Heartbeat]:
    store = rank.store()
    made = [
        Heartbeat(store, rank=each, world_size=num, silence=0.4, on_beat=lambda: None)
        for each in range(num)
    ]
    for each in made:
        each.start()
    return made


def _fall_silent(rank: Rank) -> None:
    first, second, third = _beating(rank, 3)
    second._beat = lambda: None  # type: ignore[method-assign]
    assert _agree([first, third], {1: "silent"})
    # It still looks, finds itself in the record, and objects.
    del second._beat
    second._watched = 1
    assert _agree([first, second, third], {})
    for each in (first, second, third):
        each.close(5.0)


def _say_farewell(rank: Rank) -> None:
    first, second, third = _beating(rank, 3)
    second.close(5.0)
    assert _agree([first, third], {1: "gone"})
    third._over.set()
    assert _agree([first], {1: "gone", 2: "silent"})
    first.close(5.0)


def _agree(heartbeats: list[Heartbeat], ended: dict[int, str]) -> bool:
    ranks.wait_until(lambda: all(ended == each.ended for each in heartbeats), patience=10.0)
    return all(ended == each.ended for each in heartbeats)


class TestSilentRank:
    """All collectives may take 10 minutes; one rank's process stands still."""

    @pytest.mark.parametrize("where", ["update", "boundary"])
    def test_ranks_that_hang_on_it_end_soon(self, where: str, tmp_path: Path) -> None:
        """By the heartbeat, which the record says; the frozen rank ends when it wakes up."""
        found = ranks.run(_freeze, where, str(tmp_path), deadline=40.0)

        assert [REFUSED] * 4 == [result.status for result in found], found
        for result in found[:3]:
            assert NOTICED_S > result.ended - _frozen(found), found
        for rank in range(3):
            (reject,) = scripts.events(tmp_path, rank, "reject")
            assert ("heartbeat", True) == (reject["trigger"], SILENT in reject["reason"]), reject

    @pytest.mark.parametrize("which", [0, 2, 1], ids=["claimer", "member", "bystander"])
    def test_repair_that_needs_it_is_refused_soon(self, which: int, tmp_path: Path) -> None:
        """Though a rank that is late would be waited for."""
        found = ranks.run(_freeze_in_repair, which, str(tmp_path), deadline=40.0)

        assert [REFUSED] * 4 == [result.status for result in found], found
        for rank, result in enumerate(found):
            if rank != which:
                assert NOTICED_S > result.ended - _frozen(found), found
                rejects = scripts.events(tmp_path, rank, "reject")
                assert any(SILENT in each["reason"] for each in rejects), rejects

    def test_rank_that_only_sleeps_is_waited_for(self, tmp_path: Path) -> None:
        """Its heartbeats arrive; it joins at its next collective and nothing is lost."""
        found = ranks.values(ranks.run(_sleep, str(tmp_path)))

        assert [[1], [1], [1], [1]] == found


def _freeze(rank: Rank, where: str, events: str) -> None:
    model, optimizer, _ = _protected(rank, events)
    for update in range(1, 50):
        if (rank.number, update, where) == (3, 3, "update"):
            _stand_still(rank, events)
        _update(model, optimizer)
        if (rank.number, update, where) == (3, 3, "boundary"):
            _stand_still(rank, events)
        dist.all_reduce(torch.ones(1))
    raise AssertionError("nobody was missed")


def _freeze_in_repair(rank: Rank, which: int, events: str) -> None:
    """The first pair repairs; `which` stands still as it joins, or as it is asked."""
    model, optimizer, pact = _protected(rank, events, drive="manual")
    _update(model, optimizer)
    pact.commit(1)
    if rank.number != which:
        time.sleep(0.2)
    elif which == 1:
        Board.publish = lambda *_: _stand_still(rank, events)  # type: ignore[method-assign]
    else:
        accelpact._communicator.probe = lambda *_, **__: _stand_still(rank, events)
    if rank.number in (0, 2):
        pact.mend(wrappers.pairs()[0])
    threading.Event().wait(30)


def _sleep(rank: Rank, events: str) -> list[int]:
    model, optimizer, pact = _protected(rank, events, timeout=2.0)
    _update(model, optimizer)
    if rank.number == 3:
        time.sleep(5 * SILENCE_S)
    dist.all_reduce(torch.ones(1))
    ranks.wait_until(lambda: pact.generation == 1)
    _update(model, optimizer)
    pact.close()
    return [event["generation"] for event in scripts.events(Path(events), rank.number, "repair")]


class TestRankThatEnds:
    """A rank whose work is done, with or without a farewell."""

    @pytest.mark.parametrize("how", ["exit", "_exit"])
    def test_is_not_missed_by_those_who_do_not_need_it(self, how: str, tmp_path: Path) -> None:
        """They go on computing, in an update and between two, and end well."""
        found = ranks.run(_leave_early, how, str(tmp_path))

        assert [0] * 4 == [result.status for result in found], found
        assert [True] * 3 == [result.value for result in found[:3]], found

    @pytest.mark.parametrize("how", ["exit", "_exit"])
    def test_is_missed_by_a_repair_that_needs_it(self, how: str, tmp_path: Path) -> None:
        """It is refused soon, and the record says whether there was a farewell."""
        found = ranks.run(_repair_after_leaving, how, str(tmp_path))

        assert [REFUSED] * 3 == [result.status for result in found[:3]], found
        for rank in (0, 1, 2):
            reasons = [each["reason"] for each in scripts.events(tmp_path, rank, "reject")]
            assert any({"exit": GONE, "_exit": SILENT}[how] in each for each in reasons), reasons
            assert NOTICED_S > found[rank].ended - _frozen(found)


def _leave(rank: Rank, how: str, pact: accelpact.Pact) -> None:
    rank.report(time.time())
    if how == "exit":
        pact.close()
    os._exit(0)


def _leave_early(rank: Rank, how: str, events: str) -> bool:
    model, optimizer, pact = _protected(rank, events)
    for _ in range(3):  # the second lays out DDP's buckets anew, together
        _update(model, optimizer)
    if rank.number == 3:
        _leave(rank, how, pact)
    end = time.monotonic() + 3 * SILENCE_S
    with model.no_sync():  # inside an update that needs nobody
        while time.monotonic() < end:
            model(torch.randn(4, wrappers.DIM)).sum().backward()
    optimizer.step()
    time.sleep(3 * SILENCE_S)
    expected = {"exit": "gone", "_exit": "silent"}[how]
    known = pact.control._vigil._heartbeat.ended.get(3) == expected
    pact.close()
    return known


def _repair_after_leaving(rank: Rank, how: str, events: str) -> None:
    _, _, pact = _protected(rank, events, drive="manual")
    pact.commit(1)
    if rank.number == 3:
        _leave(rank, how, pact)
    time.sleep(0.1)
    if rank.number in (0, 2):
        pact.mend(wrappers.pairs()[0])
    threading.Event().wait(30)


class TestChains:
    """Two replicas over groups of their own, in one job."""

    def test_others_train_on_during_a_repair(self, tmp_path: Path) -> None:
        """They hear of it, count the generation, and pledge nothing."""
        found = ranks.values(ranks.run(_repair_one_column, str(tmp_path)))

        for rank in (1, 3):
            updates, pledged, generation = found[rank]
            assert (0, 1) == (pledged, generation)
            assert 10 < updates
        for rank in (0, 2):
            assert [1, 1] == list(found[rank][1:])

    def test_others_train_on_after_a_refusal(self, tmp_path: Path) -> None:
        """A death ends its own column, and nobody else."""
        found = ranks.run(_lose_one_column, str(tmp_path))

        assert [REFUSED, 0, -9, 0] == [result.status for result in found], found
        for rank in (1, 3):
            (notice,) = scripts.events(tmp_path, rank, "notice")
            assert 0 == notice["by"]


def _repair_one_column(rank: Rank, events: str) -> tuple[int, int, int]:
    model, optimizer, pact = _protected(rank, events, world=False, drive="manual")
    mine = wrappers.pairs()[rank.number % 2]
    store, updates = rank.store(), 0
    if rank.number in (0, 2):
        _update(model, optimizer)
        pact.commit(1)
        time.sleep(2.0 * (rank.number == 2))
        pact.repair(mine)
        store.set(f"repaired/{rank.number}", "")
    else:
        # Members need each other at every update: they stop after the same one.
        while not _all_say(store, f"seen/{updates}", yes=store.check(REPAIRED)):
            _update(model, optimizer)
            updates += 1
            pact.commit(updates)
    ranks.wait_until(lambda: pact.generation == 1)
    pact.close()
    return updates, pact.control.pledged, pact.generation


def _all_say(store: dist.Store, key: str, *, yes: bool) -> bool:
    """Whether both ranks of the second column say so."""
    store.add(key, 1 + 1000 * yes)
    ranks.wait_until(lambda: store.add(key, 0) % 1000 == 2)
    return store.add(key, 0) >= 2000


def _lose_one_column(rank: Rank, events: str) -> None:
    model, optimizer, pact = _protected(rank, events, world=False)
    for update in range(1, 200):
        if (rank.number, update) == (2, 5):
            os.kill(os.getpid(), 9)
        try:
            _update(model, optimizer)
        except RuntimeError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  as at the end of a script
        time.sleep(0.02)
    pact.close()


def _protected(
    rank: Rank, events: str, *, timeout: float = 600.0, world: bool = True, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, accelpact.Pact]:
    """A small DDP model over all ranks, or over every other one."""
    os.environ["ACCELPACT_EVENTS"] = events
    _live(events)
    wrappers.connect(rank, timeout=timeout)
    pairs = wrappers.pairs(timeout=timeout)
    group = None if world else pairs[rank.number % 2]
    model = DistributedDataParallel(wrappers.plain(), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    pact = accelpact.attach(
        model,
        optimizer,
        store=rank.store,
        prefix="test",
        silence=SILENCE_S,
        **options,
    )
    return model, optimizer, pact


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, wrappers.DIM)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Polled(ctypes.Structure):
    """`struct pollfd`."""

    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def _live(events: str) -> None:
    """Hold the writing end of a pipe, which the kernel closes with this process."""
    path = Path(events) / "alive"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    _ALIVE.append(os.open(path, os.O_RDWR))


def _stand_still(rank: Rank, events: str) -> None:
    """Hold the interpreter's lock, so that no thread of this process gets to run."""
    reading = os.open(Path(events) / "alive", os.O_RDONLY | os.O_NONBLOCK)
    os.close(_ALIVE.pop())
    until_others_ended = _Polled(fd=reading)
    rank.report(time.time())
    ctypes.PyDLL(None).poll(ctypes.byref(until_others_ended), 1, 1000 * FROZEN_S)


def _frozen(found: list[Result]) -> float:
    (when,) = [when for result in found for when in result.reports]
    return float(when)
