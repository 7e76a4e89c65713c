"""Tables of what was measured: one function a section, records in, markdown out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.records import Overhead, Ratio, RunSummary
from harness.report._format import (
    DASH,
    count,
    fixed,
    listing,
    number,
    plural,
    quotient,
    series,
    table,
)
from harness.report._view import (
    Lane,
    View,
    in_seconds_to_ms,
    median,
    median_of,
    median_way_ms,
    phase_order,
    tally,
    unnamed_ms,
)
from harness.stats import RATES, REFERENCE, matches, reached

if TYPE_CHECKING:
    from collections.abc import Callable

METRICS = {
    "wall_s": "whole run",
    "recovery_s": "recovery (fault to resume less detection)",
    "fault_to_next_update_s": "fault to next update",
    "fault_to_frontier_s": "fault to frontier",
    "goodput_tokens_s": "goodput",
    "goodput_samples_s": "goodput, samples",
}

SHARES_TOLERANCE = 0.001


def verdicts(view: View) -> str:
    """Contender x kind of run: verdicts against the expected ones."""
    rows = []
    for lane in view.lanes():
        odd = [run for run in lane.ran() if run.verdict != run.expected]
        as_expected = "not run" if not lane.ran() else "no" if odd else "yes"
        rows.append(
            [
                lane.name,
                lane.kind,
                len(lane.ran()),
                tally(run.verdict for run in lane.runs),
                listing(dict.fromkeys(run.expected for run in lane.runs)),
                as_expected,
                listing(
                    dict.fromkeys(run.reason for run in odd or lane.runs if run.reason), most=2
                ),
            ]
        )
    ran = {run.strategy for run in view.runs}
    for name in view.names:
        known = view.contender(name)
        if name not in ran and known is not None:
            rows.append([name, "-", 0, "not_run", "-", "not run", known.reason])
    headers = ["contender", "runs", "n blocks", "verdicts", "expected", "as expected", "reason"]
    return table(headers, rows)


def per_block(view: View, measure: Callable[[RunSummary], float | None], unit: str) -> str:
    """A measure of the whole run: median over the blocks, and every block."""
    rows = []
    for lane in view.lanes():
        by_block = {run.block: run for run in lane.runs}
        cells = [_block_cell(by_block.get(block), measure) for block in view.blocks]
        rows.append([lane.name, lane.kind, number(median_of(lane.runs, measure)), *cells])
    headers = ["contender", "runs", f"median, {unit}", *(f"block {b}, {unit}" for b in view.blocks)]
    return table(headers, rows, words=2)


def _block_cell(run: RunSummary | None, measure: Callable[[RunSummary], float | None]) -> str:
    """The measure, or the verdict of a run whose times mean nothing."""
    if run is None:
        return DASH
    return number(measure(run)) if reached(run) else run.verdict


def goodput(view: View) -> str:
    """Tokens, or samples, per second."""
    if view.unit == "samples":
        return per_block(view, lambda run: run.goodput_samples_s or None, "samples/s")
    return per_block(view, lambda run: run.goodput_tokens_s, "tokens/s")


def ratios(view: View) -> str:
    """Paired ratios against each baseline that ran; more than 1 favours the contender."""
    rows = []
    for metric, title in METRICS.items():
        for base, name in matches(view.names):
            above, below = (name, base) if metric in RATES else (base, name)
            found = view.ratio(metric, above, below)
            if found is not None:
                rows.append([title, f"{above} / {below}", *_ratio_cells(found)])
    headers = [
        "measure",
        "ratio of",
        "median ratio",
        "low",
        "high",
        "low to high is",
        "n pairs",
        "every pair",
    ]
    return table(headers, rows)


def _ratio_cells(found: Ratio | Overhead) -> list[object]:
    """Median, low, high, what these are, number of pairs, every pair."""
    return [
        quotient(found.median if isinstance(found, Ratio) else found.ratio),
        quotient(found.low),
        quotient(found.high),
        found.method,
        found.n,
        ", ".join(quotient(value) for value in found.values),
    ]


def phases(view: View) -> str:
    """From the fault to the next update in named parts, slowest rank, ms."""
    lanes = view.faulted_lanes()
    ways = {lane.name: median_way_ms(lane.ran()) for lane in lanes}
    names = phase_order(name for way in ways.values() for name in way)
    rows = [
        [
            lane.name,
            len(lane.ran()),
            *(number(ways[lane.name].get(name), digits=3) for name in names),
            number(unnamed_ms(lane.ran())),
            number(in_seconds_to_ms(median(run.fault_to_resume_s for run in lane.ran()))),
            number(in_seconds_to_ms(median(run.fault_to_next_update_s for run in lane.ran()))),
        ]
        for lane in lanes
    ]
    headers = [
        "contender",
        "n blocks",
        *(f"{name}, ms" for name in names),
        "not named, ms",
        "fault to resume, ms",
        "fault to next update, ms",
    ]
    return table(headers, rows)


def updates(view: View) -> str:
    """Committed, replayed and discarded updates of the faulted runs."""
    rows = [
        [
            lane.name,
            len(lane.ran()),
            _values(lane, lambda run: run.committed_updates),
            _values(lane, lambda run: run.replayed_updates),
            _values(lane, lambda run: run.discarded_updates),
        ]
        for lane in view.faulted_lanes()
    ]
    headers = [
        "contender",
        "n blocks",
        "committed, updates per run",
        "replayed, updates per run",
        "discarded, updates per run",
    ]
    return table(headers, rows)


def _values(lane: Lane, measure: Callable[[RunSummary], int | None]) -> str:
    """The one value of all runs, or every distinct value with how often it came."""
    found = sorted({measure(run) for run in lane.ran()}, key=lambda value: value or 0)
    if len(found) == 1:
        return count(found[0])
    how_often = {each: sum(measure(run) == each for run in lane.ran()) for each in found}
    return ", ".join(f"{count(each)} ({often}x)" for each, often in how_often.items())


def drift(view: View) -> str:
    """Final state against the reference of the same block, over all blocks."""
    rows = []
    for lane in view.lanes():
        found = [run.drift for run in lane.ran()]
        compared = [each for each in found if each.level != "not_compared"]
        ranks = sum(each.ranks for each in compared)
        equal = sum(each.ranks_equal for each in compared)
        first = [each.first_update for each in compared if each.first_update is not None]
        tensors = dict.fromkeys(name for each in compared for name in each.tensors)
        rows.append(
            [
                lane.name,
                lane.kind,
                tally(each.level for each in found),
                f"{equal} of {ranks}" if ranks else DASH,
                number(_largest([each.max_abs for each in compared]), digits=3),
                number(_largest([each.l2 for each in compared]), digits=3),
                count(min(first) if first else None),
                listing(tensors, most=3),
            ]
        )
    headers = [
        "contender",
        "runs",
        "level, runs",
        "ranks bitwise equal, rank checks",
        "largest difference, absolute",
        "largest difference, l2 norm",
        "first differing update, number",
        "tensors that differ",
    ]
    return table(headers, rows)


def _largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def ledger(view: View) -> str:
    """Samples of the committed history that are missing or came twice."""
    rows = [
        [
            lane.name,
            lane.kind,
            len(lane.ran()),
            _values(lane, lambda run: run.data_ledger.missing),
            _values(lane, lambda run: run.data_ledger.duplicated),
        ]
        for lane in view.lanes()
        if lane.ran()
    ]
    headers = [
        "contender",
        "runs",
        "n blocks",
        "missing, samples per run",
        "duplicated, samples per run",
    ]
    return table(headers, rows)


def references(view: View) -> str:
    """References to the retired group: rebound and left, on the rank with most of them."""
    rows = []
    for lane in view.faulted_lanes():
        found = [each for run in lane.ran() for each in run.references]
        per_rank = sorted({each.rebound + each.left for each in found})
        rows.append(
            [
                lane.name,
                len(lane.ran()),
                _values(lane, lambda run: run.references_rebound),
                _values(lane, lambda run: run.references_left),
                ", ".join(str(each) for each in per_rank) or DASH,
            ]
        )
    headers = [
        "contender",
        "n blocks",
        "rebound, references on the rank with most",
        "left, references on the rank with most",
        "held, references per affected rank",
    ]
    return table(headers, rows)


def stale(view: View) -> list[str]:
    """Sentences that name the holders a contender left stale, once per set of names."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for lane in view.faulted_lanes():
        for run in lane.ran():
            for each in run.references:
                if each.left:
                    key = (lane.name, tuple(each.holders))
                    found[key] = found.get(key, 0) + 1
    return [
        f"{name} left {plural(len(holders), 'stale holder')} on "
        f"{plural(times, 'rank')} (all blocks together): "
        + ", ".join(f"`{holder}`" for holder in holders)
        + "."
        for (name, holders), times in found.items()
    ]


