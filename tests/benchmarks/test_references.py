"""What rebinding the references of many FSDP modules costs, and how that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from accelpact._rebind import ReferenceIndex, rebind
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize("num_modules", [8, 33, 65])
@pytest.mark.parametrize("wrapper", hsdp.WRAPPERS)
def test_rebind(
    against_floor: AgainstFloor, benchmark: Any, wrapper: str, num_modules: int
) -> None:
    """Pointing every reference to the replicate group elsewhere, against writes to a dict.

    Time per reference, which `extra_info` has, is the same for all numbers of modules.
    """
    with hsdp.without_peers(wrapper=wrapper, num_modules=num_modules) as built:
        index = ReferenceIndex(built.model, [hsdp.framework(wrapper)])
        group = built.groups.replicate
        holders = index.holders(group)
        names: dict[int, object] = dict.fromkeys(range(len(holders)))

        def write() -> None:
            for key in names:
                names[key] = group

        assert len(holders) >= num_modules
        against_floor(
            lambda: rebind(holders, group),
            write,
            description=f"{len(holders)} writes to a dict",
            rounds=500,
        )
        rebind_s = benchmark.stats.stats.min
        benchmark.extra_info.update(
            references=len(holders),
            rebind_us=rebind_s * 1e6,
            per_reference_ns=rebind_s * 1e9 / len(holders),
        )
