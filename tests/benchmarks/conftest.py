"""What every benchmark here does: put its time beside a floor taken in the same run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


class AgainstFloor(Protocol):
    """Times `work` with the `benchmark` fixture and `floor` in turns with it."""

    def __call__(
        self,
        work: Callable[[], object],
        floor: Callable[[], object],
        *,
        description: str,
        rounds: int = 50,
    ) -> float:
        """Return floor time / work time, best of all rounds: larger is better, 1 is the floor."""
        ...


@pytest.fixture
def against_floor(benchmark: Any) -> AgainstFloor:
    """Benchmark work against a floor, and keep the ratio where the comparison reads it.

    The floor is timed before each round of the work, so that both see the same neighbours on
    the machine, and the best round of each counts, which they disturb least. `extra_info` gets
    `floor`, `floor_s` and `ratio_to_floor`.
    """

    def run(
        work: Callable[[], object],
        floor: Callable[[], object],
        *,
        description: str,
        rounds: int = 50,
    ) -> float:
        floor_times: list[float] = []

        def time_floor() -> None:
            start = time.perf_counter()
            floor()
            floor_times.append(time.perf_counter() - start)

        benchmark.pedantic(work, setup=time_floor, rounds=rounds, warmup_rounds=2)
        floor_s = min(floor_times)
        ratio: float = floor_s / benchmark.stats.stats.min
        benchmark.extra_info.update(floor=description, floor_s=floor_s, ratio_to_floor=ratio)
        return ratio

    return run
