"""Qualifying: what is planned, what records prove, and what is printed of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from accelpact import _envelope
from accelpact._envelope import DISCARD, L1, L2
from harness import options, plan
from harness.progress import Progress
from harness.qualify import command, evidence, render, running, trials
from harness.qualify.trials import ALWAYS_L1, ALWAYS_L2, NO_RECOVERY, POLICIES, QUALIFIED
from harness.records import Drift, Ledger, RunSummary
from harness.spec import Fault, SpecError
from strategies import Platform
from tests.unit import envelopes, logs
from tests.unit.envelopes import entry, envelope, key, trial

if TYPE_CHECKING:
    from pathlib import Path

    from harness.qualify.evidence import Finding
    from harness.qualify.trials import Policy

BOUNDARY = Fault.parse("absent@boundary:2")
BACKWARD = Fault.parse("absent@backward:3")


def finding(policy: Policy, fault: Fault = BOUNDARY, **changes: Any) -> Finding:
    """A trial that went well, and whose runtime asked what it would ask."""
    verdict = changes.pop("verdict", "pass")
    action = DISCARD if fault.inside else L1
    phase = "backward" if fault.inside else "boundary"
    asked = evidence.Asked(key=key(phase), action=action, admitted=changes.pop("admitted", True))
    run = RunSummary(
        name="0-x",
        strategy=policy.strategy,
        variant="auto",
        block=0,
        order=0,
        faulted=True,
        control=False,
        verdict=verdict,
        expected="pass",
        reason=changes.pop("reason", ""),
        division="tiny/fsdp1",
        committed_updates=4,
        replayed_updates=0,
        discarded_updates=0,
        drift=Drift(level="bitwise", equal=True),
        data_ledger=Ledger(missing=0, duplicated=0),
    )
    fields: dict[str, Any] = {
        "fault": fault,
        "policy": policy,
        "summary": run,
        "asked": (asked,),
        "digests": envelopes.ROOTS,
        "expected": envelopes.ROOTS,
    }
    return evidence.Finding(**{**fields, **changes})


def actions(*findings: Finding) -> dict[str, tuple[str, ...]]:
    """Which actions trials prove, by phase."""
    return {each.key.phase: each.actions for each in evidence.entries(findings)[0]}


class TestEvidence:
    """Only trials that went well, all of them, prove an action, and only for what was asked."""

    def test_actions_that_went_well(self) -> None:
        found = actions(
            finding(ALWAYS_L1),
            finding(ALWAYS_L2, verdict="rejected", admitted=False),
            finding(ALWAYS_L1, BACKWARD),
        )

        assert {"boundary": (L1, L2), "backward": (DISCARD,)} == found

    @pytest.mark.parametrize("verdict", ["fail", "rejected", "invalid", "unknown"])
    def test_one_that_did_not_takes_it_away(self, verdict: str) -> None:
        """Whatever came of it, and whichever trial it was."""
        good, bad = finding(ALWAYS_L1), finding(ALWAYS_L1, verdict=verdict)

        assert {"boundary": ()} == actions(good, bad) == actions(bad, good)

    def test_its_own_file_can_prove_it_wrong(self) -> None:
        """A trial that the file admitted, and that failed."""
        assert {"boundary": ()} == actions(finding(ALWAYS_L1), finding(QUALIFIED, verdict="fail"))

    def test_other_digests_prove_nothing(self) -> None:
        assert {"boundary": ()} == actions(finding(ALWAYS_L1, digests={"0": "other"}))

    def test_what_was_not_admitted_is_a_hand_over(self) -> None:
        """The runtime asked its file, was refused, and the job was restarted well."""
        found = finding(QUALIFIED, verdict="rejected", admitted=False)

        assert {"boundary": (L2,)} == actions(found)

    def test_ranks_that_asked_in_two_phases(self) -> None:
        """The trial counts for both keys, well or not."""
        both = (
            evidence.Asked(key=key("forward"), action=DISCARD, admitted=True),
            evidence.Asked(key=key("backward"), action=DISCARD, admitted=True),
        )
        good = finding(ALWAYS_L1, BACKWARD, asked=both)
        bad = finding(ALWAYS_L1, BACKWARD, asked=both, verdict="fail")

        assert {"forward": (DISCARD,), "backward": (DISCARD,)} == actions(good)
        assert {"forward": (), "backward": ()} == actions(good, bad)

    def test_runtime_that_died_before_it_asked(self) -> None:
        """It was struck as those were that asked, and takes their action away."""
        assert {"boundary": ()} == actions(
            finding(ALWAYS_L1), finding(ALWAYS_L1, asked=(), verdict="fail")
        )

    def test_no_key_is_made_up(self) -> None:
        """If no runtime asked anything, the trial has no key, and the file says so."""
        made, lost = evidence.entries([finding(NO_RECOVERY, asked=(), verdict="fail")])

        assert () == made
        assert "the runtime was not asked" in lost[0]

    def test_no_recovery_stands_beside_the_others(self) -> None:
        """It has no action, so it proves none and takes none away."""
        made, lost = evidence.entries(
            [finding(ALWAYS_L1), finding(NO_RECOVERY, asked=(), verdict="fail")]
        )

        assert [] == lost
        assert (L1,) == made[0].actions
        assert ["always L1", "no recovery"] == [each.policy for each in made[0].trials]

    def test_is_read_from_the_runtimes_record(self, tmp_path: Path) -> None:
        """Each question once, whichever ranks asked it."""
        asked = {"event": "admission", "action": L1, "key": dataclasses.asdict(key())}
        lines = [{"event": "attach"}, {**asked, "reason": None}, {**asked, "reason": "no"}]
        for rank in (0, 1):
            text = "\n".join(map(json.dumps, lines))
            (tmp_path / f"rank{rank}.jsonl").write_text(text + "\n")
        found = evidence.asked(tmp_path)

        assert [True, False] == [each.admitted for each in found]
        assert {(key(), L1)} == {(each.key, each.action) for each in found}

    def test_digests_are_the_last_updates(self, tmp_path: Path) -> None:
        log = logs.restarted()
        logs.write_lines(tmp_path / "digests.jsonl", logs.digests(log))
        found = evidence.final_roots(tmp_path, logs.UPDATES)

        assert {"0", "1", "2", "3"} == set(found)
        assert logs.digest(logs.UPDATES, 2).root == found["2"]


class TestPromises:
    """What makes the command end with 1."""

    @pytest.mark.parametrize(
        ("policy", "action", "verdict", "promised"),
        [
            ("no recovery", "none", "fail", True),
            ("no recovery", "none", "pass", False),
            ("always L1", L1, "fail", True),
            ("always L2", L2, "rejected", True),
            ("always L2", L2, "fail", False),
            ("qualified", L1, "pass", True),
            ("qualified", L1, "rejected", False),
            ("qualified", L2, "rejected", True),
        ],
    )
    def test_policy(self, policy: str, action: str, verdict: str, promised: bool) -> None:  # noqa: FBT001
        """Always L1 finds out what is so; what the file admits must go well."""
        found = trial(action, policy=policy, verdict=verdict)

        assert promised == evidence.is_as_promised(found)


class TestPlan:
    def test_faults_strike_after_the_same_commit(self) -> None:
        assert {trials.FRONTIER} == {each.frontier for each in trials.chosen_faults([])}

    @pytest.mark.parametrize("wrong", [["absent@night"], ["absent@forward"] * 2, ["kill@boundary"]])
    def test_wrong_faults(self, wrong: list[str]) -> None:
        with pytest.raises(SpecError, match=r"^faults: expected"):
            trials.chosen_faults(wrong)

    @pytest.mark.parametrize("wrong", [["dp"], ["ddp", "ddp"]])
    def test_wrong_rows(self, wrong: list[str]) -> None:
        with pytest.raises(SpecError, match=r"^rows: expected"):
            trials.chosen_rows(wrong)

    def test_what_cannot_strike(self) -> None:
        """DDP's forward pass has no collective that could fail."""
        forward = next(each for each in trials.chosen_faults([]) if each.phase == "forward")
        found = {row.name for row in trials.ROWS.values() if trials.impossible(row, forward)}

        assert {"ddp", "compiled"} == found

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.label)
    def test_trial(self, policy: Policy, tmp_path: Path) -> None:
        """The runtime records into the run's folder; who must not restart does not."""
        row = trials.ROWS["fsdp2"]
        spec = trials.spec_of(options.make_spec(), row, BACKWARD)
        found = trials.planned(spec, BACKWARD, policy, 1, tmp_path, "gloo")
        environment = found.settings["environment"]

        assert f"0-backward-{policy.label}-1" == found.name
        assert str(tmp_path / found.name) == environment["ACCELPACT_EVENTS"]
        assert (0 if policy is NO_RECOVERY else 1) == found.settings["max_restarts"]
        assert msgspec.json.encode(found)

    def test_compiled_runs_are_compared_with_their_like(self, tmp_path: Path) -> None:
        """They are a division of their own."""
        spec = trials.spec_of(options.make_spec(), trials.ROWS["compiled"], BOUNDARY)
        found = trials.planned(spec, BOUNDARY, ALWAYS_L1, 0, tmp_path, "gloo")

        assert "tiny/ddp/2x1/gloo-cpu/float32+compiled" == found.division

    def test_forward_pass_fails_first(self, tmp_path: Path) -> None:
        """Its shard peers' timeout is the shorter one then."""
        forward = Fault.parse("absent@forward:3")
        spec = trials.spec_of(options.make_spec(), trials.ROWS["fsdp1"], forward)
        found = trials.planned(spec, forward, ALWAYS_L1, 0, tmp_path, "gloo").settings

        assert found["shard_timeout"] < found["group_timeout"]


