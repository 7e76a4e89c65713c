"""What a run is worth, and how far its state is from the reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness import verdicts
from harness.records import Drift, FaultRecord, Ledger
from harness.spec import Fault
from tests.unit import logs
from tests.unit.logs import Log

if TYPE_CHECKING:
    from harness.verdicts import Judgement

FAULT = logs.SCHEDULE.faults[0]
EQUAL = Drift(level="bitwise", equal=True, ranks_equal=4, ranks=4)
DIFFERS = Drift(level="differs", equal=False, ranks_equal=3, ranks=4, first_update=4)
NOT_COMPARED = Drift(level="not_compared", equal=None, ranks=4)


def judge(log: Log, *, strategy: str = "cold", **changes: Any) -> Judgement:
    """Judge a run that went as it should; `changes` replace arguments."""
    spec = logs.run_spec(strategy)
    timeline = log.timeline()
    arguments: dict[str, Any] = {
        "drift": EQUAL,
        "ledger": Ledger(missing=0, duplicated=0),
        "faults": [verdicts.evidence(timeline, FAULT, run=spec.name)] if spec.faulted else [],
        "reference_deterministic": True,
    }
    return verdicts.judge(spec, timeline, **{**arguments, **changes})


def lacking(log: Log, *events: str, after: float = 0.0) -> Log:
    """`log` without those events, and without anything later than `after` if that is given."""
    log.events = [
        event
        for event in log.events
        if event.event not in events and (not after or event.t - logs.CLOCK <= after)
    ]
    return log


class TestEvidence:
    """Whether a planned fault fired."""

    def test_absent_and_failed(self) -> None:
        """A rank stayed away and its peer failed for it, and the record says when and how."""
        found = verdicts.evidence(logs.repaired().timeline(), FAULT, run="0-cold")

        assert (
            FaultRecord(
                run="0-cold",
                planned="absent@boundary:3",
                fired=True,
                evidence="rank 3 stayed away after update 3; rank 1 failed after 3.00 s: "
                "RuntimeError: timed out",
            )
            == found
        )

    def test_nobody_stayed_away(self) -> None:
        """A failure without an absent rank is no evidence of the planned fault."""
        found = verdicts.evidence(lacking(logs.repaired(), "fault").timeline(), FAULT, run="r")

        assert not found.fired
        assert "no rank stayed away" == found.evidence

    def test_nobody_failed(self) -> None:
        """A rank that stayed away from nothing broke nothing."""
        found = verdicts.evidence(lacking(logs.repaired(), "failure").timeline(), FAULT, run="r")

        assert not found.fired
        assert "rank 3 stayed away, and no peer's collective failed" == found.evidence

    @pytest.mark.parametrize(
        ("rank", "t", "update"),
        [(logs.ABSENT, 13.5, 3), (logs.PEER, 10.0, 3), (logs.PEER, 13.5, 2)],
    )
    def test_other_failures_do_not_count(self, rank: int, t: float, update: int) -> None:
        """The absent rank's own failure, an earlier one and another update's prove nothing."""
        log = lacking(logs.repaired(), "failure").add(t, "failure", rank, update=update, error="x")

        assert not verdicts.evidence(log.timeline(), FAULT, run="r").fired


class TestJudge:
    """One run, one verdict."""

    @pytest.mark.parametrize("make", [logs.repaired, logs.restarted])
    def test_pass(self, make: Any) -> None:
        """Recovered, frontier reached, bitwise equal: a pass needs no reason."""
        assert verdicts.Judgement(verdict="pass", reason="") == judge(make())

    @pytest.mark.parametrize("event", ["fault", "failure"])
    def test_fault_that_never_fired_is_invalid(self, event: str) -> None:
        """However well it ended, a run without its fault shows nothing."""
        found = judge(lacking(logs.repaired(), event))

        assert "invalid" == found.verdict
        assert "the fault did not fire: absent@boundary:3" == found.reason

    def test_one_of_two_faults_did_not_fire(self) -> None:
        """Every planned fault must fire; those that did not are named."""
        fired = FaultRecord(run="r", planned="absent@boundary:3", fired=True, evidence="")
        silent = FaultRecord(run="r", planned="absent@boundary:4", fired=False, evidence="")
        found = judge(logs.repaired(), faults=[fired, silent])

        assert "invalid" == found.verdict
        assert "the fault did not fire: absent@boundary:4" == found.reason

    def test_not_bitwise_is_fail(self) -> None:
        """One rank that differs is enough, and the reason says since when."""
        found = judge(logs.repaired(), drift=DIFFERS)

        assert "fail" == found.verdict
        assert "from update 4 on; 3 of 4 ranks equal" in found.reason

    def test_control_pair_differs(self) -> None:
        """Contenders of that block are invalid, equal to one reference or not."""
        for found in (
            judge(logs.repaired(), reference_deterministic=False),
            judge(logs.repaired(), reference_deterministic=False, drift=DIFFERS),
        ):
            assert "invalid" == found.verdict
            assert "the reference is not deterministic" == found.reason

    def test_reference_that_differs_from_its_control_fails(self) -> None:
        """The pair itself is held to being equal."""
        found = judge(
            logs.uninterrupted(),
            strategy="reference",
            drift=DIFFERS,
            reference_deterministic=False,
        )

        assert "fail" == found.verdict
        assert found.reason.startswith("state differs from the reference")

    def test_reference_that_equals_its_control_passes(self) -> None:
        """A deterministic pair is two passes."""
        assert "pass" == judge(logs.uninterrupted(), strategy="reference").verdict

    @pytest.mark.parametrize(
        ("missing", "duplicated", "reason"),
        [
            (2, 0, "data ledger: 2 samples missing, 0 duplicated"),
            (0, 1, "data ledger: 0 samples missing, 1 duplicated"),
        ],
    )
    def test_ledger_that_does_not_balance_is_fail(
        self, missing: int, duplicated: int, reason: str
    ) -> None:
        """A sample that is missing or served twice fails a run whose state is equal."""
        found = judge(logs.repaired(), ledger=Ledger(missing=missing, duplicated=duplicated))

        assert verdicts.Judgement(verdict="fail", reason=reason) == found

    @pytest.mark.parametrize(
        "changes", [{"drift": NOT_COMPARED}, {"reference_deterministic": None}]
    )
    def test_without_a_pair_of_references_is_unknown(self, changes: dict[str, Any]) -> None:
        """There is no verdict on a state that nothing could be held against."""
        found = judge(logs.repaired(), **changes)

        assert "unknown" == found.verdict
        assert "no complete pair of references in this block" == found.reason

    def test_ended_without_a_record_is_unknown(self) -> None:
        """A run that just ended, with nothing that says why, is no fail."""
        found = judge(lacking(logs.uninterrupted(), "finish", after=12), faults=[])

        assert "unknown" == found.verdict
        assert "the run ended without a record of its outcome" == found.reason

    @pytest.mark.parametrize(("code", "verdict"), [(1, "fail"), (0, "unknown"), (None, "unknown")])
    def test_killed_and_not_started_again_is_fail(self, code: int | None, verdict: str) -> None:
        """The launcher says how the job ended, but not of one that was stopped for its silence."""
        log = lacking(logs.uninterrupted(), "finish", after=12)
        log.add(12.1, "fault", 3, update=3, phase="boundary", role="killed")
        log.supervise(12.2, "end", code=code)
        found = judge(log, faults=[])

        assert verdict == found.verdict
        assert (verdict == "fail") == found.reason.endswith("the job with status 1"), found

    def test_one_rank_that_did_not_finish(self) -> None:
        """The frontier is reached by all ranks or not at all."""
        log = logs.uninterrupted()
        log.events.remove(log.timeline().select("finish", rank=2)[0])

        assert "unknown" == judge(log, faults=[]).verdict

    def test_failure_after_the_repair_is_fail(self) -> None:
        """The failure that counts is the one the contender was to prevent, not the fault's own."""
        log = lacking(logs.repaired(), after=14.2)
        log.add(14.5, "failure", 0, update=4, error="RuntimeError: no such group")
        found = judge(log, strategy="comm_only")

        assert "fail" == found.verdict
        assert "rank 0 failed in update 4: RuntimeError: no such group" == found.reason

    def test_failure_that_nobody_survived_is_fail(self) -> None:
        """A run that ends at the fault itself gives that as the reason."""
        found = judge(lacking(logs.repaired(), after=13.7))

        assert "fail" == found.verdict
        assert "rank 1 failed in update 3: RuntimeError: timed out" == found.reason

    def test_failure_outside_updates(self) -> None:
        """A rank that failed before training has no update to name."""
        log = Log().add(2, "failure", 3, error="ImportError: torch")
        found = judge(log, faults=[])

        assert "fail" == found.verdict
        assert "rank 3 failed: ImportError: torch" == found.reason

    def test_rejected_and_then_bitwise(self) -> None:
        """A refusal that the supervisor's restart made good is a rejection, not a pass."""
        log = logs.restarted().add(13.7, "reject", logs.PEER, reason="uncommitted boundary")
        found = judge(log, strategy="accelpact")

        assert "rejected" == found.verdict
        assert "uncommitted boundary" == found.reason

    def test_rejected_and_then_wrong(self) -> None:
        """A refusal does not excuse a wrong state."""
        log = logs.restarted().add(13.7, "reject", logs.PEER, reason="uncommitted boundary")

        assert "fail" == judge(log, strategy="accelpact", drift=DIFFERS).verdict

    def test_rejected_and_never_restarted(self) -> None:
        """A refusal after which nobody reached the frontier is a fail, for the refusal's reason."""
        log = lacking(logs.repaired(), after=13.7).add(13.8, "reject", 1, reason="no quorum")

        assert verdicts.Judgement(verdict="fail", reason="no quorum") == judge(log)


