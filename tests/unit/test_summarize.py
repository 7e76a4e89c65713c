"""From the records of a comparison to its summary, and back: any change is noticed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import jsonschema
import msgspec
import pytest

from harness import compare, integration, plan, schemas, summarize, tuning
from harness.records import (
    Contender,
    Drift,
    Ledger,
    RunSummary,
    Summary,
    write_json,
)
from harness.spec import SpecError
from tests.unit import logs
from tests.unit.comparisons import RUNS, described, make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with its report, not to be changed."""
    folder = make(tmp_path_factory.mktemp("comparison"))
    compare.finish(folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "copied")


@pytest.fixture(scope="module")
def summary(finished: Path) -> Summary:
    return summarize.summarize(finished)


def named(summary: Summary, name: str) -> RunSummary:
    (found,) = [run for run in summary.runs if run.name == name]
    return found


class TestSummarize:
    """Every run is measured and judged."""

    def test_verdicts(self, summary: Summary) -> None:
        """What recovered passes, the ablation fails as expected, and nobody else does."""
        assert dict.fromkeys(RUNS, "pass") | {"0-comm_only": "fail", "0-nvrx": "not_run"} == {
            run.name: run.verdict for run in summary.runs
        }
        assert compare.as_expected(summary)
        assert [] == compare.unexpected(summary)

    def test_identity(self, summary: Summary) -> None:
        """A run is what was planned."""
        run = named(summary, "0-cold")

        assert ("cold", "monitor-0.02s", 0, 2, True, False, "pass") == (
            run.strategy,
            run.variant,
            run.block,
            run.order,
            run.faulted,
            run.control,
            run.expected,
        )
        assert "tiny/fsdp1/2x2/gloo-cpu/float32" == run.division

    def test_restart(self, summary: Summary) -> None:
        """Counts, times and state of a cold restart, by hand."""
        run = named(summary, "0-cold")

        assert (5, 2, 0) == (run.committed_updates, run.replayed_updates, run.discarded_updates)
        assert pytest.approx((26.5, 10.5, 3.1, 12.7, 13.5, 15.5)) == (
            run.wall_s,
            run.fault_s,
            run.detection_s,
            run.fault_to_resume_s,
            run.fault_to_next_update_s,
            run.fault_to_frontier_s,
        )
        assert pytest.approx(2560 / 26.5) == run.goodput_tokens_s
        assert pytest.approx(5 / 26.5) == run.runtime_goodput
        assert pytest.approx(1.0) == sum(run.shares.values())
        assert pytest.approx(4450) == run.phases_ms["replay"]
        assert Drift(
            level="bitwise", equal=True, ranks_equal=4, ranks=4, max_abs=0.0, l2=0.0
        ) == run.drift  # fmt: skip
        assert Ledger(missing=0, duplicated=0) == run.data_ledger
        assert (26, 2560) == run.curve[-1]
        assert (None, None, None) == (run.repair_ms, run.floor_ms, run.references_rebound)

    def test_repair(self, summary: Summary) -> None:
        """Repair, floor and references of a repair in place."""
        run = named(summary, "0-accelpact")

        assert 0 == run.replayed_updates
        assert pytest.approx((1.9, 2.0)) == (run.repair_ms, run.floor_ms)
        assert (5, 0) == (run.references_rebound, run.references_left)
        assert [logs.PEER, logs.ABSENT] == [each.rank for each in run.references]

    def test_run_that_ended_early(self, summary: Summary) -> None:
        """A failed run says why and has no figures of a run that got there."""
        run = named(summary, "0-comm_only")

        assert "rank 1 failed in update 4: RuntimeError: stale group" == run.reason
        assert (3, 3.1) == (run.committed_updates, pytest.approx(run.detection_s))
        assert (None, None, None) == (run.wall_s, run.goodput_tokens_s, run.runtime_goodput)
        assert (None, None) == (run.fault_to_resume_s, run.fault_to_frontier_s)
        assert "not_compared" == run.drift.level
        assert pytest.approx(1.0) == sum(run.shares.values())

    def test_resources(self, summary: Summary) -> None:
        """The largest value over the ranks."""
        expected = {"threads": 23, "descriptors": 40, "rss_bytes": 10**8, "groups": 3}

        assert {"before": expected, "after": expected} == named(summary, "0-cold").resources

    def test_faults(self, summary: Summary) -> None:
        """Evidence for every faulted run, and only for those."""
        assert {"0-cold", "0-accelpact", "0-comm_only"} == {each.run for each in summary.faults}
        assert all(each.fired for each in summary.faults)

    def test_ratios_and_overhead(self, summary: Summary) -> None:
        """Paired within the block: a cold restart takes 9.6 s where a repair takes 0.5 s."""
        (recovery,) = [each for each in summary.ratios if each.metric == "recovery_s"]
        overhead = {each.strategy: each.ratio for each in summary.overhead}

        assert ("cold", "accelpact", 1) == (recovery.numerator, recovery.denominator, recovery.n)
        assert pytest.approx(9.6 / 0.5) == recovery.median
        assert pytest.approx({"reference": 1.0, "cold": 1.0, "accelpact": 1.0}) == overhead

    def test_not_run(self, summary: Summary) -> None:
        """A contender that cannot run here has an entry with the reason, after all runs."""
        run = summary.runs[-1]

        assert ("0-nvrx", "nvrx", "not_run") == (run.name, run.strategy, run.verdict)
        assert "package nvidia-resiliency-ext is not installed" == run.reason
        assert Drift(level="not_compared", equal=None) == run.drift
        assert [False] == [each.available for each in summary.contenders if each.name == "nvrx"]

    def test_schema(self, summary: Summary) -> None:
        """The summary is what its published schema allows."""
        jsonschema.Draft202012Validator(schemas.load("summary")).validate(
            json.loads(msgspec.json.encode(summary))
        )

    def test_contenders(self, summary: Summary) -> None:
        """Version, variant, settings and lines of code are recorded."""
        (cold,) = [each for each in summary.contenders if each.name == "cold"]

        assert isinstance(cold, Contender)
        lines = integration.integration_lines("cold")
        assert ("monitor-0.02s", lines) == (cold.variant, cold.integration_lines)
        assert lines
        assert 1 == cold.settings["max_restarts"]
        assert "pydoc_data.topics" in summary.spec["data"]["name"]


