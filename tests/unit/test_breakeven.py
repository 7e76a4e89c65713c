"""Break-even: the paper's example to the digit, units, mistakes, and a comparison's own figures."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from harness import quantities
from harness.breakeven import BreakEven
from harness.cli import app
from harness.records import Overhead
from tests.unit import summaries
from tests.unit.reading import section, text_of

if TYPE_CHECKING:
    from pathlib import Path

PAPER = {"overhead": 0.002, "age": 5, "update_s": 220.0, "repair_s": 0.77}
GIVEN = ["breakeven", "--overhead", "0.2%", "--age", "5", "--update", "220s", "--repair", "770ms"]


class TestPaper:
    """Section on break-even of arXiv:2609.18178v1; it counts with figures that are rounded."""

    def test_saving_and_guard(self) -> None:
        """S is 1,099.2 s, the guard 172.8 s a day, one failure in 6.3 days (6.36) enough."""
        found = BreakEven(**PAPER)

        assert ("1099.2", "172.8") == (f"{found.saving_s:.1f}", f"{found.guard_s:.1f}")
        assert found.interval_s is not None
        assert 6.3 == math.floor(found.interval_s / 8640) / 10

    def test_two_percent(self) -> None:
        """0.155 eligible failures a day save 170.4 s, 98.6 % of the guard's cost."""
        found = BreakEven(**PAPER, eligible=0.155)

        assert "170.4" == f"{found.gross_s:.1f}"
        assert "98.6" == f"{100 * found.gross_s / found.guard_s:.1f}"
        assert found.net_s < 0

    def test_ten_percent(self) -> None:
        """0.776 a day gain 680.2 s, 3.9 times the guard's cost.

        The gross is 852.98 s with S = 1,099.2 s, which the paper cuts to 852.9.
        """
        found = BreakEven(**PAPER, eligible=0.776)

        assert "680.2" == f"{found.net_s:.1f}"
        assert "3.9" == f"{found.net_s / found.guard_s:.1f}"
        assert 852.9 == math.floor(10 * 0.776 * round(found.saving_s, 1)) / 10

    def test_refusals_cost(self) -> None:
        """N_other * C is taken off."""
        assert -172.8 - 0.7 == pytest.approx(BreakEven(**PAPER, other=7, reject_s=0.1).net_s)


class TestEdges:
    """What cannot pay, what costs nothing, and what is no number."""

    def test_nothing_saved(self) -> None:
        """A repair that takes as long as the replay never pays."""
        found = BreakEven(overhead=0.1, age=1, update_s=1.0, repair_s=1.0)

        assert (None, None) == (found.needed, found.interval_s)
        assert "no number" in quantities.verdict(found)

    def test_nothing_paid(self) -> None:
        """A guard that costs nothing pays at once."""
        found = BreakEven(overhead=-0.01, age=1, update_s=1.0, repair_s=0.5)

        assert (0.0, math.inf) == (found.needed, found.interval_s)
        assert quantities.record(found)["interval_s"] is None

    @pytest.mark.parametrize("field", ["age", "update_s", "repair_s", "eligible", "overhead"])
    def test_not_a_number(self, field: str) -> None:
        """The field is named."""
        with pytest.raises(ValueError, match=field):
            BreakEven(**{**PAPER, field: math.nan})


class TestCommand:
    """`accelpact breakeven`."""

    def test_example(self) -> None:
        """The figures of the paper."""
        found = CliRunner().invoke(app, [*GIVEN, "--eligible", "0.776", "--json"])

        assert 0 == found.exit_code, found.output
        assert "680.2" == f"{json.loads(found.output)['net_s']:.1f}"

    def test_lines(self) -> None:
        """For a person."""
        output = CliRunner().invoke(app, GIVEN).output

        assert "1099.2 s" in output
        assert "one eligible failure in 6.36 d" in output

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--update", "220"),
            ("--repair", "1 week"),
            ("--overhead", "much"),
            ("--age", "-1"),
            ("--window", "0s"),
        ],
    )
    def test_mistake(self, option: str, value: str) -> None:
        """One line that names the option, status 2."""
        found = CliRunner().invoke(app, [*GIVEN, option, value])

        assert 2 == found.exit_code
        assert f"accelpact: {option[2:]}: expected" in found.output
        assert 1 == len(found.output.strip().splitlines())


class TestSection:
    """The report's own."""

    def _text(self, folder: Path, low: float) -> str:
        summary = summaries.comparison()
        summary.overhead = [
            Overhead(
                strategy="accelpact", n=6, ratio=1.01, low=low, high=1.02, method="range", values=[]
            )
        ]
        return section(text_of(folder, summary), "Break-even")

    def test_figures(self, tmp_path: Path) -> None:
        """1 % of a day is 864 s."""
        text = self._text(tmp_path, 1.001)

        assert "864" in text
        assert "A = 5 updates" in text
        assert "at both ends" in text

    def test_noise(self, tmp_path: Path) -> None:
        """An interval with 1 in it says nothing."""
        assert "cannot be told" in self._text(tmp_path, 0.99)

    def test_missing(self, tmp_path: Path) -> None:
        """Without a run of the runtime there is nothing to compute."""
        text = text_of(tmp_path, summaries.summary([summaries.run("cold")]))

        assert "Cannot be told: accelpact did not run" in section(text, "Break-even")
