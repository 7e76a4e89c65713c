"""Ranks that are forks: restarts are counted, and whoever ends, nobody is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from harness import plan, supervisor
from harness.launching import Forks
from harness.records import Event, read_lines
from harness.spec import Fault, Schedule, Spec
from strategies import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from harness.spec import RunSpec

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

GONE_S = 10.0
UPDATES = 4

SUPERVISES = """
import os, sys, msgspec
from pathlib import Path
from harness import supervisor
from harness.launching import Forks
from harness.spec import RunSpec
run = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RunSpec)
with Forks(os.environ) as forks:
    supervisor.execute(run, Path(sys.argv[2]), on_event=lambda event: None, launch=forks)
"""
"""A supervisor in a process of its own."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(os.environ) as started:
        yield started


def planned(name: str = "cold", *, updates: int = UPDATES) -> RunSpec:
    """Plan a run with one fault, and so with one restart."""
    spec = Spec(
        schedule=Schedule(
            updates=updates,
            checkpoint_at=1,
            faults=(Fault(kind="absent", phase="boundary", update=2),),
        ),
        timeouts=Timeouts(group=2.0),
    )
    entries = plan.contenders([name])
    runs = plan.block_runs(spec, entries, block=0, backend="gloo")
    return next(run for run in runs if run.strategy == name and run.faulted)


def ranks(supervisor_pid: int) -> list[psutil.Process]:
    """Ranks of the run: children of a child of the process that forks."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
        for forking in psutil.Process(supervisor_pid).children():
            for launcher in forking.children():
                found += launcher.children()
    return found


class Kills:
    """Kills a rank when one commits, in every attempt of `attempts` once."""

    def __init__(self, attempts: set[int]) -> None:
        self._attempts = attempts

    def __call__(self, event: Event) -> None:
        if event.event == "commit" and event.attempt in self._attempts:
            self._attempts.discard(event.attempt)
            ranks(os.getpid())[-1].kill()


def gone(pids: set[int]) -> bool:
    """Whether every one of those processes has ended, after a while at most."""
    return _until(lambda: all(_ended(pid) for pid in pids), GONE_S)


def _ended(pid: int) -> bool:
    """Whether it has; reaps it if this process, which supervises too, has adopted it."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return not psutil.pid_exists(pid)


def _until(happened: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class TestRestart:
    def test_all_start_again_after_a_fault(self, forks: Forks, tmp_path: Path) -> None:
        """The rank's exit starts every rank again, once, and the run ends well."""
        status = supervisor.execute(
            planned(), tmp_path / "run", on_event=lambda _: None, launch=forks
        )
        events = read_lines(tmp_path / "run" / "events.jsonl", Event)
        starts = sorted((each.attempt, each.rank) for each in events if each.event == "process")

        assert 0 == status
        assert [(attempt, rank) for attempt in (0, 1) for rank in range(4)] == starts
        assert 4 == len([each for each in events if each.event == "finish"])

    def test_a_killed_rank_ends_the_others_and_all_start_again(
        self, forks: Forks, tmp_path: Path
    ) -> None:
        """One restart is left for it; it is used, and the run ends well."""
        status = supervisor.execute(
            planned("accelpact"), tmp_path / "run", on_event=Kills({0}), launch=forks
        )
        events = read_lines(tmp_path / "run" / "events.jsonl", Event)

        assert 0 == status
        assert {0, 1} == {each.attempt for each in events if each.event == "commit"}

    def test_no_restart_is_left(self, forks: Forks, tmp_path: Path) -> None:
        """A rank that dies in every attempt makes the run end badly, and nobody stays."""
        seen: set[int] = set()
        kills = Kills({0, 1})

        def on_event(event: Event) -> None:
            seen.update(each.pid for each in ranks(os.getpid()))
            kills(event)

        status = supervisor.execute(
            planned("accelpact"), tmp_path / "run", on_event=on_event, launch=forks
        )

        assert 1 == status
        assert len(seen) >= 5
        assert gone(seen)


class TestEnds:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_nothing_outlives_the_supervisor(self, tmp_path: Path, number: int) -> None:
        """Asked to end or killed, it takes forking process, launcher and ranks with it."""
        asked = tmp_path / "asked.json"
        asked.write_bytes(msgspec.json.encode(planned(updates=200)))
        folder = tmp_path / "run"
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISES, str(asked), str(folder)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert _until(
                lambda: any(
                    each.event == "commit" for each in read_lines(folder / "events.jsonl", Event)
                ),
                60.0,
            )
            below = {each.pid for each in psutil.Process(process.pid).children(recursive=True)}
            process.send_signal(number)
            process.wait(GONE_S)
        finally:
            process.kill()
            process.wait()

        assert len(below) >= 6
        assert gone(below)

    def test_a_forking_process_that_died_ends_the_run(self, tmp_path: Path) -> None:
        """Its runs fail in bounded time, with the status of a failure."""
        with Forks(os.environ) as forks:

            def on_event(event: Event) -> None:
                if event.event == "commit":
                    forks._process.kill()

            status = supervisor.execute(
                planned(updates=200), tmp_path / "run", on_event=on_event, launch=forks
            )

        assert 1 == status
