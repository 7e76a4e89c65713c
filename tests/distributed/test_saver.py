"""Checkpoints that are written beside training: bitwise what was saved, complete or invisible."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver

from harness import checkpoint
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
    saver.start()
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
