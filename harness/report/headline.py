"""The first screen: which contender, how much faster, right or not, at what cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report._format import (
    DASH,
    listing,
    number,
    plural,
    quotient,
    short_ratio,
    spread,
    table,
)
from harness.report._view import View, median_of, tally
from harness.stats import BASELINES, REFERENCE, TIMES

if TYPE_CHECKING:
    from harness.records import Ratio


def lead(view: View) -> str | None:
    """The contender with the shortest median whole run among those that recovered."""
    walls = {
        name: wall
        for name in view.recovered()
        if (wall := median_of(view.faulted(name), TIMES["wall_s"])) is not None
    }
    return min(walls, key=lambda name: walls[name]) if walls else None


def level_with(view: View, best: str) -> list[Ratio]:
    """Whole runs of others over that of `best` whose interval or range holds 1."""
    found = [view.ratio("wall_s", name, best) for name in view.recovered() if name != best]
    return [each for each in found if each and each.n > 1 and each.low <= 1 <= each.high]


def leaders(view: View) -> list[str]:
    """The lead, then those whose whole runs these records cannot tell from it."""
    best = lead(view)
    if best is None:
        return []
    return [best, *(ratio.numerator for ratio in level_with(view, best))]


def bullets(view: View) -> list[str]:
    """Lines of the first screen, each a bold name and its answer."""
    lines = [
        ("Strategy", strategy(view)),
        *(("How much faster", text) for text in faster(view)),
        ("State", state(view)),
        ("Cost without a fault", cost(view)),
        ("Verdicts", verdicts(view)),
    ]
    return [f"**{name}.** {text}" for name, text in lines]


def strategy(view: View) -> str:
    """Which contender had the shortest whole run, and which did not recover."""
    lanes = view.faulted_lanes()
    if not lanes:
        return "No faulted run is in these records."
    right = view.recovered()
    wrong = [
        f"{lane.name} ({tally(run.verdict for run in lane.ran())}, "
        f"expected {listing(dict.fromkeys(run.expected for run in lane.ran()))})"
        for lane in lanes
        if lane.name not in right
    ]
    if not right:
        return f"No contender recovered in every block: {listing(wrong)}."
    text = (
        f"{len(right)} of {plural(len(lanes), 'contender')} with a fault reached the frontier "
        f"with the right state in every block: {listing(right)}."
    )
    if wrong:
        text += f" Did not: {listing(wrong)}."
    return f"{text} {_shortest(view)}" if len(right) > 1 else text


def _shortest(view: View) -> str:
    best = lead(view)
    if best is None:
        return "No whole run was timed."
    wall = number(median_of(view.faulted(best), TIMES["wall_s"]))
    text = f"Shortest whole run: {best}, median {wall} s"
    close = [_clause(ratio) for ratio in level_with(view, best)]
    return f"{text}; not told apart from it: {listing(close)}." if close else f"{text}."


def faster(view: View) -> list[str]:
    """Paired ratios against cold and nvrx, one text a leader."""
    names = leaders(view)
    if not names:
        return ["Not known: no faulted run that reached the frontier was timed."]
    parts = [text for name in names if (text := _against_baselines(view, name))]
    if not parts:
        return [f"Not known: neither cold nor nvrx can be paired with {listing(names)}."]
    return parts


def _against_baselines(view: View, name: str) -> str:
    """One sentence for the whole run and one for recovery; empty if nothing can be paired."""
    text = ""
    for metric, title in (("wall_s", "whole run"), ("recovery_s", "recovery after detection")):
        found = [view.ratio(metric, base, name) for base in ("cold", "nvrx") if base != name]
        clauses = [_clause(ratio) for ratio in found if ratio is not None]
        if clauses:
            text += f"; {title} {listing(clauses)}"
    return f"{name}: {text[2:]}." if text else ""


def _clause(ratio: Ratio) -> str:
    return f"{ratio.numerator} / {ratio.denominator} {quotient(ratio.median)}x ({spread(ratio)})"


def state(view: View) -> str:
    """On how many ranks the final state is the reference's, bit for bit."""
    names = view.recovered() or [lane.name for lane in view.faulted_lanes()]
    parts = [text for name in names if (text := _checks(view, name))]
    text = "Not known: no faulted run was compared with a reference."
    if parts:
        text = (
            "Final state bitwise equal to the uninterrupted reference of the block, in rank "
            f"checks: {listing(parts)}."
        )
    differing = [
        lane.name
        for lane in view.faulted_lanes()
        if any(run.drift.level == "differs" for run in lane.ran())
    ]
    if differing:
        text += f" Different from the reference: {listing(differing)}."
    return f"{text} {control(view)}"


