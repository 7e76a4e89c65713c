"""What looking at 33 FSDP modules costs: the part per update, and the whole at a repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from accelpact._boundary import Boundary
from accelpact._guard import check_boundary, structure
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = [pytest.mark.benchmark, pytest.mark.parametrize("wrapper", hsdp.WRAPPERS)]

NUM_MODULES = 33


def test_structure(against_floor: AgainstFloor, benchmark: Any, wrapper: str) -> None:
    """The structural part, at every update, against one dict read for each FSDP module."""
    with hsdp.without_peers(wrapper=wrapper, num_modules=NUM_MODULES) as built:
        watches = [hsdp.framework(wrapper).watch(built.model)]
        attributes = [{"training_state": None} for _ in range(NUM_MODULES)]

        def read() -> None:
            for each in attributes:
                each.get("training_state")

        assert [] == structure(watches)
        against_floor(
            lambda: structure(watches),
            read,
            description=f"one dict read for each of {NUM_MODULES} modules",
            rounds=500,
        )
        benchmark.extra_info["structure_us"] = benchmark.stats.stats.min * 1e6


def test_full_check(against_floor: AgainstFloor, benchmark: Any, wrapper: str) -> None:
    """The full check, at a repair, against reading the gradient of every parameter."""
    with hsdp.without_peers(wrapper=wrapper, num_modules=NUM_MODULES) as built:
        watches = [hsdp.framework(wrapper).watch(built.model)]
        boundary = Boundary()
        parameters = list(built.model.parameters())

        def read() -> None:
            for parameter in parameters:
                _ = parameter.grad

        against_floor(
            lambda: check_boundary(watches, boundary),
            read,
            description=f"reading the gradient of {len(parameters)} parameters",
            rounds=200,
        )
        benchmark.extra_info["check_us"] = benchmark.stats.stats.min * 1e6