class TestLimit:
    def test_nothing_begins_that_might_end_too_late(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file is written all the same, and says what was not tried."""
        monkeypatch.setattr(running, "Forks", contextlib.nullcontext)
        records = tmp_path / "records"
        records.mkdir()
        found = running.run(
            options.make_spec(),
            rows=trials.chosen_rows(["ddp"]),
            faults=trials.chosen_faults(["absent@boundary"]),
            num_trials=2,
            limit_s=1.0,
            platform=Platform(device="cpu", backend="gloo"),
            records=records,
            out=tmp_path / "envelope.json",
            progress=Progress(),
        )

        assert () == found.entries
        assert found.not_run == _envelope.read(tmp_path / "envelope.json").not_run
        (said,) = found.not_run
        assert said.startswith("ddp, absent@boundary, l1 (2 of 2), l2 (2 of 2), none (2 of 2)")
        assert "qualified (1 of 1): the limit of 0.0166667 min was reached" in said

    def test_interrupt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was proven so far is kept."""

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(running, "Forks", contextlib.nullcontext)
        monkeypatch.setattr(running.supervisor, "execute", interrupted)
        (tmp_path / "records").mkdir()
        with pytest.raises(KeyboardInterrupt):
            running.run(
                options.make_spec(),
                rows=trials.chosen_rows(["ddp"]),
                faults=[BOUNDARY],
                num_trials=1,
                limit_s=600.0,
                platform=Platform(device="cpu", backend="gloo"),
                records=tmp_path / "records",
                out=tmp_path / "envelope.json",
                progress=Progress(),
            )

        (said,) = _envelope.read(tmp_path / "envelope.json").not_run
        assert said.endswith(": interrupted")


class TestCommand:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"out": None}, "out: expected a file in a folder that exists; found none"),
            ({"num_trials": 0}, "trials: expected at least 1; found 0"),
            ({"limit_s": 0.0}, "limit: expected minutes above 0; found 0"),
            ({"limit_s": math.nan}, "limit: expected minutes above 0; found nan"),
            ({"rows": ["fsdp3"]}, "rows: expected one of"),
            ({"faults": ["absent"]}, "faults: expected one of"),
            ({"workload": "huge"}, "workload: expected one of"),
            ({"device": "tpu"}, "device: expected one of"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, given: dict[str, Any], message: str) -> None:
        """One line that names the option; nothing is started or written."""
        fields: dict[str, Any] = {
            "out": tmp_path / "envelope.json",
            "rows": [],
            "faults": [],
            "num_trials": 1,
            "limit_s": 600.0,
            "workload": "tiny",
            "device": "cpu",
            "records": None,
            "refuse": RuntimeError,
        }
        with pytest.raises(SpecError) as caught:
            command.qualify(**{**fields, **given})

        assert str(caught.value).startswith(message)
        assert [] == list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["missing.json", "", "."])
    def test_envelope_that_is_not_there(self, tmp_path: Path, name: str) -> None:
        """A path on the command line is the user's mistake; what is in the file is not."""
        path = str(tmp_path / name) if name else ""
        with pytest.raises(SpecError, match=r"^envelope: expected a file"):
            options.make_spec(envelope=path)


