"""A workload of the user's own in a comparison, on four real ranks.

It is the guide's example, with batch normalization put in: running statistics are state as well.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness import compare, options, plan
from harness.launching import Forks
from harness.progress import Progress
from harness.records import Digests, Event, RunSummary, Summary, read_lines
from harness.spec import RunSpec
from strategies import Platform

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "workload" / "vit.py"
PLAIN = "nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)"
NORMALIZED = f"nn.Sequential({PLAIN}, nn.BatchNorm2d(WIDTH))"
UPDATES, CHECKPOINT_AT, FAULT_AFTER, NUM_RANKS, MICROBATCH = 4, 2, 3, 4, 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workload, somewhere."""
    path = tmp_path_factory.mktemp("users-folder") / "vit.py"
    source = EXAMPLE.read_text()
    assert PLAIN in source
    path.write_text(source.replace(PLAIN, NORMALIZED))
    return path


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare the runtime and a restart on it, with one fault, and return the records."""
    found = tmp_path_factory.mktemp("own") / "out"
    spec = options.check_machine(
        options.make_spec(
            workload=f"{file}:build",
            updates=UPDATES,
            checkpoint_at=CHECKPOINT_AT,
            fault=[f"absent@boundary:{FAULT_AFTER}"],
        ),
        refuse=AssertionError,
    )
    entries = [
        plan.Entry(strategy=each.strategy, label=each.label, fault_free=False)
        for each in plan.contenders(["accelpact", "cold"])
    ]
    with Forks() as forks:
        compare.run(
            spec,
            entries,
            platform=Platform(device="cpu", backend="gloo"),
            folder=found,
            title="own",
            progress=Progress(),
            launch=forks,
        )
    return found


@pytest.fixture(scope="module")
def summary(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)


def the_run(summary: Summary, name: str) -> RunSummary:
    return next(run for run in summary.runs if run.name == f"0-{name}")


@pytest.mark.parametrize("name", ["reference", "reference-control", "accelpact", "cold"])
class TestRun:
    def test_has_the_state_of_the_reference(self, summary: Summary, name: str) -> None:
        """Every rank's state is the reference's bit for bit, whatever came between."""
        run = the_run(summary, name)

        assert ("pass", True) == (run.verdict, run.drift.equal), run.reason
        assert (NUM_RANKS, UPDATES) == (run.drift.ranks_equal, run.committed_updates)

    def test_consumes_every_sample_once(self, summary: Summary, folder: Path, name: str) -> None:
        """The ledger is exact, and was not empty."""
        run = the_run(summary, name)
        events = read_lines(folder / "runs" / run.name / "events.jsonl", Event)
        counts = {len(each.samples or []) for each in events if each.event == "commit"}

        assert (0, 0) == (run.data_ledger.missing, run.data_ledger.duplicated)
        assert {MICROBATCH} == counts

    def test_counts_samples(self, summary: Summary, name: str) -> None:
        """Images are no tokens: no record says so."""
        run = the_run(summary, name)

        assert run.goodput_tokens_s is None
        assert UPDATES * NUM_RANKS * MICROBATCH == run.curve[-1][1]
        assert run.goodput_samples_s == pytest.approx(run.curve[-1][1] / run.wall_s)


class TestRecords:
    def test_what_recovered_was_struck(self, summary: Summary) -> None:
        """The one repairs and replays nothing, the other starts again from the checkpoint."""
        replayed = [the_run(summary, name).replayed_updates for name in ("accelpact", "cold")]

        assert [True, True] == [fault.fired for fault in summary.faults]
        assert [0, FAULT_AFTER - CHECKPOINT_AT] == replayed
        assert 0 < (the_run(summary, "accelpact").references_rebound or 0)

    def test_running_statistics_are_part_of_the_state(self, folder: Path) -> None:
        """Every rank has its own, so a restart must give each its own back."""
        records = read_lines(folder / "runs" / "0-reference" / "digests.jsonl", Digests)
        last = [each.tensors for each in records if each.update == UPDATES]
        found = {(tensors or {}).get("buffer/patches.1.running_mean") for tensors in last}

        assert NUM_RANKS == len(found - {None})

    def test_say_what_was_run(self, summary: Summary, folder: Path, file: Path) -> None:
        """The file's name and digest; where it lies is nobody's business."""
        spec = msgspec.json.decode(
            (folder / "runs" / "0-cold" / "run.json").read_bytes(), type=RunSpec
        ).spec
        assert spec.own is not None
        shown = {path: path.read_text() for path in folder.rglob("*") if path.suffix != ".svg"
                 and path.is_file()}  # fmt: skip

        assert ("vit.py:build", "<workload>/vit.py") == (spec.workload, spec.own.path)
        assert "vit.py" == summary.spec["own"]["path"]
        assert spec.own.sha256 == summary.spec["model"]["file_sha256"]
        assert spec.own.sha256[:12] in the_run(summary, "cold").division
        assert [] == [path for path, text in shown.items() if str(file.parent) in text]

    def test_report_is_in_samples(self, folder: Path) -> None:
        """What cannot be counted in tokens is not called so."""
        report = (folder / "report.md").read_text()

        assert "samples/s" in report
        assert "tokens" not in report.split("## What was asked")[0]
        assert [] == compare.check(folder)


def test_example_is_short() -> None:
    """The guide promises fewer than 60 lines."""
    assert len(EXAMPLE.read_text().splitlines()) < 60
