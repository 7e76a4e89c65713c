"""Paired ratios and their intervals: what may be said from a few blocks.

A ratio is taken inside a block, where both runs saw the same machine state, and
only then summarized. The interval of the median is the order-statistic one: it
assumes nothing about the distribution. With fewer than 6 pairs no such interval
reaches 95 %, so the range is given and called a range.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from scipy.stats import binom

from harness.records import Overhead, Ratio, RunSummary

ORDER_STATISTIC = "order-statistic 95 %"
RANGE = "range"
COVERAGE = 0.95

REFERENCE = "reference"
BASELINES = ("cold", "nvrx", "torchft_pg")
"""Contenders that those after them and all others are set against, where they ran."""

Pair: TypeAlias = tuple[float | None, float | None]
Measure: TypeAlias = Callable[[RunSummary], float | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median and what is known about it."""

    n: int
    median: float
    low: float
    high: float
    method: str


def recovery_s(run: RunSummary) -> float | None:
    """Seconds from the last notice of the fault until the slowest rank goes on."""
    if run.fault_to_resume_s is None or run.detection_s is None:
        return None
    return run.fault_to_resume_s - run.detection_s


TIMES: dict[str, Measure] = {
    "wall_s": lambda run: run.wall_s,
    "recovery_s": recovery_s,
    "fault_to_next_update_s": lambda run: run.fault_to_next_update_s,
    "fault_to_frontier_s": lambda run: run.fault_to_frontier_s,
}
"""Metrics of a faulted run for which less is better."""

RATES: dict[str, Measure] = {
    "goodput_tokens_s": lambda run: run.goodput_tokens_s,
    "goodput_samples_s": lambda run: run.goodput_samples_s or None,
}
"""Metrics of a faulted run for which more is better."""


def interval(values: Sequence[float]) -> Interval:
    """Summarize `values` by their median and its interval.

    From n = 6 on, `low` and `high` are the k-th smallest and k-th largest value,
    with the largest k for which the median lies between them with a probability
    of at least 95 %, whatever the distribution: 1 - 2 P(Bin(n, 1/2) < k).

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("values: expected at least one; found none")
    ordered = sorted(values)
    n = len(ordered)
    # Outside the k-th order statistics lies the event that fewer than k values
    # fall on one side of the median.
    k = sum(1 for below in range(n // 2) if 2 * binom.cdf(below, n, 0.5) <= 1 - COVERAGE)
    method = ORDER_STATISTIC if k else RANGE
    k = max(k, 1)
    return Interval(
        n=n,
        median=statistics.median(ordered),
        low=ordered[k - 1],
        high=ordered[n - k],
        method=method,
    )


def quotients(pairs: Iterable[Pair]) -> list[float]:
    """Divide each pair; a pair with a missing, non-finite or non-positive value is dropped."""
    return [
        above / below
        for above, below in pairs
        if above is not None and below is not None and _usable(above) and _usable(below)
    ]


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def paired_ratio(
    pairs: Iterable[Pair], *, metric: str, numerator: str, denominator: str
) -> Ratio | None:
    """Summarize the quotients of `pairs`, one pair per block; None if no pair is usable."""
    values = quotients(pairs)
    if not values:
        return None
    found = interval(values)
    return Ratio(
        metric=metric,
        numerator=numerator,
        denominator=denominator,
        n=found.n,
        median=found.median,
        low=found.low,
        high=found.high,
        method=found.method,
        values=values,
    )


def paired_overhead(pairs: Iterable[Pair], *, strategy: str) -> Overhead | None:
    """Summarize a contender's update times over the reference's; None if no pair is usable."""
    values = quotients(pairs)
    if not values:
        return None
    found = interval(values)
    return Overhead(
        strategy=strategy,
        n=found.n,
        ratio=found.median,
        low=found.low,
        high=found.high,
        method=found.method,
        values=values,
    )


def reached(run: RunSummary) -> bool:
    """Whether `run` reached its frontier with the right state: only such runs are timed."""
    return run.verdict in ("pass", "rejected")


def ratio_between(
    runs: Iterable[RunSummary], *, metric: str, numerator: str, denominator: str
) -> Ratio | None:
    """Pair the faulted runs of two contenders by division and block.

    Raises:
        KeyError: `metric` is in neither `TIMES` nor `RATES`.
    """
    measure = {**TIMES, **RATES}[metric]
    timed = [run for run in runs if run.faulted and reached(run)]
    above = _by_block(run for run in timed if run.strategy == numerator)
    below = _by_block(run for run in timed if run.strategy == denominator)
    pairs = [(measure(above[key]), measure(below[key])) for key in sorted(above.keys() & below)]
    return paired_ratio(pairs, metric=metric, numerator=numerator, denominator=denominator)


def matches(names: Iterable[str]) -> list[tuple[str, str]]:
    """Every (baseline, contender) to compare among `names`, each pair of names once."""
    present = [name for name in dict.fromkeys(names) if name != REFERENCE]
    bases = [name for name in BASELINES if name in present]
    return [
        (base, name)
        for place, base in enumerate(bases)
        for name in present
        if name not in bases[: place + 1]
    ]


def ratios(runs: Sequence[RunSummary]) -> list[Ratio]:
    """Set every contender against each baseline, so that more than 1 favours the contender.

    Times are baseline / contender, rates contender / baseline.
    """
    found = []
    for metric in (*TIMES, *RATES):
        for base, name in matches(run.strategy for run in runs if run.faulted):
            above, below = (base, name) if metric in TIMES else (name, base)
            ratio = ratio_between(runs, metric=metric, numerator=above, denominator=below)
            if ratio is not None:
                found.append(ratio)
    return found


def overheads(runs: Sequence[RunSummary]) -> list[Overhead]:
    """Set every contender's fault-free update time against the reference of its block.

    The entry of `reference` is the control run over the reference: what the
    comparison shows where there is nothing to show, its noise floor.
    """
    timed = [run for run in runs if not run.faulted and reached(run)]
    base = _by_block(run for run in timed if run.strategy == REFERENCE and not run.control)
    found = []
    for name in dict.fromkeys(run.strategy for run in timed):
        own = _by_block(
            run for run in timed if run.strategy == name and run.control == (name == REFERENCE)
        )
        pairs = [(own[key].update_s, base[key].update_s) for key in sorted(own.keys() & base)]
        overhead = paired_overhead(pairs, strategy=name)
        if overhead is not None:
            found.append(overhead)
    return found


def _by_block(runs: Iterable[RunSummary]) -> dict[tuple[str, int], RunSummary]:
    """Index runs by division and block; of several in one block the first stands."""
    index: dict[tuple[str, int], RunSummary] = {}
    for run in runs:
        index.setdefault((run.division, run.block), run)
    return index
