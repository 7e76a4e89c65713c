"""What checkpoints cost by mode: from hand-made records, every time in them chosen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from typer.testing import CliRunner

from harness import checkpoint_costs, options
from harness.checkpoint_costs import Costs, Memory, Row
from harness.cli import app
from harness.records import write_json
from harness.spec import SpecError
from tests.unit.logs import Log

if TYPE_CHECKING:
    from harness.spec import RunSpec

COMMITTED = sorted(
    path.parent for path in Path(__file__).parents[2].glob("reports/*/checkpoints.json")
)
STOOD = {"none": 0.0, "sync": 2.0, "async-thread": 0.5, "async-process": 0.75, "async-cached": 0.25}
BESIDE = {"none": 1.0, "sync": 1.0, "async-thread": 1.5, "async-process": 1.25, "async-cached": 1.0}
"""Mode of the save before -> how long an update takes."""
WAITED = {"async-process": 0.5}
"""Mode of the save before -> how long the next one waits for it."""
SIZE = 1 << 20


def planned(*, rounds: int = 2, saves: int = 1) -> RunSpec:
    return checkpoint_costs.planned(options.make_spec(), rounds=rounds, saves=saves, backend="gloo")


def log_of(run: RunSpec, *, fails: int | None = None) -> Log:
    """The first round takes ten times as long; rank 3 is a little slower than the others."""
    log, now, before = Log(), 0.0, "none"
    saving, modes = run.spec.saving, len(run.spec.saving.modes)
    for update in range(1, run.spec.schedule.updates + 1):
        slow = 10.0 if update <= modes * saving.in_turn else 1.0
        mode = saving.mode_after(update, first=1)
        assert mode is not None
        commit = now + slow * BESIDE[before]
        waited, stood = WAITED.get(before, 0.0), slow * STOOD[mode]
        log.update(now, commit - 0.125, update, 0, 1, 2)
        log.update(now, commit, update, 3)
        log.add(commit, "checkpoint_begin", update=update, mode=mode)
        now = commit + waited + stood
        took = {"seconds": waited + stood, "waited": waited}
        log.add(now, "checkpoint", update=update, mode=mode, **took)
        if mode != "none" and update != fails:
            given = {"bytes": SIZE, "seconds": stood + 0.125}
            log.add(now, "checkpoint_complete", 0, update=update, mode=mode, **given)
        before = mode
    return log


def write(folder: Path, run: RunSpec, log: Log) -> Path:
    (folder / "run").mkdir(parents=True)
    write_json(folder / "run" / "run.json", run)
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in log.events)
    (folder / "run" / "events.jsonl").write_bytes(lines)
    write_json(folder / "environment.json", {"processor": "some", "load_before": [8.5]})
    held = [Memory(update=update, pss_bytes=update << 30) for update in range(1, 12)]
    write_json(folder / "memory.json", held)
    return folder


def row(found: Costs, mode: str) -> Row:
    return next(each for each in found.rows if each.mode == mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = planned(rounds=1)
    return write(tmp_path / "costs", run, log_of(run))


class TestCosts:
    def test_plan_has_a_round_more(self) -> None:
        """And one update at the end, beside which the last checkpoint that counts is written."""
        run = planned(rounds=6, saves=4)

        assert 7 * 5 * 4 + 1 == run.spec.schedule.updates
        assert not run.faulted

    @pytest.mark.parametrize("given", [{"rounds": 0}, {"saves": 0}])
    def test_numbers_below_one_are_refused(self, given: dict[str, int]) -> None:
        """The field is named."""
        with pytest.raises(SpecError, match=f"{next(iter(given))}: expected at least 1; found 0"):
            planned(**given)

    def test_step_holds_copy_update_and_wait(self, folder: Path) -> None:
        """What the next save waits is charged to the one it waits for; the first round is not."""
        found = checkpoint_costs.finish(folder)

        assert ["none", "sync", "async-thread", "async-process", "async-cached"] == [
            each.mode for each in found.rows
        ]
        assert [1.0, 3.0, 2.0, 2.5, 1.25] == pytest.approx([each.step_s for each in found.rows])
        assert [1.0, 3.0, 2.0, 2.5, 1.25] == pytest.approx(
            [each.step_ratio.median for each in found.rows]
        )
        assert [1.0, 1.0, 1.5, 1.25, 1.0] == pytest.approx([each.update_s for each in found.rows])
        assert 0.5 == pytest.approx(row(found, "async-process").waited_s)
        assert 0.0 == pytest.approx(row(found, "async-cached").waited_s)
        assert 0.375 == pytest.approx(row(found, "async-cached").complete_s)

    def test_memory_is_that_of_the_mode(self, folder: Path) -> None:
        """Update 7 was saved synchronously in the round that counts."""
        found = checkpoint_costs.finish(folder)

        assert 7 << 30 == row(found, "sync").pss_bytes

    def test_failed_saves_are_counted(self, tmp_path: Path) -> None:
        """One that never became complete has no time to completion."""
        run = planned(rounds=1)
        found = checkpoint_costs.finish(write(tmp_path / "costs", run, log_of(run, fails=8)))

        assert (1, None) == (
            row(found, "async-thread").failed,
            row(found, "async-thread").complete_s,
        )
        assert 0 == row(found, "none").failed

    def test_run_that_broke_off_is_refused(self, tmp_path: Path) -> None:
        """Rounds that are not complete are no measurement."""
        run = planned(rounds=1)
        log = log_of(run)
        log.events = [event for event in log.events if (event.update or 0) < 9]

        with pytest.raises(SpecError, match="a save of every mode in every round"):
            checkpoint_costs.finish(write(tmp_path / "costs", run, log))


class TestReport:
    def test_rebuilds_and_checks(self, folder: Path) -> None:
        """By the command that rebuilds comparisons; what was touched is named."""
        invoke = CliRunner().invoke
        checkpoint_costs.finish(folder)

        assert 0 == invoke(app, ["report", str(folder), "--check"]).exit_code
        table = folder / checkpoint_costs.TABLE
        table.write_text(table.read_text().replace("async", "sync"))
        done = invoke(app, ["report", str(folder), "--check"])
        assert (1, "differs from its records: checkpoints.md\n") == (done.exit_code, done.stdout)

    @pytest.mark.parametrize("stored", COMMITTED, ids=lambda path: path.name)
    def test_committed_is_what_its_records_give(self, stored: Path) -> None:
        """Nothing in it was typed by hand."""
        assert [] == checkpoint_costs.check(stored)

    def test_sets_the_paper_beside_it(self, folder: Path) -> None:
        """With its conditions, which are others."""
        checkpoint_costs.finish(folder)
        text = (folder / checkpoint_costs.TABLE).read_text()

        assert "load 8.5 before the run" in text
        assert "| sync | 9.960 | +870.8 | +5.46 | 17.99 | 2.64 |" in text
        assert "1.216 B parameters, 4 GPUs" in text
