"""Checkpoints that are written beside training: bitwise what was saved, complete or invisible."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver

from harness import checkpoint, options, plan, supervisor
from harness.launching import Forks
from harness.records import Digests, Event, read_lines
from harness.saver import Saver
from tests.distributed import ranks, trainee

if TYPE_CHECKING:
    from harness.job import TrainingJob
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

MODES = ("sync", "async-thread")


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def make(rank: Rank, folder: Path) -> tuple[TrainingJob, Saver, Notes]:
    job, notes = trainee.make(rank), Notes()
    job.recorder = notes  # type: ignore[assignment]
    return job, Saver(job, folder, modes=MODES), notes


class HeldBack:
    """Keeps uploads from beginning until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._save = state_dict_saver.save
        state_dict_saver.save = self._wait  # type: ignore[assignment]

    def _wait(self, *arguments: Any, **options: Any) -> Any:
        assert self._open.wait(30)
        return self._save(*arguments, **options)

    def open(self) -> None:
        self._open.set()


def save_and_restore(rank: Rank, folder: Path) -> dict[str, Any]:
    """Save update 2 beside training and 4 in it; restore both into a job of its own."""
    job, saver, notes = make(rank, folder)
    saver.start(MODES)
    held = HeldBack()
    roots = {}
    for _ in range(4):
        trainee.update(job)
        roots[job.frontier] = job.digest().root
        if job.frontier == 2:
            saver.save("async-thread", roots[2])
        if job.frontier == 3:
            early = checkpoint.latest(folder)
            held.open()
    saver.save("sync", roots[4])
    saver.close()
    found = {}
    for update in (2, 4):
        checkpoint.restore(job, folder / f"update-{update:06d}")
        found[update] = job.digest().root
    again = {}
    checkpoint.restore(job, folder / "update-000002")
    while job.frontier < 4:
        trainee.update(job)
        again[job.frontier] = job.digest().root
    return {
        "roots": roots,
        "found": found,
        "again": again,
        "early": early,
        "events": notes.names(),
        "left": sorted(path.name for path in folder.iterdir()),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found."""
    folder = tmp_path_factory.mktemp("checkpoints") / "all"
    return ranks.values(ranks.run(save_and_restore, folder, deadline=120))


class TestBesideTraining:
    def test_restores_what_was_saved(self, saved: list[dict[str, Any]]) -> None:
        """Bit for bit, though two updates were done before the upload began."""
        for rank in saved:
            assert {2: rank["roots"][2], 4: rank["roots"][4]} == rank["found"]

    def test_trains_on_from_it(self, saved: list[dict[str, Any]]) -> None:
        """The updates that follow are the same again."""
        for rank in saved:
            assert {3: rank["roots"][3], 4: rank["roots"][4]} == rank["again"]

    def test_is_invisible_until_complete(self, saved: list[dict[str, Any]]) -> None:
        """While it is not written there is no checkpoint."""
        assert [None] * 4 == [rank["early"] for rank in saved]
        assert ["update-000002", "update-000004"] == saved[0]["left"]

    def test_records(self, saved: list[dict[str, Any]]) -> None:
        """When it begins, when training goes on, and, once, when it can be restored."""
        events = saved[0]["events"]
        one = ["checkpoint_begin", "checkpoint"]

        assert one == events[:2]
        assert 2 == events.count("checkpoint_complete")
        assert [0, 0, 0] == [rank["events"].count("checkpoint_complete") for rank in saved[1:]]


def abandon(rank: Rank, folder: Path) -> dict[str, Any]:
    """Give up an upload before it has begun, as a restart in the process does."""
    job, saver, notes = make(rank, folder)
    trainee.update(job)
    saver.save("sync", job.digest().root)
    held = HeldBack()
    trainee.update(job)
    saver.save("async-thread", job.digest().root)
    saver.abandon()
    held.open()
    scratch = checkpoint.scratch(folder, 2, job.attempt.index)
    ranks.wait_until((scratch / ".metadata").exists)
    time.sleep(0.2)
    chosen = checkpoint.chosen(folder)
    return {"events": notes.names(), "chosen": chosen.name if chosen else None}


def fail(rank: Rank, folder: Path) -> dict[str, Any]:
    """The disk of one rank refuses; then it does not."""
    job, saver, notes = make(rank, folder)
    if rank.number == 1:
        written = dcp.FileSystemWriter.write_data

        def refuse(*_: Any) -> Any:
            dcp.FileSystemWriter.write_data = written  # type: ignore[method-assign]
            raise OSError("no space left")

        dcp.FileSystemWriter.write_data = refuse  # type: ignore[method-assign]
    for _ in range(2):
        trainee.update(job)
        saver.save("async-thread", job.digest().root)
    saver.close()
    reasons = [each["reason"] for name, each in notes.events if name == "checkpoint_failed"]
    return {"reasons": reasons, "left": sorted(path.name for path in folder.iterdir())}


class TestGivenUp:
    def test_abandoned_stays_invisible(self, tmp_path: Path) -> None:
        """What an earlier attempt still writes is never restored: the older checkpoint is."""
        found = ranks.values(ranks.run(abandon, tmp_path / "all", deadline=60))

        assert ["update-000001"] * 4 == [rank["chosen"] for rank in found]
        assert 1 == found[0]["events"].count("checkpoint_complete")
        assert "checkpoint_failed" not in found[0]["events"]

    def test_failure_is_recorded_and_ends_nothing(self, tmp_path: Path) -> None:
        """Every rank says whose it was, and the next checkpoint is complete."""
        found = ranks.values(ranks.run(fail, tmp_path / "all", deadline=60))

        assert [["rank 1: OSError: no space left"]] * 4 == [rank["reasons"] for rank in found]
        assert ["update-000002"] == found[0]["left"]


UPDATES, KILLED_AFTER = 6, 4


class Watch:
    """Looks at a run as its events come: which processes upload, and which of them stay."""

    def __init__(self) -> None:
        self.first: set[int] = set()
        self.left: set[int] = set()

    def __call__(self, event: Event) -> None:
        if event.event == "checkpoint_complete" and event.attempt == 0:
            self.first |= uploaders()
        if event.event == "finish":
            self.left = {pid for pid in self.first if runs(pid)}


def runs(pid: int) -> bool:
    """Whether that process has not ended, waited for or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def uploaders() -> set[int]:
    """Processes that ranks have spawned."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("spawn_main" in word for word in process.cmdline()):
                found.add(process.pid)
    return found


class Killed(NamedTuple):
    """A run in which a rank is killed right after the copy for the third checkpoint."""

    status: int | None
    events: list[Event]
    digests: list[Digests]
    watch: Watch

    def select(self, name: str, attempt: int) -> list[Event]:
        return [each for each in self.events if (each.event, each.attempt) == (name, attempt)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    spec = options.make_spec(
        updates=UPDATES,
        checkpoint_at=2,
        checkpoint_mode="async-process,async-cached,async-cached",
        checkpoint_every=1,
        fault=[f"kill@boundary:{KILLED_AFTER}"],
    )
    cold = plan.contenders(["cold"])
    runs = plan.matrix_runs(spec, cold, spec.schedule.faults, backend="gloo")
    folder = tmp_path_factory.mktemp("killed") / "run"
    watch = Watch()
    with Forks() as forks:
        status = supervisor.execute(runs[-1], folder, on_event=watch, launch=forks)
    return Killed(
        status,
        read_lines(folder / "events.jsonl", Event),
        read_lines(folder / "digests.jsonl", Digests),
        watch,
    )


class TestInAProcess:
    """By the harness: a rank of `ranks.run` is a daemon, which may have no children."""

    def test_checkpoints_are_written(self, killed: Killed) -> None:
        """The first by the process, the second into buffers that it shares."""
        found = {each.update: each.mode for each in killed.select("checkpoint_complete", 0)}

        assert 0 == killed.status
        assert ("async-process", "async-cached") == (found[2], found[3])

    def test_restart_loads_the_last_complete_one(self, killed: Killed) -> None:
        """What was being written when the rank was killed is restored whole or not at all."""
        complete = max(each.update or 0 for each in killed.select("checkpoint_complete", 0))
        restored = {each.update for each in killed.select("restored", 1)}

        assert 1 == len(restored)
        assert restored <= set(range(complete, KILLED_AFTER + 1))
        assert [UPDATES] * 4 == [each.update for each in killed.select("finish", 1)]

    def test_replays_to_the_same_state(self, killed: Killed) -> None:
        """Every update that was done twice has led to the same bits twice."""
        roots: dict[tuple[int, int], list[str]] = {}
        for each in killed.digests:
            roots.setdefault((each.rank, each.update), []).append(each.root)
        twice = [found for found in roots.values() if len(found) > 1]

        assert all(len(set(found)) == 1 for found in roots.values())
        assert twice or killed.select("restored", 1)[0].update == KILLED_AFTER

    def test_uploading_processes_end_with_their_ranks(self, killed: Killed) -> None:
        """Those of the ranks that were ended are gone before the run is."""
        assert len(killed.watch.first) >= 4
        assert set() == killed.watch.left
