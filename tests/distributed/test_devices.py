"""Repairs by the backend of the devices: the same training on Gloo, and on NCCL where it can be.

NCCL refuses two ranks on one device, so each needs one of its own. Ranks that use CUDA are new
processes: a fork of one that has used it cannot.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.distributed import devices, ranks
from tests.distributed.devices import Place

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

UPDATES = 3
DEADLINE_S = 120.0
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
GLOO = Place(device="cpu", backend="gloo", timeout=1.0)
CLEANING = Place(
    device="cuda",
    backend="nccl",
    timeout=5.0,
    environment={
        **_DETERMINISTIC,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    },
)
BLOCKING = Place(
    device="cuda",
    backend="nccl",
    timeout=5.0,
    environment={**_DETERMINISTIC, "TORCH_NCCL_BLOCKING_WAIT": "1"},
    bound=True,
)
MIXED = Place(
    device="cuda",
    backend="cpu:gloo,cuda:nccl",
    timeout=5.0,
    environment=CLEANING.environment,
)


def on_devices(number: int) -> list[pytest.MarkDecorator]:
    """Mark what needs so many CUDA devices."""
    found = torch.cuda.device_count()
    missing = pytest.mark.skipif(
        found < number, reason=f"needs {number} CUDA devices, one per NCCL rank; found {found}"
    )
    return [pytest.mark.gpu, missing]


PLACES = [
    pytest.param(GLOO, id="gloo"),
    pytest.param(CLEANING, id="nccl-cleaning-up", marks=on_devices(2)),
    pytest.param(BLOCKING, id="nccl-blocking-wait-bound", marks=on_devices(2)),
    pytest.param(MIXED, id="gloo-and-nccl", marks=on_devices(2)),
]
LARGE_PLACES = [
    pytest.param(GLOO, id="gloo"),
    pytest.param(CLEANING, id="nccl-cleaning-up", marks=on_devices(4)),
]


def run(function: Any, place: Place, *arguments: Any, world_size: int = 2, **options: Any) -> Any:
    """Return what every rank returned."""
    return ranks.values(
        ranks.run(
            function,
            place,
            *arguments,
            world_size=world_size,
            deadline=DEADLINE_S,
            method="fork" if place.device == "cpu" else "spawn",
            **options,
        )
    )


def record(folder: Path, rank: int, event: str) -> list[dict[str, Any]]:
    """Return the runtime's entries of one kind."""
    lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["event"] == event]


@pytest.mark.parametrize("place", PLACES)
class TestPair:
    """DDP on two ranks."""

    def test_boundary(self, place: Place, tmp_path: Path) -> None:
        """A collective that fails at a boundary is repaired and issued again, bit for bit."""
        expected = run(devices.train, place, UPDATES)
        found = run(devices.train, place, UPDATES, {2: 1}, events=str(tmp_path))

        assert [each["roots"] for each in expected] == [each["roots"] for each in found]
        assert [each["sums"] for each in expected] == [each["sums"] for each in found]
        assert [0, 0, 1, 1] == [each["generation"] for each in (*expected, *found)]
        assert found[0]["took"][1] > 0.5 * place.timeout
        for rank in range(2):
            (repair,) = record(tmp_path, rank, "repair")
            assert ("rebuild", 2, [0, 1]) == tuple(
                repair[key] for key in ("replacement", "frontier", "ranks")
            )
            assert [] == repair["holders"]["left"]
            assert "released" in repair["audit"]

    def test_update(self, place: Place) -> None:
        """An update that fails is taken back and executed again, bit for bit."""
        expected = run(devices.take_back, place, UPDATES)
        found = run(devices.take_back, place, UPDATES, late=2)

        assert [each["roots"] for each in expected] == [each["roots"] for each in found]
        assert [UPDATES] * 2 == [each["attempts"] for each in expected]
        assert [[2]] * 2 == [each["discarded"] for each in found]


@pytest.mark.parametrize("place", LARGE_PLACES)
class TestColumn:
    """`fully_shard` on two replicas of two shards."""

    def test_boundary(self, place: Place) -> None:
        """The members of one replicate group repair it; the others wait in their next update."""
        expected = run(devices.train, place, UPDATES, world_size=4)
        found = run(devices.train, place, UPDATES, {2: 3}, world_size=4)

        assert [each["roots"] for each in expected] == [each["roots"] for each in found]
        assert [each["sums"] for each in expected] == [each["sums"] for each in found]
        assert [1] * 4 == [each["generation"] for each in found]


@pytest.mark.parametrize("place", PLACES[1:])
def test_abort_lets_go_of_the_device(place: Place) -> None:
    """A thread that waits for the device returns, and no exception tells that all is in vain."""
    found, _ = run(devices.release, place)

    assert math.isclose(1.0, found["took"], abs_tol=2.5)
    assert found["failure"].endswith("was aborted")
