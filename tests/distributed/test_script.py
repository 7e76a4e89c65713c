"""Scripts that know nothing of the runtime, or one line of it, through failures between updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import accelpact
from tests.distributed import ranks, scripts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

DDP = ["--epochs", "2", "--timeout", "5"]
HSDP = ["--steps", "80"]


def run(script: str, arguments: list[str], **options: Any) -> list[Result]:
    """Run `script` on four ranks."""
    return ranks.run(scripts.run, script, arguments, deadline=80.0, **options)


@pytest.fixture(scope="module")
def bare_ddp() -> list[dict[str, Any]]:
    """The DDP script without the runtime and without a fault."""
    return ranks.values(run(scripts.DDP, DDP, protected=False))


@pytest.fixture(scope="module")
def bare_hsdp() -> list[dict[str, Any]]:
    """The HSDP script, which attaches, without a fault."""
    return ranks.values(run(scripts.HSDP, HSDP, protected=False))


def stall(rank: Rank) -> None:
    """Rank 1 comes to its 5th all-reduce later than its peers wait."""
    if rank.number == 1:
        scripts.on_call("all_reduce", 5, scripts.late(7.0))


def cut(rank: Rank) -> None:
    """All connections of rank 2 break before its 4th all-reduce, and again before its 9th."""
    if rank.number == 2:
        scripts.on_call("all_reduce", 4, scripts.cut(rank))
        scripts.on_call("all_reduce", 9, scripts.cut(rank))


def one_sided(rank: Rank) -> None:
    """Rank 3 is told that its 4th all-reduce failed, which its peers have completed."""
    if rank.number == 3:
        scripts.on_call("all_reduce", 4, scripts.fail_after)


class TestUnmodifiedScript:
    """DDP over the default group, losses averaged after every step."""

    @pytest.mark.parametrize("replacement", ["rebuild", "auto"])
    @pytest.mark.parametrize("fault", [stall, cut])
    def test_never_sees_the_failure(
        self,
        bare_ddp: list[dict[str, Any]],
        fault: Any,
        replacement: str,
        tmp_path: Path,
    ) -> None:
        """It prints the same losses and ends with the same state as without runtime and fault."""
        options = ("--replacement", replacement)
        found = ranks.values(
            run(scripts.DDP, DDP, fault=fault, events=str(tmp_path), options=options)
        )

        assert bare_ddp == found
        for rank in range(4):
            repairs = scripts.events(tmp_path, rank, "repair")
            assert [1, 2][: len(repairs)] == [each["generation"] for each in repairs]
            assert {"stall": 1, "cut": 2}[fault.__name__] == len(repairs)
            assert all([] == each["holders"]["left"] for each in repairs)
            assert "exit" == scripts.events(tmp_path, rank)[-1]["event"]

    def test_failure_on_one_member_only_is_refused(self, tmp_path: Path) -> None:
        """Peers have gone on to the next update: all end, and the record says why."""
        found = run(scripts.DDP, DDP, fault=one_sided, events=str(tmp_path))

        assert [accelpact.EXIT_STATUS] * 4 == [result.status for result in found], found
        for rank in range(4):
            (reject,) = scripts.events(tmp_path, rank, "reject")
            assert accelpact.Reason.ONE_SIDED.value in reject["reason"]


class TestAttachedScript:
    """`fully_shard` on a 2-D mesh, one line attaches, losses averaged over the replicas."""

    def test_never_sees_the_failure(self, bare_hsdp: list[dict[str, Any]], tmp_path: Path) -> None:
        """The variable that holds the retired group goes on serving, and the record lists it."""
        found = ranks.values(
            run(
                scripts.HSDP,
                HSDP,
                protected=False,
                fault=_broken_replicate,
                events=str(tmp_path),
            )
        )

        assert bare_hsdp == found
        counts = [len(scripts.events(tmp_path, rank, "repair")) for rank in range(4)]
        assert [0, 1, 0, 1] == counts
        for rank in range(4):
            assert 1 == len(scripts.events(tmp_path, rank, "release"))
        for rank in (1, 3):
            (repair,) = scripts.events(tmp_path, rank, "repair")
            variables = repair["holders"]["redirected"]
            assert (["frame main() local 'replicate'"] == variables) == (
                repair["replacement"] == "rebuild"
            ), repair


def _broken_replicate(rank: Rank) -> None:
    """The third all-reduce of the loss fails on rank 1 before anything is sent: rank 3 waits in it.

    Every update has five more, one for each unit that `fully_shard` made.
    """
    if rank.number == 1:
        scripts.on_call("all_reduce", 3 * 6, scripts.fail_before)
