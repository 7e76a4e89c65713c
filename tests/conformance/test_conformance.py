"""Every contender passes every check; one that is wrong fails the check that names its fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import drift, plan
from harness.conformance import CHECKS, run_checks
from harness.records import Digests, read_lines
from tests.conformance import contenders
from tests.conformance.conftest import EXAMPLE, FAULT_FREE_UPDATES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


class TestContender:
    @pytest.mark.parametrize("check", CHECKS)
    def test_passes(self, runs: Runs, contender: str, check: str) -> None:
        """The records of its run have nothing that the check could name."""
        assert "" == CHECKS[check](runs.evidence(contender))

    def test_changes_nothing_without_a_fault(self, runs: Runs, contender: str) -> None:
        """What it adds to training leaves every bit of every rank's state as it is."""
        own, reference = (runs.folder(name, faulted=False) for name in (contender, plan.REFERENCE))
        found = drift.compare(
            digests(own), digests(reference), frontier=FAULT_FREE_UPDATES, world_size=4
        )

        assert ("bitwise", 4) == (found.level, found.ranks_equal)


class TestExample:
    """The contender of the guide, which another package brings."""

    def test_passes_every_check(self, runs: Runs) -> None:
        """It is found by its entry point, and judged like any other."""
        assert [] == [each for each in run_checks(runs.evidence("rerun")) if each.fault]

    def test_is_short(self) -> None:
        """The guide promises fewer than 60 lines."""
        assert len(EXAMPLE.read_text().splitlines()) < 60


class TestWrongContender:
    @pytest.mark.parametrize("name", contenders.FAULTS)
    def test_fails_the_check_of_its_fault_alone(self, runs: Runs, name: str) -> None:
        """The check that names the fault finds it, and no other finds anything."""
        found = {each.check: each.fault for each in run_checks(runs.evidence(name)) if each.fault}

        assert [contenders.FAULTS[name][1]] == list(found), found


def digests(folder: Path) -> list[Digests]:
    return read_lines(folder / "digests.jsonl", Digests)
