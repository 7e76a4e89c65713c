"""Sections of the report: each figure as by hand, each unknown a dash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness import report
from harness.records import Drift, References, write_json
from harness.report import paper
from harness.report._format import number, quotient, table
from tests.unit import summaries
from tests.unit.reading import FILES, first_screen, row, section, text_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a whole comparison of 6 blocks."""
    return text_of(tmp_path_factory.mktemp("full"), summaries.comparison())


class TestSections:
    """Tables that a reader would check by hand."""

    def test_shares_add_up(self, full: str) -> None:
        """Every row sums to 1, and a run that does not is named."""
        shares = section(full, "Wall-time shares")

        assert "each of the 72 runs add up to 1" in shares
        assert "1.000" == row(shares, "cold", "faulted")[-1]

    def test_shares_that_do_not_add_up_are_named(self, tmp_path: Path) -> None:
        """The sentence follows the data."""
        run = summaries.run("cold", shares={"productive": 0.5, "other": 0.4})
        shares = section(text_of(tmp_path, summaries.summary([run])), "Wall-time shares")

        assert "The shares of 0-cold-faulted do not add up to 1." in shares
        assert "0.900" == row(shares, "cold", "faulted")[-1]

    def test_phases_carry_detection_and_rest(self, tmp_path: Path) -> None:
        """Detection, the named phases and what is left make up the way, ms."""
        run = summaries.run(
            "accelpact",
            detection_s=3.0,
            phases_ms={"rebuild": 2.0, "guard": 1.0},
            fault_to_resume_s=3.004,
            fault_to_next_update_s=3.25,
        )
        phases = section(text_of(tmp_path, summaries.summary([run])), "From fault to next update")
        header = row(phases, "contender")

        assert ["detection, ms", "guard, ms", "rebuild, ms", "not named, ms"] == header[2:6]
        assert ["3000", "1.00", "2.00", "247.0"] == row(phases, "accelpact")[2:6]

    def test_stale_holders_are_named(self, full: str) -> None:
        """The ablation's references are named, once for all ranks that held the same."""
        references = section(full, "References to the retired group")

        assert "comm_only left 5 stale holders on 12 ranks" in references
        assert "`layers.3._fsdp_state.process_group`" in references

    def test_replayed_updates_differ_by_block(self, tmp_path: Path) -> None:
        """Distinct values are all shown, with how often they came."""
        runs = [
            summaries.run("cold", block=block, replayed_updates=replayed)
            for block, replayed in enumerate((5, 5, 6))
        ]
        updates = section(
            text_of(tmp_path, summaries.summary(runs)), "Replayed and discarded updates"
        )

        assert "5 (2x), 6 (1x)" == row(updates, "cold")[3]

    def test_overhead_has_the_control_pair_as_floor(self, full: str) -> None:
        """The noise floor is the first row."""
        overhead = section(full, "Fault-free overhead")
        cells = row(overhead, "reference (control pair: noise floor)")

        assert ["order-statistic 95 %", "6"] == cells[4:6]

    def test_published_figures_are_labelled(self, full: str) -> None:
        """The paper's figure, its table and its conditions stand beside ours."""
        published = section(full, "Published figures")
        cells = row(published, "whole run, cold / accelpact, ratio")

        assert paper.SOURCE in published
        assert "1.197 (1.184 to 1.208), Table III" == cells[1]
        assert "16 GPUs" in cells[2]
        assert (
            "5"
            == row(published, "stale references when only the communicator is replaced, per rank")[
                3
            ]
        )
        assert "-" == row(published, "repair total at 16 ranks, accelpact, ms")[3]

    def test_environment_file_is_preferred(self, tmp_path: Path) -> None:
        """`environment.json` is part of the records."""
        write_json(tmp_path / "environment.json", {"host": {"kernel": "6.1|x"}})
        text = text_of(tmp_path, summaries.comparison(blocks=1))

        assert "6.1\\|x" in row(section(text, "Environment"), "host.kernel")[1]