class TestErred:
    """A rank whose optimizer's step fails."""

    ERROR = Fault(kind="error", phase="step", update=4)

    @staticmethod
    def log(rank: int) -> Log:
        """Rank 3 says that it was struck, `rank` that its update failed."""
        log = logs.start(logs.Log())
        log.add(11.0, "fault", logs.ABSENT, update=3, phase="step")
        return log.add(11.1, "failure", rank, update=4, error="injected")

    def test_evidence(self) -> None:
        """The rank that was struck fails in that update."""
        found = verdicts.evidence(self.log(logs.ABSENT).timeline(), self.ERROR, run="r")

        assert (True, "rank 3 failed in the optimizer's step of update 4: injected") == (
            found.fired,
            found.evidence,
        )

    def test_failure_of_another_is_no_evidence(self) -> None:
        """It may have failed for any reason."""
        found = verdicts.evidence(self.log(logs.PEER).timeline(), self.ERROR, run="r")

        assert not found.fired


class TestKilled:
    """A rank whose process ends."""

    KILL = Fault(kind="kill", phase="boundary", update=3)

    @staticmethod
    def log() -> Log:
        log = logs.restarted()
        log.events = [
            logs.changed(event, role="killed") if event.event == "fault" else event
            for event in log.events
            if (event.event, event.rank) != ("notice", logs.ABSENT)
        ]
        return log

    def test_evidence(self) -> None:
        """The rank said that it was struck, and nothing more in that life."""
        found = verdicts.evidence(self.log().timeline(), self.KILL, run="r")

        assert (True, "rank 3 was killed after update 3, and is silent from then on") == (
            found.fired,
            found.evidence,
        )

    def test_survivor_is_no_evidence(self) -> None:
        """Who goes on was not killed."""
        found = verdicts.evidence(logs.restarted().timeline(), self.KILL, run="r")

        assert not found.fired

    @pytest.mark.parametrize(("healed", "verdict"), [(True, "pass"), (False, "rejected")])
    def test_restart_of_one_replica(self, *, healed: bool, verdict: str) -> None:
        """It is a recovery if every rank that was started again got a peer's state."""
        log = logs.healed()
        log.events = [
            event for event in log.events
            if healed or (event.event, event.rank) != ("healed", 2)
        ]  # fmt: skip
        timeline = log.timeline()
        found = verdicts.judge(
            logs.run_spec("torchft_manager", launcher_recovers=False),
            timeline,
            drift=EQUAL,
            ledger=Ledger(missing=0, duplicated=0),
            faults=[verdicts.evidence(timeline, self.KILL, run="r")],
            reference_deterministic=True,
        )

        assert verdict == found.verdict

    @pytest.mark.parametrize(("own", "verdict"), [(True, "pass"), (False, "rejected")])
    def test_restart_of_all_ranks(self, *, own: bool, verdict: str) -> None:
        """It is a recovery only of who declares it to be its own."""
        timeline = self.log().timeline()
        found = verdicts.judge(
            logs.run_spec("cold", launcher_recovers=own),
            timeline,
            drift=EQUAL,
            ledger=Ledger(missing=0, duplicated=0),
            faults=[verdicts.evidence(timeline, self.KILL, run="r")],
            reference_deterministic=True,
        )

        assert verdict == found.verdict
