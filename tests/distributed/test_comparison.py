"""A comparison by the command line, its ranks started by torch's launcher.

What each contender does and records is in `tests/conformance`; here is what a comparison makes of
the records of one that restarts and one that repairs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from harness.records import RunSummary, Summary

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

UPDATES, CHECKPOINT_AT, FAULT_AFTER = 4, 1, 2
RECOVERING = ["accelpact", "cold"]
MARK = "ACCELPACT_TEST_MARK"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one block; return its folder."""
    folder = tmp_path_factory.mktemp("comparison") / "out"
    mark = f"{os.getpid()}-{folder.parent.name}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "harness", "compare", "--out", str(folder)),
            *("--strategies", ",".join(RECOVERING), "--group-timeout", "2"),
            *("--updates", str(UPDATES), "--checkpoint-at", str(CHECKPOINT_AT)),
            *("--fault", f"absent@boundary:{FAULT_AFTER}"),
        ],
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not marked(mark), "the comparison left processes behind"
    return folder


def marked(mark: str) -> list[int]:
    """Processes that carry `mark` in their environment."""
    found = psutil.process_iter(["environ"])
    return [each.pid for each in found if (each.info["environ"] or {}).get(MARK) == mark]


@pytest.fixture(scope="module")
def summary(comparison: Path) -> Summary:
    return msgspec.json.decode((comparison / "summary.json").read_bytes(), type=Summary)


def the_run(summary: Summary, name: str, *, faulted: bool = True) -> RunSummary:
    return next(run for run in summary.runs if (run.strategy, run.faulted) == (name, faulted))


class TestRuns:
    def test_reference_pair_is_bitwise_equal(self, summary: Summary) -> None:
        """Two uninterrupted runs give the same bits on every rank at every update."""
        pair = [run for run in summary.runs if run.strategy == "reference"]

        assert ["pass", "pass"] == [run.verdict for run in pair]
        assert [True, True] == [run.drift.equal for run in pair]
        assert [UPDATES, UPDATES] == [run.committed_updates for run in pair]

    @pytest.mark.parametrize("faulted", [True, False])
    @pytest.mark.parametrize("name", RECOVERING)
    def test_contender_reaches_the_reference(
        self, summary: Summary, name: str, *, faulted: bool
    ) -> None:
        """Struck or not, the state of every rank is the reference's, bit for bit."""
        run = the_run(summary, name, faulted=faulted)

        assert "pass" == run.verdict, run.reason
        assert (True, 4) == (run.drift.equal, run.drift.ranks_equal)
        assert (UPDATES, 0) == (run.committed_updates, run.data_ledger.missing)

    def test_only_a_restart_replays(self, summary: Summary) -> None:
        """It has to do again what came after the checkpoint."""
        replayed = {name: the_run(summary, name).replayed_updates for name in RECOVERING}

        assert {"accelpact": 0, "cold": FAULT_AFTER - CHECKPOINT_AT} == replayed

    def test_fault_fired(self, summary: Summary) -> None:
        """Once in each run that was to be struck."""
        assert 2 == len(summary.faults)
        assert all(fault.fired for fault in summary.faults), summary.faults

    @pytest.mark.parametrize("name", RECOVERING)
    def test_recovery_is_measured(self, summary: Summary, name: str) -> None:
        """From the fault to its detection, to the next update, to the end."""
        run = the_run(summary, name)
        times = [
            run.detection_s,
            run.fault_to_resume_s,
            run.fault_to_next_update_s,
            run.fault_to_frontier_s,
        ]

        assert None not in times
        assert times == sorted(time for time in times if time is not None)
        assert pytest.approx(1.0) == sum(run.shares.values())

    def test_repair_is_compared_with_its_floor(self, summary: Summary) -> None:
        """The bare cost of the same steps, in the same run."""
        run = the_run(summary, "accelpact")

        assert (run.repair_ms or 0) > 0
        assert (run.floor_ms or 0) > 0


class TestReport:
    def test_is_what_the_records_give(self, comparison: Path) -> None:
        """Report, figures, summary and checksums can be rebuilt byte for byte."""
        done = subprocess.run(
            [sys.executable, "-m", "harness", "report", str(comparison), "--check"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

        assert 0 == done.returncode, done.stdout + done.stderr

    def test_names_every_contender(self, comparison: Path) -> None:
        """Those that were asked for, and the reference."""
        text = (comparison / "report.md").read_text()

        assert [] == [name for name in ("reference", *RECOVERING) if name not in text]

    def test_records_name_no_path_of_this_machine(self, comparison: Path) -> None:
        """What is meant to be published does not say where it was made."""
        home, project = str(Path.home()), str(Path.cwd())
        texts = {
            path: path.read_text(errors="replace")
            for path in comparison.rglob("*")
            if path.is_file()
        }

        assert [] == [
            path.name
            for path, text in texts.items()
            if f"{home}/" in text or f"{project}/" in text or str(comparison) in text
        ]