class TestIncomplete:
    """What was not run or is not known is said, and is never a zero."""

    def test_not_run_row_has_its_reason(self, tmp_path: Path) -> None:
        """A contender whose package is missing appears with the reason."""
        missing = summaries.run(
            "nvrx",
            verdict="not_run",
            reason="package nvidia-resiliency-ext is not installed",
            wall_s=None,
            goodput_tokens_s=None,
            curve=[],
            shares={},
            phases_ms={},
            resources={},
            drift=Drift(level="not_compared", equal=None),
        )
        text = text_of(tmp_path, summaries.summary([summaries.run("accelpact"), missing]))
        cells = row(section(text, "Verdicts"), "nvrx", "faulted")

        assert "package nvidia-resiliency-ext is not installed" in first_screen(text)
        assert ["not_run 1", "pass", "not run"] == cells[3:6]
        assert "nvrx did not run with a fault" in section(text, "Speed targets")

    def test_contender_without_runs_has_its_reason(self, tmp_path: Path) -> None:
        """Also where the records hold no run of it at all."""
        contenders = [
            summaries.contender("accelpact"),
            summaries.contender("nvrx", available=False, reason="no package"),
        ]
        text = text_of(
            tmp_path, summaries.summary([summaries.run("accelpact")], contenders=contenders)
        )

        assert "nvrx: no package" in first_screen(text)
        assert "no package" == row(section(text, "Verdicts"), "nvrx")[-1]

    def test_single_strategy(self, tmp_path: Path) -> None:
        """One contender alone is reported without comparison."""
        text = text_of(tmp_path, summaries.comparison(blocks=2, strategies=("accelpact",)))

        assert "neither cold nor nvrx can be paired with accelpact" in first_screen(text)
        assert "Nothing was recorded." in section(text, "Paired ratios")
        assert "No control pair of references was compared." in first_screen(text)

    @pytest.mark.parametrize("strategies", [("reference",), ()])
    def test_no_faulted_run(self, tmp_path: Path, strategies: tuple[str, ...]) -> None:
        """References alone, or nothing at all, still make a report with figures."""
        text = text_of(tmp_path, summaries.comparison(blocks=1, strategies=strategies))

        assert "No faulted run is in these records." in first_screen(text)
        assert report.build(tmp_path).keys() == FILES

    def test_unknown_values_are_dashes(self, tmp_path: Path) -> None:
        """Every optional field left out: dashes, and no None, nan or made-up zero."""
        optional: dict[str, Any] = dict.fromkeys(
            (
                "wall_s",
                "update_s",
                "goodput_tokens_s",
                "runtime_goodput",
                "detection_s",
                "fault_to_resume_s",
                "fault_to_next_update_s",
                "fault_to_frontier_s",
                "repair_ms",
                "floor_ms",
                "references_rebound",
                "references_left",
                "fault_s",
            )
        )
        bare = summaries.run(
            "accelpact",
            **optional,
            shares={},
            phases_ms={},
            references=[],
            resources={},
            curve=[],
            drift=Drift(level="not_compared", equal=None),
        )
        text = text_of(tmp_path, summaries.summary([bare]))

        assert ["-", "-"] == row(section(text, "Wall time and goodput"), "accelpact")[2:]
        assert {"-"} == set(row(section(text, "From fault to next update"), "accelpact")[2:])
        assert ["-", "-", "-"] == row(
            section(text, "References to the retired group"), "accelpact"
        )[2:]
        assert {"-"} == set(row(section(text, "Drift"), "accelpact")[3:])
        assert report.build(tmp_path).keys() == FILES
        assert "nan" not in text
        assert "None" not in text

    def test_limits_name_small_samples(self, tmp_path: Path) -> None:
        """Recorded limits stand beside those that follow from the number of pairs."""
        limits = section(text_of(tmp_path, summaries.comparison(blocks=3)), "Limits")

        assert "One machine, 2 cores" in limits
        assert "Some ratios rest on 3 pairs" in limits


class TestTargets:
    """Met, not met, or not measured and why."""

    @staticmethod
    def result(tmp_path: Path, *, blocks: int, cold_s: float) -> list[str]:
        """The row of cold / accelpact, with accelpact's recovery at 10 ms."""
        runs = [
            summaries.run(name, block=block, detection_s=3.0, fault_to_resume_s=3.0 + recovery)
            for block in range(blocks)
            for name, recovery in (("cold", cold_s), ("accelpact", 0.01))
        ]
        text = text_of(tmp_path, summaries.summary(runs))
        return row(section(text, "Speed targets"), "recovery, cold / accelpact")

    def test_met(self, tmp_path: Path) -> None:
        """4 s over 10 ms is 400."""
        cells = self.result(tmp_path, blocks=5, cold_s=4.0)

        assert ["at least 300", "400"] == cells[1:3]
        assert "met" == cells[-1]

    def test_not_met(self, tmp_path: Path) -> None:
        """2 s over 10 ms is 200."""
        assert "not met" == self.result(tmp_path, blocks=5, cold_s=2.0)[-1]

    def test_too_few_blocks(self, tmp_path: Path) -> None:
        """Four blocks do not settle it."""
        result = self.result(tmp_path, blocks=4, cold_s=4.0)[-1]

        assert "not measured: 4 of at least 5 blocks; inside the target so far" == result

    def test_floor(self, tmp_path: Path) -> None:
        """The median of repair over floor within a run, at most 1.5."""
        runs = [
            summaries.run("accelpact", block=block, repair_ms=3.2, floor_ms=2.0)
            for block in range(5)
        ]
        text = text_of(tmp_path, summaries.summary(runs))
        cells = row(section(text, "Speed targets"), "repair / floor, accelpact")

        assert ["at most 1.5", "1.600"] == cells[1:3]
        assert "not met" == cells[-1]


class TestFormat:
    """Numbers and cells as text."""

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, "-"),
            (float("nan"), "-"),
            (float("inf"), "-"),
            (0.0, "0"),
            (5734.84, "5735"),
            (0.0031412, "0.003141"),
            (12.345, "12.35"),
            (123456.7, "123457"),
            (2e-9, "2.000e-09"),
        ],
    )
    def test_number(self, value: float | None, expected: str) -> None:
        """Significant digits, and a dash for what is not known."""
        assert expected == number(value)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [(1.1974, "1.197"), (42.04, "42.0"), (1782.3, "1782"), (0.00056123, "0.000561")],
    )
    def test_quotient(self, value: float, expected: str) -> None:
        """Three decimals near 1."""
        assert expected == quotient(value)

    def test_cells_cannot_break_a_table(self) -> None:
        """Bars, line breaks and tags of an error text stay in their cell."""
        text = table(["a", "b"], [["x|y\nz", "<b>"]])

        assert len(text.splitlines()) == 3
        assert "x\\|y z" in text
        assert "<b>" not in text

    def test_references_on_unaffected_ranks_do_not_count(self, tmp_path: Path) -> None:
        """Only ranks that left references are named as stale."""
        run = summaries.run(
            "comm_only",
            references=[
                References(rank=0, rebound=0, left=2, holders=["a", "b"]),
                References(rank=1, rebound=0, left=0, holders=[]),
            ],
        )
        text = text_of(tmp_path, summaries.summary([run]))

        assert "comm_only left 2 stale holders on 1 rank (all blocks together): `a`, `b`." in text
