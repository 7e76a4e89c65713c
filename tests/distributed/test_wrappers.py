"""Every wrapper: groups of both dimensions are replaced, and training goes on bitwise."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import accelpact
from accelpact import _communicator
from tests.distributed import ranks, wrappers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelpact import Pact
    from tests.distributed.ranks import Rank
    from tests.distributed.wrappers import Wrapped

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

CAN_RECONFIGURE = hasattr(c10d, "_reconfigure")


REPLACEMENTS = ("rebuild", "reconfigure") if CAN_RECONFIGURE else ("rebuild",)


def _attach(rank: Rank, **settings: Any) -> Callable[[Any, Any], Pact]:
    """Return what attaches the runtime, driven by the test."""
    return functools.partial(
        accelpact.attach,
        store=rank.store,
        drive="manual",
        on_abort=rank.report,
        **settings,
    )


def _replace(rank: Rank, kind: str) -> dict[str, dict[str, Any]]:
    """Train without a fault, and again with groups replaced at the boundaries, in every way."""
    wrappers.connect(rank)
    build, dimensions = wrappers.WRAPPERS[kind]
    expected = wrappers.train(build())
    return {
        replacement: {"expected": expected, **_replace_by(rank, replacement, build(), dimensions)}
        for replacement in REPLACEMENTS
    }


def _replace_by(
    rank: Rank, replacement: str, wrapped: Wrapped, dimensions: Sequence[str]
) -> dict[str, Any]:
    """Train while groups are replaced.

    After update 1 one group of the first dimension, after update 2 all of every dimension, after
    update 3 those of the first dimension ten times. What was replaced is cut off first, so that
    whoever goes on using it fails.
    """
    attach = _attach(rank, prefix=replacement, replacement=replacement)
    store, meetings = rank.store(), itertools.count()
    holders: dict[str, list[str]] = {}

    def replace(pact: Pact, dimension: str) -> None:
        # Else it could cut what a peer still waits in, or has repaired already.
        ranks.meet(store, f"{replacement} {next(meetings)}", rank.world_size)
        group = wrapped.group(dimension)
        _communicator.interrupt(group)
        done = pact.repair(group)
        del group
        holders.setdefault(dimension, list(done.holders))

    def at_boundary(pact: Pact, update: int) -> None:
        if update == 1:
            replace(pact, dimensions[0])
        elif update == 2:
            for dimension in dimensions:
                replace(pact, dimension)
        elif update == 3:
            for _ in range(10):
                replace(pact, dimensions[0])
                pact.audits.join()
        pact.audits.join()
        assert all(finding.clean for finding in pact.audits.findings), pact.audits.findings
        dist.barrier()

    roots = wrappers.train(wrapped, attach=attach, at_boundary=at_boundary)
    return {"roots": roots, "holders": holders}


@pytest.fixture(scope="module", params=sorted(wrappers.WRAPPERS))
def replaced(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """What every rank says of one wrapper, by the way in which groups were replaced."""
    return ranks.values(ranks.run(_replace, request.param, deadline=90.0))


@pytest.mark.parametrize("replacement", ["rebuild", "reconfigure"])
class TestReplacement:
    """Groups of every dimension, once and ten times in a row."""

    def test_training_goes_on_bitwise(
        self, replaced: list[dict[str, dict[str, Any]]], replacement: str
    ) -> None:
        """After every update each rank has the state of an uninterrupted run."""
        if replacement not in REPLACEMENTS:
            pytest.skip("this torch cannot reconfigure a group in place")
        for each in (found[replacement] for found in replaced):
            assert each["expected"] == each["roots"]
            for holders in each["holders"].values():
                assert (replacement == "reconfigure") == (holders == [])


def _replace_without(rank: Rank, kind: str, left_out: str) -> None:
    """Train until a group is replaced by a runtime that does not know one of the frameworks."""
    wrappers.connect(rank)
    build, dimensions = wrappers.WRAPPERS[kind]
    wrapped = build()

    known = [each for each in accelpact.FRAMEWORKS if each.name != left_out]
    attach = _attach(rank, prefix="pact", replacement="rebuild", frameworks=known)

    def at_boundary(pact: Pact, update: int) -> None:
        if update == 1:
            pact.repair(wrapped.group(dimensions[0]))
            pact.audits.join()
            rank.report([list(finding.left) for finding in pact.audits.findings])
            dist.barrier()

    wrappers.train(wrapped, attach=attach, at_boundary=at_boundary)


class TestAblation:
    """The runtime does not know one framework, whose references stay."""

    @pytest.mark.parametrize(
        ("kind", "left_out", "place"),
        [
            ("fsdp1-groups", "fsdp1", "_inter_node_pg"),
            ("fsdp2", "fsdp2", "replicate_process_group"),
            ("fsdp2", "mesh", "_pg_registry"),
            ("ddp", "ddp", "process_group"),
        ],
    )
    def test_is_caught_by_the_audit(self, kind: str, left_out: str, place: str) -> None:
        """Every rank ends, and the reason has the place that was forgotten."""
        found = ranks.run(_replace_without, kind, left_out, deadline=60.0)

        assert [accelpact.EXIT_STATUS] * 4 == [result.status for result in found], found
        told = [str(report) for result in found for report in result.reports]
        assert any(place in report for report in told), told
        assert any(accelpact.Reason.STALE_REFERENCE.value in report for report in told), told
