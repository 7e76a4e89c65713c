"""What looking at and rebinding the references of 33 FSDP modules costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accelpact._frameworks import fsdp1
from accelpact._guard import check_boundary
from accelpact._rebind import ReferenceIndex, rebind
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = pytest.mark.benchmark

NUM_MODULES = 33


def test_rebind(against_floor: AgainstFloor) -> None:
    """Pointing every reference of 33 modules elsewhere, against as many writes to a dict."""
    with hsdp.without_peers("decoder-32l") as (model, groups):
        index = ReferenceIndex(model, [fsdp1])
        holders = index.holders(groups.replicate)
        names: dict[int, object] = dict.fromkeys(range(len(holders)))

        def write() -> None:
            for key in names:
                names[key] = groups.replicate

        assert len(holders) == 2 * NUM_MODULES
        against_floor(
            lambda: rebind(holders, groups.replicate),
            write,
            description=f"{len(holders)} writes to a dict",
            rounds=500,
        )


def test_guard(against_floor: AgainstFloor) -> None:
    """The full check of a boundary, against reading one attribute of every module."""
    with hsdp.without_peers("decoder-32l") as (model, _):
        watch = fsdp1.watch(model)
        modules = [vars(module) for module in model.modules()]

        def read() -> None:
            for attributes in modules:
                attributes.get("training_state")

        against_floor(
            lambda: check_boundary([watch], declared=True),
            read,
            description=f"one dict read for each of {len(modules)} modules",
            rounds=200,
        )