def without(folder: Path, name: str) -> Summary:
    """Summarize `folder` after a run has vanished."""
    shutil.rmtree(folder / "runs" / name)
    return summarize.summarize(folder)


def stray(folder: Path, name: str, *, update: int, rank: int) -> None:
    """Change the state that one rank of a run reached."""
    path = folder / "runs" / name / "digests.jsonl"
    with path.open("ab") as file:
        file.write(msgspec.json.encode(logs.digest(update, rank, weights="v")) + b"\n")


class TestBlock:
    """A block's two references decide about all of it."""

    def test_control_pair_differs(self, copied: Path) -> None:
        """Both references fail, and nothing can be said about a contender that passed."""
        stray(copied, "0-reference-control", update=2, rank=3)
        found = {run.name: run.verdict for run in summarize.summarize(copied).runs}

        assert {"fail"} == {found["0-reference"], found["0-reference-control"]}
        assert {"invalid"} == {found["0-cold"], found["0-accelpact"], found["0-cold-fault-free"]}
        assert "fail" == found["0-comm_only"]

    @pytest.mark.parametrize("name", ["0-reference", "0-reference-control"])
    def test_reference_is_missing(self, copied: Path, name: str) -> None:
        """Without a pair there is no verdict on runs that reached the frontier."""
        found = without(copied, name)

        assert "unknown" == named(found, "0-cold").verdict
        assert "fail" == named(found, "0-comm_only").verdict
        assert not compare.as_expected(found)

    def test_one_rank_differs(self, copied: Path) -> None:
        """A contender that is not bitwise equal fails and is reported as unexpected."""
        stray(copied, "0-accelpact", update=5, rank=2)
        drift = copied / "runs" / "0-accelpact" / "drift.json"
        write_json(drift, {"reference": "0-reference", "numbers": [0.25, 1.5]})
        found = summarize.summarize(copied)
        run = named(found, "0-accelpact")

        assert "fail" == run.verdict
        assert (3, 5, 0.25, 1.5) == (
            run.drift.ranks_equal,
            run.drift.first_update,
            run.drift.max_abs,
            run.drift.l2,
        )
        assert ["0-accelpact"] == [each.name for each in compare.unexpected(found)]

    def test_recovery_of_what_must_fail(self, copied: Path) -> None:
        """A pass is unexpected where a fail was expected."""
        logs.write_lines(
            copied / "runs" / "0-comm_only" / "events.jsonl", logs.repaired().events
        )  # fmt: skip
        logs.write_lines(
            copied / "runs" / "0-comm_only" / "digests.jsonl", logs.digests(logs.repaired())
        )
        found = summarize.summarize(copied)

        assert ["0-comm_only"] == [each.name for each in compare.unexpected(found)]
        assert not compare.as_expected(found)


