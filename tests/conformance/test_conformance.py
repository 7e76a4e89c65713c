"""Every contender passes every check; one that is wrong fails the check that names its fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.conformance import CHECKS, run_checks
from tests.conformance import contenders

if TYPE_CHECKING:
    from tests.conformance.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


@pytest.mark.parametrize("check", CHECKS)
def test_contender(runs: Runs, contender: str, check: str) -> None:
    """The records of its run have nothing that the check could name."""
    assert "" == CHECKS[check](runs.evidence(contender))


class TestWrongContender:
    @pytest.mark.parametrize("name", contenders.FAULTS)
    def test_fails_the_check_of_its_fault_alone(self, runs: Runs, name: str) -> None:
        """The check that names the fault finds it, and no other finds anything."""
        found = {each.check: each.fault for each in run_checks(runs.evidence(name)) if each.fault}

        assert [contenders.FAULTS[name][1]] == list(found), found
