"""Every contender, with the fault and without, on four real ranks, by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

import strategies
from harness.records import Digests, RunSummary, Summary, read_lines
from tests.packages import install

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

UPDATES, CHECKPOINT_AT, FAULT_AFTER = 6, 2, 4
AGE = FAULT_AFTER - CHECKPOINT_AT
NUM_RANKS = 4
IN_PLACE = ["torchft_pg", "c10d_reconfigure", "accelpact"]
TAKING_BACK = ["torchft_manager"]
RESTORING = ["cold", "nvrx"]
MARK = "ACCELPACT_TEST_MARK"
EXAMPLE = Path(__file__).parents[2] / "examples" / "strategy" / "rerun.py"
"""A contender of another package."""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one block of everything, another package's contender included; return its folder."""
    folder = tmp_path_factory.mktemp("comparison") / "out"
    packages = [str(install_example(folder.parent)), *filter(None, [os.environ.get("PYTHONPATH")])]
    mark = f"{os.getpid()}-{folder.parent.name}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "harness", "compare", "--out", str(folder)),
            *("--updates", str(UPDATES), "--checkpoint-at", str(CHECKPOINT_AT)),
            *("--fault", f"absent@boundary:{FAULT_AFTER}"),
        ],
        env={**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(packages)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not marked(mark), "the comparison left processes behind"
    return folder


def install_example(folder: Path) -> Path:
    """Make a folder into which a package with the example was installed."""
    packages = install(folder / "packages", "rerun", "rerun", {"rerun": "Rerun"})
    shutil.copy(EXAMPLE, packages)
    return packages


def marked(mark: str) -> list[int]:
    """Processes that carry `mark` in their environment."""
    found = psutil.process_iter(["environ"])
    return [each.pid for each in found if (each.info["environ"] or {}).get(MARK) == mark]


@pytest.fixture(scope="module")
def summary(comparison: Path) -> Summary:
    return msgspec.json.decode((comparison / "summary.json").read_bytes(), type=Summary)


def the_run(summary: Summary, name: str, *, faulted: bool = True) -> RunSummary:
    """The run of that contender, or a skip where its package is missing."""
    own = [run for run in summary.runs if run.strategy == name]
    if own and own[0].verdict == "not_run":
        pytest.skip(own[0].reason)
    return next(run for run in own if run.faulted == faulted)


class TestReference:
    def test_pair_is_bitwise_equal(self, summary: Summary) -> None:
        """Two uninterrupted runs give the same bits on every rank at every update."""
        pair = [run for run in summary.runs if run.strategy == "reference"]

        assert ["pass", "pass"] == [run.verdict for run in pair]
        assert [True, True] == [run.drift.equal for run in pair]
        assert [UPDATES, UPDATES] == [run.committed_updates for run in pair]

    def test_ranks_have_states_of_their_own(self, comparison: Path) -> None:
        """No two ranks of a run have the same root, or equality would prove nothing."""
        records = read_lines(comparison / "runs" / "0-reference" / "digests.jsonl", Digests)
        last = {record.rank: record for record in records if record.update == UPDATES}

        assert NUM_RANKS == len({record.root for record in last.values()})
        assert NUM_RANKS == len({record.tensors["rng/cpu"] for record in last.values()})

    def test_every_update_changes_the_state(self, comparison: Path) -> None:
        """A rank's roots all differ, or training did nothing."""
        records = read_lines(comparison / "runs" / "0-reference" / "digests.jsonl", Digests)

        assert UPDATES == len({record.root for record in records if record.rank == 0})


class TestContender:
    @pytest.mark.parametrize("name", [*IN_PLACE, *TAKING_BACK, *RESTORING])
    def test_recovers_to_the_reference(self, summary: Summary, name: str) -> None:
        """The frontier is reached and every rank's state is the reference's, bit for bit."""
        run = the_run(summary, name)

        assert "pass" == run.verdict, run.reason
        assert (True, NUM_RANKS) == (run.drift.equal, run.drift.ranks_equal)
        assert UPDATES == run.committed_updates

    @pytest.mark.parametrize("name", IN_PLACE)
    def test_in_place_replays_nothing(self, summary: Summary, name: str) -> None:
        """Who keeps the state does no update twice."""
        assert 0 == the_run(summary, name).replayed_updates

    @pytest.mark.parametrize("name", TAKING_BACK)
    def test_what_is_taken_back_is_counted(self, summary: Summary, name: str) -> None:
        """A failure between updates spoils the next one, which is discarded and not replayed."""
        run = the_run(summary, name)

        assert (0, 1) == (run.replayed_updates, run.discarded_updates)
        assert run.shares["discarded"] > 0

    @pytest.mark.parametrize("name", RESTORING)
    def test_restore_replays_the_checkpoints_age(self, summary: Summary, name: str) -> None:
        """Who restores a checkpoint does again what came after it."""
        assert AGE == the_run(summary, name).replayed_updates

    @pytest.mark.parametrize("name", [*IN_PLACE, *TAKING_BACK, *RESTORING])
    def test_consumes_every_sample_once(self, summary: Summary, name: str) -> None:
        """The committed history has every place of the data order exactly once."""
        ledger = the_run(summary, name).data_ledger

        assert (0, 0) == (ledger.missing, ledger.duplicated)

    @pytest.mark.parametrize("name", [*IN_PLACE, *TAKING_BACK, *RESTORING, "comm_only"])
    def test_fault_fired(self, summary: Summary, name: str) -> None:
        """There is evidence that a rank stayed away and that its peer waited out the timeout."""
        run = the_run(summary, name)
        fault = next(fault for fault in summary.faults if fault.run == run.name)

        assert fault.fired
        assert "rank 3 stayed away" in fault.evidence
        assert 2.5 < (run.detection_s or 0) < 20

    @pytest.mark.parametrize("name", [*IN_PLACE, *TAKING_BACK, *RESTORING, "comm_only"])
    def test_fault_free_run_equals_the_reference(self, summary: Summary, name: str) -> None:
        """What a contender adds to training changes no bit of it."""
        run = the_run(summary, name, faulted=False)

        assert ("pass", True) == (run.verdict, run.drift.equal)

    @pytest.mark.parametrize("name", [*IN_PLACE, *TAKING_BACK, *RESTORING])
    def test_wall_time_is_accounted_for(self, summary: Summary, name: str) -> None:
        """The shares of the wall time add up to 1."""
        assert pytest.approx(1.0) == sum(the_run(summary, name).shares.values())

    @pytest.mark.parametrize("name", IN_PLACE)
    def test_in_place_leaks_nothing(self, summary: Summary, name: str) -> None:
        """Threads, descriptors and groups are after the repair what they were before."""
        resources = the_run(summary, name).resources

        for kind in ("threads", "descriptors", "groups"):
            assert resources["before"][kind] == resources["after"][kind], kind


class TestOtherPackage:
    def test_runs_and_is_judged_like_any_other(self, summary: Summary) -> None:
        """The guide's example recovers in its processes, bitwise, and replays."""
        run = the_run(summary, "rerun")

        assert ("pass", UPDATES, AGE) == (
            run.verdict,
            run.committed_updates,
            run.replayed_updates,
        )

    def test_example_is_short(self) -> None:
        """The guide promises fewer than 60 lines."""
        assert len(EXAMPLE.read_text().splitlines()) < 60


class TestAccelPact:
    def test_rebinds_every_reference(self, summary: Summary) -> None:
        """L + 1 modules name the group twice each; none is left."""
        run = the_run(summary, "accelpact")

        assert (10, 0) == (run.references_rebound, run.references_left)
        assert [1, 3] == sorted(each.rank for each in run.references)

    def test_records_every_phase(self, summary: Summary) -> None:
        """The phases of the paper are timed."""
        phases = {"guard", "admit", "retire", "rebuild", "rebind", "validate", "release"}

        assert phases <= the_run(summary, "accelpact").phases_ms.keys()


class TestCommunicatorOnly:
    def test_fails_in_the_next_backward(self, summary: Summary, comparison: Path) -> None:
        """The probe passes, nothing is rebound, and the next update dies in its all-reduce."""
        run = the_run(summary, "comm_only")
        # One of the two members may be ended by the launcher before it has said why.
        logs = [(comparison / "runs" / run.name / f"rank{rank}.log").read_text() for rank in (1, 3)]

        assert ("fail", "fail") == (run.verdict, run.expected)
        assert FAULT_AFTER == run.committed_updates
        assert any("_reduce_grad" in log for log in logs)
        assert "validate" in _phases(comparison, run)

    def test_names_the_stale_references(self, summary: Summary) -> None:
        """The record lists which references still name the retired group."""
        run = the_run(summary, "comm_only")

        assert (0, 10) == (run.references_rebound, run.references_left)
        assert "root._inter_node_pg" in run.references[0].holders


def _phases(comparison: Path, run: RunSummary) -> set[str]:
    lines = (comparison / "runs" / run.name / "events.jsonl").read_text().splitlines()
    return {json.loads(line).get("phase") for line in lines}


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
        """The report speaks of all contenders, run or not."""
        text = (comparison / "report.md").read_text()

        assert [] == [name for name in strategies.by_default() if name not in text]

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
