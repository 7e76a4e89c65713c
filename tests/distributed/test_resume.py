"""A checkpoint gives back, in fresh processes, exactly what was saved, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import accelpact
from harness import checkpoint
from harness.saver import Saver
from tests.distributed import ranks, trainee

if TYPE_CHECKING:
    from harness.job import TrainingJob
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SAVED_AT, UPDATES = 2, 4
NAME = f"update-{SAVED_AT:06d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a checkpoint, and what the ranks that wrote it went on to do."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, ranks.values(ranks.run(_save_and_go_on, folder))


@pytest.fixture(scope="module")
def restored(saved: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What fresh ranks make of it."""
    return ranks.values(ranks.run(_restore_and_go_on, saved[0]))


@pytest.fixture
def spoilt(saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


class TestResume:
    def test_restored_state_is_bitwise_the_saved_one(
        self, saved: tuple[Path, list[dict[str, Any]]], restored: list[dict[str, Any]]
    ) -> None:
        """Tensor by tensor and rank by rank: weights, moments, RNG, cursor and frontier."""
        assert [each["at_checkpoint"] for each in saved[1]] == [
            each["at_checkpoint"] for each in restored
        ]

    def test_training_goes_on_bitwise(
        self, saved: tuple[Path, list[dict[str, Any]]], restored: list[dict[str, Any]]
    ) -> None:
        """After every further update each rank has the state of the run that went on."""
        assert [UPDATES - SAVED_AT] * 4 == [len(each["roots"]) for each in restored]
        assert [each["roots"] for each in saved[1]] == [each["roots"] for each in restored]

    def test_both_moments_are_part_of_what_is_compared(
        self, restored: list[dict[str, Any]]
    ) -> None:
        """Every parameter that a rank holds a shard of has both moments and its step count."""
        for each in restored:
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert {f"{key}/{name}" for name in each["held"]} <= each["at_checkpoint"].keys()

    def test_each_rank_gets_back_its_own_generator(
        self, saved: tuple[Path, list[dict[str, Any]]], restored: list[dict[str, Any]]
    ) -> None:
        """Dropout moved four different generators, and none of them became another's."""
        generators = [each["at_checkpoint"]["rng/cpu"] for each in restored]

        assert 4 == len(set(generators))
        assert [each["at_checkpoint"]["rng/cpu"] for each in saved[1]] == generators
        assert all(each["fresh_generator"] not in generators for each in restored)

    def test_each_rank_gets_back_its_cursor(self, restored: list[dict[str, Any]]) -> None:
        """Samples consumed by the updates until the checkpoint, by each rank."""
        expected = SAVED_AT * trainee.WORKLOAD.samples_per_update

        assert [expected] * 4 == [each["cursor"] for each in restored]


class TestDamagedCheckpoint:
    """Refused on every rank, by its name."""

    def test_missing_manifest(self, spoilt: Path) -> None:
        """Nobody has said that it is complete."""
        (spoilt / NAME / "manifest.json").unlink()

        assert_refused(spoilt, "manifest.json")

    def test_missing_file(self, spoilt: Path) -> None:
        """One rank's data is gone."""
        path = data_file(spoilt)
        path.unlink()

        assert_refused(spoilt, path.name)

    def test_truncated_file(self, spoilt: Path) -> None:
        """One byte too few."""
        path = data_file(spoilt)
        path.write_bytes(path.read_bytes()[:-1])

        assert_refused(spoilt, path.name)

    @pytest.mark.parametrize("where", ["tensor", "header"])
    def test_flipped_byte(self, spoilt: Path, where: str) -> None:
        """The size is right, and one bit is not."""
        path = data_file(spoilt)
        content = bytearray(path.read_bytes())
        content[_longest_noise(content) if where == "tensor" else 0] ^= 0x40
        path.write_bytes(content)

        assert_refused(spoilt)

    def test_flipped_byte_in_metadata(self, spoilt: Path) -> None:
        """The plan of the checkpoint itself."""
        path = spoilt / NAME / ".metadata"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)

        assert_refused(spoilt)


def data_file(folder: Path) -> Path:
    """The largest data file, which all ranks of one shard need."""
    return max((folder / NAME).glob("*.distcp"), key=lambda path: path.stat().st_size)


def assert_refused(folder: Path, *named: str) -> None:
    """Every rank raises `CheckpointError`, and its message names the checkpoint."""
    for kind, message in ranks.values(ranks.run(_restore, folder)):
        assert "CheckpointError" == kind, message
        for name in (NAME, *named):
            assert name in message


def _longest_noise(content: bytearray) -> int:
    """A place in the middle of tensor data: as many different bytes around it as anywhere."""
    window = 256
    starts = range(0, len(content) - window, window)
    best = max(starts, key=lambda start: len(set(content[start : start + window])))
    return best + window // 2


def _save_and_go_on(rank: Rank, folder: Path) -> dict[str, Any]:
    job = trainee.make(rank)
    while job.frontier < SAVED_AT:
        trainee.update(job)
    Saver(job, folder, modes=("sync",)).save("sync", job.digest().root)
    return {"at_checkpoint": job.digest().tensors, "roots": _go_on(job)}


def _restore_and_go_on(rank: Rank, folder: Path) -> dict[str, Any]:
    job = trainee.make(rank)
    fresh = accelpact.tensor_digest(torch.get_rng_state())
    found = checkpoint.latest(folder)
    assert found is not None
    checkpoint.restore(job, found)
    return {
        "at_checkpoint": job.digest().tensors,
        "cursor": job.loader.cursor,
        "fresh_generator": fresh,
        "held": _held(job),
        "roots": _go_on(job),
    }


def _held(job: TrainingJob) -> list[str]:
    """Names of the parameters of which this rank has a part; flat sharding leaves some without."""
    state = job.state().items()
    return [
        name.removeprefix("weight/")
        for name, value in state
        if name.startswith("weight/") and isinstance(value, torch.Tensor) and value.numel()
    ]


def _go_on(job: TrainingJob) -> list[str]:
    found = []
    while job.frontier < UPDATES:
        trainee.update(job)
        found.append(job.digest().root)
    return found


def _restore(rank: Rank, folder: Path) -> tuple[str, str]:
    job = trainee.make(rank)
    found = checkpoint.latest(folder)
    assert found is not None
    outcome = ("none", "restored")
    try:
        checkpoint.restore(job, found)
    except Exception as error:  # noqa: BLE001  which one it is, is the question
        outcome = (type(error).__name__, str(error))
    dist.barrier()
    return outcome