def _checks(view: View, name: str) -> str:
    """`accelpact 24 of 24`; empty if no run was compared."""
    runs = view.faulted(name)
    compared = [run.drift for run in runs if run.drift.level != "not_compared"]
    ranks = sum(each.ranks for each in compared)
    if not ranks:
        return ""
    text = f"{name} {sum(each.ranks_equal for each in compared)} of {ranks}"
    left = len(runs) - len(compared)
    return f"{text} ({plural(left, 'run')} not compared)" if left else text


def control(view: View) -> str:
    """Whether the reference itself is deterministic."""
    runs = [run for run in view.runs if run.strategy == REFERENCE and run.control]
    compared = [run for run in runs if run.drift.level != "not_compared"]
    if not compared:
        return "No control pair of references was compared."
    equal = sum(run.drift.equal is True for run in compared)
    return (
        f"The control pair of references is bitwise equal in {equal} of "
        f"{plural(len(compared), 'block')}."
    )


def cost(view: View) -> str:
    """The leaders' fault-free update time against the reference's, and the noise floor."""
    names = leaders(view) or [lane.name for lane in view.faulted_lanes()]
    parts = [
        f"{name} / reference {quotient(found.ratio)}x ({spread(found)})"
        for name in names
        if (found := view.overhead(name)) is not None
    ]
    text = "Time per update, " + listing(parts) if parts else "Not measured"
    noise = view.overhead(REFERENCE)
    if noise is not None:
        text += f"; noise floor, two references: {quotient(noise.ratio)}x ({spread(noise)})"
    return f"{text}."


def verdicts(view: View) -> str:
    """Runs whose verdict is not the expected one, and what was not run."""
    ran = [run for run in view.runs if run.verdict != "not_run"]
    odd = [run for run in ran if run.verdict != run.expected]
    text = f"{len(ran) - len(odd)} of {plural(len(ran), 'run')} as expected."
    if odd:
        named = [f"{run.name} ({run.verdict}, expected {run.expected})" for run in odd]
        text += f" Not as expected: {listing(named, most=4)}."
    left_out = view.left_out()
    if left_out:
        named = [f"{name}: {reason or 'no reason recorded'}" for name, reason in left_out]
        text += f" Not run: {listing(named, most=4)}."
    return text


def screen(view: View) -> str:
    """The table of the first screen: one row a contender."""
    base = baseline(view)
    rows = []
    for lane in view.faulted_lanes():
        against = base if base not in (None, lane.name) else None
        wall = view.ratio("wall_s", against, lane.name) if against else None
        recovery = view.ratio("recovery_s", against, lane.name) if against else None
        checks = [run.drift for run in lane.ran() if run.drift.level != "not_compared"]
        ranks = sum(each.ranks for each in checks)
        rows.append(
            [
                lane.name,
                tally(run.verdict for run in lane.ran()),
                f"{sum(each.ranks_equal for each in checks)} of {ranks}" if ranks else DASH,
                number(median_of(lane.ran(), TIMES["wall_s"])),
                short_ratio(wall),
                number(median_of(lane.ran(), TIMES["recovery_s"]), digits=3),
                short_ratio(recovery),
                short_ratio(view.overhead(lane.name)),
            ]
        )
    over = f"{base} / it" if base else "baseline / it"
    headers = [
        "contender",
        "faulted runs",
        "rank states equal",
        "whole run, s",
        f"whole run, {over}",
        "recovery, s",
        f"recovery, {over}",
        "fault-free update, it / reference",
    ]
    return table(headers, rows)


def baseline(view: View) -> str | None:
    """The contender that the first screen sets the others against."""
    right = view.recovered()
    return next((name for name in BASELINES if name in right), None)
