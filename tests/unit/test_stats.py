"""Paired ratios and their intervals."""

from __future__ import annotations

import math
import random

import pytest
from scipy.stats import binom, quantile_test

from harness import stats
from tests.unit import summaries


class TestInterval:
    """The median and what is known about it."""

    def test_below_six_values_is_the_range(self) -> None:
        """Five values give their smallest and largest, and say so."""
        found = stats.interval([5.0, 1.0, 4.0, 2.0, 3.0])

        assert (3.0, 1.0, 5.0) == (found.median, found.low, found.high)
        assert found.method == "range"

    def test_six_values_are_the_first_interval(self) -> None:
        """From six values on the extremes cover the median with 96.9 %."""
        found = stats.interval([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])

        assert (3.5, 1.0, 6.0) == (found.median, found.low, found.high)
        assert found.method == "order-statistic 95 %"

    @pytest.mark.parametrize("n", range(6, 41))
    def test_covers_at_least_95_percent_and_no_more_than_needed(self, n: int) -> None:
        """Leaving out one more value at each end would fall under 95 %."""
        found = stats.interval([float(value) for value in range(1, n + 1)])
        k = int(found.low)

        assert n + 1 - k == found.high
        assert 1 - 2 * binom.cdf(k - 1, n, 0.5) >= 0.95
        assert 1 - 2 * binom.cdf(k, n, 0.5) < 0.95

    @pytest.mark.parametrize("n", [6, 9, 17, 30])
    def test_holds_the_interval_of_scipy(self, n: int) -> None:
        """Where scipy's interval is symmetric too, the two are the same."""
        values = [float(value) for value in range(1, n + 1)]
        found = stats.interval(values)
        theirs = quantile_test(values, q=0.0, p=0.5).confidence_interval(confidence_level=0.95)

        assert found.low <= theirs.low
        assert theirs.high <= found.high + 1e-9

    def test_covers_the_median_of_a_skewed_distribution(self) -> None:
        """In 95 % of 2000 samples of 12, or more, the true median is inside."""
        source = random.Random(7)
        inside = 0
        for _ in range(2000):
            found = stats.interval([source.expovariate(1.0) for _ in range(12)])
            inside += found.low <= math.log(2) <= found.high

        assert inside / 2000 >= 0.95

    def test_refuses_nothing(self) -> None:
        """No values have no median."""
        with pytest.raises(ValueError, match="expected at least one"):
            stats.interval([])


class TestPairedRatio:
    """Quotients of pairs."""

    def test_divides_within_pairs(self) -> None:
        """The ratio is of each pair, not of the medians."""
        found = stats.paired_ratio(
            [(10.0, 1.0), (20.0, 4.0), (30.0, 10.0)],
            metric="wall_s",
            numerator="cold",
            denominator="accelpact",
        )

        assert found is not None
        assert [10.0, 5.0, 3.0] == found.values
        assert (3, 5.0, 3.0, 10.0, "range") == (
            found.n,
            found.median,
            found.low,
            found.high,
            found.method,
        )

    @pytest.mark.parametrize("bad", [None, 0.0, -1.0, math.nan, math.inf])
    def test_drops_the_pair_of_a_bad_value(self, bad: float | None) -> None:
        """A value that cannot be divided takes its partner with it, and n says so."""
        found = stats.paired_ratio(
            [(bad, 1.0), (4.0, 2.0), (1.0, bad)], metric="m", numerator="a", denominator="b"
        )

        assert found is not None
        assert ([2.0], 1) == (found.values, found.n)

    def test_is_none_without_a_usable_pair(self) -> None:
        """Nothing to divide is no ratio."""
        assert stats.paired_ratio([(0.0, 1.0)], metric="m", numerator="a", denominator="b") is None
        assert stats.paired_overhead([], strategy="cold") is None


class TestRatioBetween:
    """Ratios of two contenders' faulted runs."""

    def test_pairs_by_block(self) -> None:
        """Only blocks that both ran are paired, each with its own partner."""
        runs = [
            summaries.run("cold", block=0, wall_s=30.0),
            summaries.run("cold", block=1, wall_s=80.0),
            summaries.run("accelpact", block=1, wall_s=20.0),
            summaries.run("accelpact", block=0, wall_s=10.0),
            summaries.run("accelpact", block=2, wall_s=1.0),
        ]
        found = stats.ratio_between(
            runs, metric="wall_s", numerator="cold", denominator="accelpact"
        )

        assert found is not None
        assert [3.0, 4.0] == found.values

    def test_leaves_out_runs_that_did_not_come_out_right(self) -> None:
        """A failed run is short for the wrong reason."""
        runs = [
            summaries.run("cold", wall_s=30.0),
            summaries.run("accelpact", wall_s=10.0, verdict="fail"),
        ]

        assert (
            stats.ratio_between(runs, metric="wall_s", numerator="cold", denominator="accelpact")
            is None
        )

    def test_never_pairs_across_divisions(self) -> None:
        """Runs of another workload are not compared."""
        runs = [
            summaries.run("cold", division="tiny"),
            summaries.run("accelpact", division="decoder-32l"),
        ]

        assert (
            stats.ratio_between(runs, metric="wall_s", numerator="cold", denominator="accelpact")
            is None
        )

    def test_recovery_is_resume_less_detection(self) -> None:
        """Detection is the same for all and is not part of recovery."""
        run = summaries.run("accelpact", fault_to_resume_s=3.5, detection_s=3.0)

        assert 0.5 == stats.recovery_s(run)
        assert stats.recovery_s(summaries.run("accelpact", detection_s=None)) is None


class TestRatios:
    """The list of ratios in a summary."""

    def test_favours_the_contender_above_one(self) -> None:
        """Times are baseline over contender, rates contender over baseline."""
        found = {
            each.metric: (each.numerator, each.denominator)
            for each in stats.ratios([summaries.run("cold"), summaries.run("accelpact")])
        }

        assert ("cold", "accelpact") == found["wall_s"]
        assert ("accelpact", "cold") == found["goodput_tokens_s"]

    def test_compares_each_pair_once(self) -> None:
        """With cold over nvrx there is no nvrx over cold."""
        matches = stats.matches(["reference", "accelpact", "nvrx", "cold"])

        assert [("cold", "accelpact"), ("cold", "nvrx"), ("nvrx", "accelpact")] == matches


class TestOverheads:
    """Fault-free update times over the reference's."""

    def test_pairs_with_the_reference_of_the_block(self) -> None:
        """The first reference is the denominator, the control run the noise floor."""
        runs = [
            summaries.run("reference", faulted=False, update_s=0.2),
            summaries.run("reference", faulted=False, control=True, update_s=0.21),
            summaries.run("accelpact", faulted=False, update_s=0.3),
            summaries.run("accelpact", faulted=True, update_s=9.0),
        ]
        found = {each.strategy: each.ratio for each in stats.overheads(runs)}

        assert {"reference", "accelpact"} == found.keys()
        assert found["reference"] == pytest.approx(1.05)
        assert found["accelpact"] == pytest.approx(1.5)

    def test_is_empty_without_a_reference(self) -> None:
        """Nothing to compare with is nothing said."""
        assert [] == stats.overheads([summaries.run("accelpact", faulted=False)])
