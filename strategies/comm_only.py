"""The paper's ablation: a new communicator, a passing probe, and nothing rebound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from accelpact import Reason
from strategies._base import root_cause
from strategies.accelpact import AccelPact

if TYPE_CHECKING:
    from strategies._base import Failure, Job, Outcome, Settings, Timeouts


class CommunicatorOnly(AccelPact):
    """AccelPact without any framework: it must fail in the next synchronized backward."""

    name = "comm_only"
    summary = "ablation: communicator replaced, probe passes, no reference rebound; must fail"
    expected = "fail"
    asks_envelope = False
    expected_inside = "fail"
    expected_killed = "fail"
    expected_step = "fail"
    frameworks = ()
    audit = False

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Restart nothing, and ask no envelope: either would hide what it does not do."""
        del num_faults
        base = super().settings(timeouts, num_faults=0, backend=backend)
        environment = {**base.environment, "ACCELPACT_ENVELOPE": ""}
        return dataclasses.replace(base, environment=environment)

    def take_back(self, job: Job, failure: Failure) -> Outcome:
        """Refuse: who knows no framework cannot undo its part of an update."""
        code = Reason.UNCOMMITTED_BOUNDARY.value
        return self.refuse(job, f"{code}: struck inside an update: {root_cause(failure.error)}")
