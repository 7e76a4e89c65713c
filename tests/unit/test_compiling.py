"""The compiler's counts: what came before a failure, what came after, and a word in every cell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from harness import compiling, matrix
from harness.compiling import Compiled, Counts
from harness.events import JsonLines
from harness.records import write_json
from tests.unit import logs, summaries

if TYPE_CHECKING:
    from pathlib import Path

FRONTIER = 4


def counts(graphs: int, breaks: int = 0, recompiled: int | None = 0) -> Counts:
    return Counts(graphs=graphs, breaks=breaks, recompiled=recompiled)


def record(update: int, graphs: int, *, rank: int = 0, start: int = 0) -> Compiled:
    """One rank after one update: `graphs` of the model, one of the function."""
    return Compiled(rank=rank, start=start, update=update, model=counts(graphs), function=counts(1))


class TestSplit:
    """Before the failure, and after it."""

    def test_what_came_on_top(self) -> None:
        """In the same process only what is new counts."""
        records = [record(FRONTIER, 2), record(5, 5), record(6, 5)]
        before, after = compiling.split(records, FRONTIER)

        assert {"model": counts(2), "function": counts(1)} == before
        assert {"model": counts(3), "function": counts(0)} == after

    def test_new_processes_compile_everything(self) -> None:
        """After a restart the counters begin at nothing, so all of it counts."""
        records = [record(FRONTIER, 2), record(FRONTIER, 2, start=1), record(6, 2, start=1)]
        before, after = compiling.split(records, FRONTIER)

        assert {"model": counts(2), "function": counts(1)} == before == after

    def test_worst_rank_counts(self) -> None:
        """Ranks may differ; the most of any is told."""
        records = [record(FRONTIER, 2), record(FRONTIER, 3, rank=1)]
        records += [record(6, 7), record(6, 3, rank=1)]
        before, after = compiling.split(records, FRONTIER)

        assert before is not None
        assert after is not None
        assert (3, 5) == (before["model"].graphs, after["model"].graphs)

    @pytest.mark.parametrize("update", [2, FRONTIER])
    def test_run_that_ended_early_is_unknown(self, update: int) -> None:
        """Nothing is made up for what was not recorded."""
        before, after = compiling.split([record(update, 2)], FRONTIER)

        assert (update == FRONTIER) == (before is not None)
        assert after is None

    def test_unknown_recompilations_stay_unknown(self) -> None:
        """A torch that does not tell them gives no zero."""
        silent = [
            Compiled(
                rank=0,
                start=0,
                update=update,
                model=counts(1, recompiled=None),
                function=counts(1),
            )
            for update in (FRONTIER, 5)
        ]
        before, after = compiling.split(silent, FRONTIER)

        assert before is not None
        assert after is not None
        assert [None, None] == [before["model"].recompiled, after["model"].recompiled]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of a reference and of one contender; another could not run."""
    place = tmp_path / "torch-2.14.0" / "fsdp2"
    place.mkdir(parents=True)
    write_json(place / "environment.json", {})
    contenders = [
        summaries.contender("cold"),
        summaries.contender("torchft_pg", available=False, reason="package torchft is missing"),
    ]
    spec = {"wrapper": "fsdp2", "strikes": [f"absent@boundary:{FRONTIER}"]}
    described = {"title": "t", "spec": spec, "contenders": contenders, "complete": False}
    write_json(place / "comparison.json", described)
    write_json(place / "seconds.json", 3.0)
    good, struck = logs.uninterrupted(), logs.restarted()
    runs = {
        "0-reference": (logs.run_spec("reference", name="0-reference"), good),
        "0-cold-absent-boundary": (logs.run_spec("cold", name="0-cold-absent-boundary"), struck),
    }
    for name, (run, log) in runs.items():
        logs.write_run(place / "runs", run, log, logs.digests(log))
        lines = JsonLines(place / "runs" / name / compiling.RECORD)
        lines.write(record(FRONTIER, 2))
        lines.write(record(6, 2, start=int("cold" in name)))
        lines.close()
    matrix.finish(tmp_path)
    return tmp_path


class TestTable:
    """`compiled.md` and `compiled.json`, which are made with the matrix."""

    def test_rows(self, folder: Path) -> None:
        """The reference compiles nothing after it, new processes everything, once more."""
        found = json.loads((folder / compiling.COUNTS).read_text())["rows"]
        after = {row["strategy"]: row["after"] for row in found}

        assert ["reference", "cold", "torchft_pg"] == list(after)
        assert 0 == after["reference"]["model"]["graphs"]
        assert 2 == after["cold"]["model"]["graphs"]
        assert after["torchft_pg"] is None

    def test_no_cell_is_empty(self, folder: Path) -> None:
        """What could not run says why."""
        text = (folder / compiling.TABLE).read_text()
        rows = [line for line in text.splitlines() if line.startswith("| fsdp2")]

        assert 3 == len(rows)
        assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
        assert "not_run [" in rows[2]
        assert "package torchft is missing" in text

    def test_is_a_function_of_the_records(self, folder: Path) -> None:
        """A count that was changed by hand is found."""
        assert [] == matrix.check(folder)
        table = folder / compiling.TABLE
        table.write_text(table.read_text().replace("2 / 0 / 0", "0 / 0 / 0"))

        assert [compiling.TABLE] == matrix.check(folder)

    def test_matrix_without_counts_has_no_table(self, folder: Path) -> None:
        """Only runs that counted have one."""
        for path in folder.rglob(compiling.RECORD):
            path.unlink()

        assert not {compiling.TABLE, compiling.COUNTS} & set(matrix.build(folder))
