"""Whatever ends the supervisor or a rank: no process is left, and the records can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from harness.records import Event, read_lines
from harness.summarize import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

MARK = "ACCELPACT_TEST_MARK"
FIRST_RUN = "0-accelpact"
"""The seed decides the order; this one comes first with the default."""
UPDATES = 40
"""Enough for a test to strike before the last one."""
START_S = 90.0
"""Within which a run gets to the event that a test waits for."""
GONE_S = 10.0
"""Within which every process is gone."""


class Comparison:
    """The command line at work in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Start it, in a session of its own, as a shell starts a job."""
        self.folder = folder
        self.mark = f"{os.getpid()}-{folder}"
        self._output = (folder.parent / "output").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness", "run", "accelpact", "--out", str(folder)),
                *(
                    "--updates",
                    str(UPDATES),
                    "--checkpoint-at",
                    "1",
                    "--fault",
                    "absent@boundary:2",
                ),
                *("--group-timeout", "2"),
            ],
            env={**os.environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        return (self.folder.parent / "output").read_text()

    def events(self, run: str) -> list[Event]:
        return read_lines(self.folder / "runs" / run / "events.jsonl", Event)

    def wait_for(self, run: str, happened: Callable[[Event], bool]) -> None:
        """Wait until an event for which `happened` holds is in the record of `run`."""
        end = time.monotonic() + START_S
        while not any(happened(event) for event in self.events(run)):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """Process id of every rank."""
        found = {}
        for process in self.processes():
            try:
                environment, command = process.environ(), process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "RANK" in environment and "harness.worker" in command:
                found[int(environment["RANK"])] = process.pid
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything that runs with the mark in its environment."""
        return [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get(MARK) == self.mark
        ]

    def left(self) -> list[str]:
        """What still runs when all should be gone."""
        end = time.monotonic() + GONE_S
        while (found := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return [str(process) for process in found]

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self.processes():
            process.kill()
        self.process.wait(GONE_S)
        self._output.close()


@pytest.fixture
def comparison(tmp_path: Path) -> Iterator[Comparison]:
    """A comparison that has just been started."""
    started = Comparison(tmp_path / "out")
    yield started
    started.close()


def _commits(event: Event) -> bool:
    return event.event == "commit"


class TestSupervisorEnds:
    def test_ctrl_c(self, comparison: Comparison) -> None:
        """Everybody in the foreground gets the signal; the command says so and exits 130."""
        comparison.wait_for(FIRST_RUN, _commits)
        os.killpg(comparison.process.pid, signal.SIGINT)

        assert 130 == comparison.process.wait(GONE_S)
        assert [] == comparison.left()
        assert "interrupted" in comparison.output()
        assert any(_commits(event) for event in comparison.events(FIRST_RUN))

    def test_sigterm(self, comparison: Comparison) -> None:
        """Like Ctrl-C, also while the ranks are still importing."""
        comparison.wait_for(FIRST_RUN, lambda event: event.event == "process")
        comparison.process.terminate()

        assert 130 == comparison.process.wait(GONE_S)
        assert [] == comparison.left()
        assert "end" in [event.event for event in comparison.events(FIRST_RUN)]

    def test_sigkill(self, comparison: Comparison) -> None:
        """Nobody can clean up; the kernel ends launcher and ranks with their parents."""
        comparison.wait_for(FIRST_RUN, _commits)
        assert 4 == len(comparison.ranks())
        comparison.process.kill()

        assert -signal.SIGKILL == comparison.process.wait(GONE_S)
        assert [] == comparison.left()
        assert any(_commits(event) for event in comparison.events(FIRST_RUN))


class TestRankIsKilled:
    def test_run_fails_and_the_comparison_goes_on(self, comparison: Comparison) -> None:
        """The one restart is used up, the run ends with a verdict, and the next one starts."""
        comparison.wait_for(FIRST_RUN, lambda event: event.event == "recovered")
        os.kill(comparison.ranks()[3], signal.SIGKILL)
        comparison.wait_for(FIRST_RUN, lambda event: event.event == "commit" and event.attempt == 1)
        doomed = comparison.ranks()
        os.kill(doomed[3], signal.SIGKILL)
        comparison.wait_for(FIRST_RUN, lambda event: event.event == "end")
        survivors = [pid for pid in doomed.values() if psutil.pid_exists(pid)]
        comparison.wait_for("0-reference", lambda event: event.event == "launch")
        comparison.process.send_signal(signal.SIGINT)
        comparison.process.wait(GONE_S)
        run = next(run for run in summarize(comparison.folder).runs if run.name == FIRST_RUN)

        assert [] == survivors
        assert [] == comparison.left()
        assert run.verdict in ("fail", "unknown"), run
        assert run.committed_updates < UPDATES