def overhead(view: View) -> str:
    """Fault-free update time over the reference's; the control pair is the noise floor."""
    rows: list[list[object]] = []
    for name in view.names:
        found = view.overhead(name)
        label = f"{name} (control pair: noise floor)" if name == REFERENCE else name
        rows.append([label, *([DASH] * 6 if found is None else _ratio_cells(found))])
    headers = [
        "contender",
        "update time / reference, median ratio",
        "low",
        "high",
        "low to high is",
        "n pairs",
        "every pair",
    ]
    return table(headers, rows)


def shares(view: View) -> str:
    """Mean shares of the wall time; means, since medians need not add up."""
    lanes = [lane for lane in view.lanes() if any(run.shares for run in lane.ran())]
    names = list(dict.fromkeys(name for lane in lanes for run in lane.ran() for name in run.shares))
    rows = []
    for lane in lanes:
        known = [run.shares for run in lane.ran() if run.shares]
        means = [sum(each.get(name, 0.0) for each in known) / len(known) for name in names]
        rows.append([lane.name, lane.kind, len(known), *map(fixed, means), fixed(sum(means))])
    headers = ["contender", "runs", "n blocks", *(f"{name}, share" for name in names), "sum"]
    return table(headers, rows)


def shares_sentence(view: View) -> str:
    """Say whether the shares of every single run add up to 1."""
    runs = [run for run in view.runs if run.shares]
    off = [run.name for run in runs if abs(sum(run.shares.values()) - 1) > SHARES_TOLERANCE]
    if not runs:
        return "No shares were recorded."
    if off:
        return f"The shares of {listing(off, most=5)} do not add up to 1."
    return f"The shares of each of the {plural(len(runs), 'run')} add up to 1 within 0.001."


def floors(view: View) -> str:
    """Repair from guard to release against the bare cost of the same repair."""
    rows = []
    for lane in view.faulted_lanes():
        if all(run.repair_ms is None for run in lane.ran()):
            continue
        over = [floor_ratio(run) for run in lane.ran()]
        rows.append(
            [
                lane.name,
                sum(value is not None for value in over),
                number(median(run.repair_ms for run in lane.ran()), digits=3),
                number(median(run.floor_ms for run in lane.ran()), digits=3),
                quotient(median(over)),
                series(over, digits=3),
            ]
        )
    headers = [
        "contender",
        "n blocks with both",
        "repair (guard to release), median ms",
        "floor, median ms",
        "repair / floor, median ratio",
        "every block, ratio",
    ]
    return table(headers, rows)


def floor_ratio(run: RunSummary) -> float | None:
    """Repair over its floor within one run; None where one of them is not known."""
    if run.repair_ms is None or run.floor_ms is None or run.floor_ms <= 0:
        return None
    return run.repair_ms / run.floor_ms