class TestLimits:
    """What the records cannot say."""

    def test_of_one_block_on_cpu(self, summary: Summary) -> None:
        """Few blocks, CPU, one machine, who was not run and which faults were not tried."""
        text = "\n".join(summary.limits)

        for part in (
            "1 block: below 6 pairs no interval",
            "CPU and Gloo: nothing here was measured on a GPU",
            "One machine",
            "nvrx was not run: package nvidia-resiliency-ext is not installed.",
            "Faults tried: absent@boundary. Not tried: absent@forward",
        ):
            assert part in text
        assert "interrupted" not in text
        assert "No conclusion rests" not in text

    def test_interrupted(self, copied: Path) -> None:
        """A comparison that did not get to its end says so."""
        write_json(copied / "comparison.json", described(complete=False))

        assert "interrupted" in summarize.summarize(copied).limits[0]

    def test_silent_runs(self, copied: Path) -> None:
        """Runs that are invalid or unknown are named."""
        found = without(copied, "0-reference-control")

        assert "No conclusion rests on runs that are invalid or unknown" in "\n".join(found.limits)
        assert "0-cold" in found.limits[-2]


class TestDamage:
    """Records that cannot be read."""

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda folder: (folder / "comparison.json").unlink(), "comparison.json"),
            (lambda folder: (folder / "comparison.json").write_text("[]"), "folder: expected"),
            (lambda folder: (folder / "environment.json").unlink(), "environment.json"),
            (lambda folder: (folder / "runs/0-cold/run.json").write_text("{}"), "name"),
            (lambda folder: (folder / "runs/0-cold/drift.json").write_text("{"), "folder:"),
            (
                lambda folder: (folder / "runs/0-cold/events.jsonl").write_text("{}\n"),
                "events.jsonl, line 1",
            ),
            (
                lambda folder: (folder / "runs/0-cold/digests.jsonl").write_text('{"a":1}\n'),
                "digests.jsonl, line 1",
            ),
        ],
    )
    def test_is_one_line(
        self, copied: Path, damage: Callable[[Path], object], message: str
    ) -> None:
        """A damaged or missing record is the user's to know, by file."""
        damage(copied)
        with pytest.raises(SpecError) as refused:
            summarize.summarize(copied)

        assert str(refused.value).startswith("folder: expected the records of a comparison; ")
        assert message in str(refused.value)
        assert 1 == len(str(refused.value).splitlines())

    def test_run_without_events(self, copied: Path) -> None:
        """A run that recorded nothing is no reason to lose the others."""
        for name in ("events.jsonl", "digests.jsonl", "resources.jsonl"):
            (copied / "runs" / "0-accelpact-fault-free" / name).unlink()
        found = summarize.summarize(copied)

        assert "unknown" == named(found, "0-accelpact-fault-free").verdict
        assert {} == named(found, "0-accelpact-fault-free").shares
        assert "pass" == named(found, "0-accelpact").verdict

    def test_interrupted_before_the_first_run(self, tmp_path: Path) -> None:
        """Even without any run the records give a report."""
        write_json(tmp_path / "environment.json", {})
        write_json(tmp_path / "comparison.json", described(complete=False))
        found = compare.finish(tmp_path)

        assert ["0-nvrx"] == [run.name for run in found.runs]
        assert [] == compare.check(tmp_path)


class TestTuning:
    """What was tried, collected from a summary."""

    def test_from_summary(self, summary: Summary) -> None:
        """Faulted runs by contender and variant, with what each gave."""
        contenders = ("cold", "comm_only", "accelpact")
        runs = [
            msgspec.structs.replace(
                run, variant=plan.contenders((run.strategy,))[0].strategy.variant
            )
            for run in summary.runs
            if run.strategy in contenders
        ]
        found = tuning.from_summary(msgspec.structs.replace(summary, runs=runs))
        (cold,) = found["cold"]

        assert set(contenders) == found.keys()
        assert ("monitor-0.02s", {"monitor_interval": 0.02}, 1) == (
            cold.variant,
            cold.options,
            cold.n,
        )
        assert pytest.approx(9.6) == cold.recovery_s
        assert ["pass"] == cold.verdicts
        assert "torch 2.14.0" in cold.source
        assert found["comm_only"][0].recovery_s is None

    def test_every_contender_has_what_was_tried_or_nothing(self) -> None:
        """The recorded file can be read, and an unknown contender has no entry."""
        assert [] == tuning.tried("nobody")