class TestExpected:
    """With an envelope, what it does not admit is expected to be handed over."""

    @staticmethod
    def expected(
        path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "accelpact", **given: Any
    ) -> str:
        monkeypatch.setattr(_envelope, "stack_of", lambda **_: dict(envelopes.STACK))
        spec = options.make_spec(envelope=str(path), **given)
        runs = plan.block_runs(spec, plan.contenders([name]), block=0, backend="gloo")
        return next(run.expected for run in runs if run.faulted)

    def test_of_a_boundary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        envelope().write(tmp_path / "e.json")

        assert "pass" == self.expected(tmp_path / "e.json", monkeypatch)
        assert "rejected" == self.expected(
            tmp_path / "e.json", monkeypatch, fault=["absent@backward:8"]
        )
        assert "rejected" == self.expected(tmp_path / "e.json", monkeypatch, wrapper="ddp")
        assert "rejected" == self.expected(tmp_path / "e.json", monkeypatch, compiled=True)

    def test_of_an_update(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever pass the absent rank is in, it is a reduction that fails."""
        envelope(entry(trial(DISCARD), phase="backward")).write(tmp_path / "e.json")
        for phase in ("forward", "backward"):
            fault = [f"absent@{phase}:8"]
            assert "pass" == self.expected(tmp_path / "e.json", monkeypatch, fault=fault)

    def test_of_a_damaged_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "e.json").write_text("{")

        assert "rejected" == self.expected(tmp_path / "e.json", monkeypatch)

    @pytest.mark.parametrize(("name", "expected"), [("cold", "pass"), ("comm_only", "fail")])
    def test_of_who_asks_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
    ) -> None:
        (tmp_path / "e.json").write_text("{")

        assert expected == self.expected(tmp_path / "e.json", monkeypatch, name)


class TestTable:
    """Everything in it is from the file."""

    @pytest.fixture
    def text(self) -> str:
        made = entry(
            trial("none", policy="no recovery", verdict="fail", digests={}),
            trial(),
            trial(verdict="fail", reason="state | differs"),
            trial(L2, policy="always L2", verdict="rejected", replayed_updates=3),
            profile="ddp, eager, rebuild",
        )
        given = envelope(made, entry(trial(DISCARD, discarded_updates=1), phase="backward"))
        return render(dataclasses.replace(given, not_run=("what was left",)))

    @pytest.mark.parametrize(
        "row",
        [
            "| ddp, eager, rebuild | boundary | no recovery | - | 0/1 | 0 | 0 | 0 | A100 0/4",
            "| ddp, eager, rebuild | boundary | always L1 | L1 | 1/2 | 1 | 0 | 0 | A100 4/4",
            "| ddp, eager, rebuild | boundary | always L2 | L2 | 1/1 | 0 | 3 | 0 | A100 4/4, 32",
            "| fsdp1, eager, rebuild | backward | always L1 | discard | 1/1 | 0 | 0 | 1 | - |",
            "- ddp, eager, rebuild, boundary: L2",
            "- fsdp1, eager, rebuild, backward: discard",
            "- what was left",
        ],
    )
    def test_rows(self, text: str, row: str) -> None:
        """Counts by policy and action, the paper's beside those made as it made them."""
        assert any(line.startswith(row) for line in text.splitlines()), text

    def test_policies_that_were_not_tried_have_no_row(self, text: str) -> None:
        assert "| qualified |" not in text
