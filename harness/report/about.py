"""Tables about the contenders, the machine, the faults and the published figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report import paper
from harness.report._format import (
    DASH,
    count,
    flatten,
    listing,
    number,
    short_ratio,
    table,
)
from harness.report._view import View, median, median_of, num_ranks, tally, timed
from harness.report.targets import SUBJECT
from harness.stats import TIMES

if TYPE_CHECKING:
    from harness.records import Tried
    from harness.report.paper import Published

MIB = 2**20
FEWEST_PAIRS = 6
RESOURCES = {
    "threads": ("threads", 1),
    "descriptors": ("file descriptors", 1),
    "groups": ("process groups", 1),
    "rss_bytes": ("resident memory, MiB", MIB),
    "device_bytes": ("device memory, MiB", MIB),
}
"""Field -> title and divisor; other fields keep their own name."""


def integration(view: View) -> str:
    """Lines a contender needs in a training script."""
    rows = [
        [each.name, each.version, count(each.integration_lines), each.summary]
        for each in view.summary.contenders
    ]
    return table(
        ["contender", "version", "integration, lines in a training script", "what it does"], rows
    )


def settings(view: View) -> str:
    """What every contender ran with."""
    rows = [
        [each.name, each.variant, name, value]
        for each in view.summary.contenders
        for name, value in flatten(each.settings)
    ]
    return table(["contender", "variant", "setting (times in s)", "value"], rows)


def tried(view: View) -> str:
    """Variants that were tried, what each gave, and which one was chosen."""
    rows = [
        _tried(each.name, chosen=each.variant, found=found)
        for each in view.summary.contenders
        for found in each.tried
    ]
    headers = [
        "contender",
        "variant",
        "chosen",
        "options",
        "recovery, median s",
        "update, median s",
        "n runs",
        "verdicts",
        "measured on",
    ]
    return table(headers, rows)


def _tried(name: str, *, chosen: str, found: Tried) -> list[object]:
    return [
        name,
        found.variant,
        "yes" if found.variant == chosen else "no",
        "; ".join(f"{key} = {value}" for key, value in flatten(found.options)) or DASH,
        number(found.recovery_s, digits=3),
        number(found.update_s, digits=3),
        found.n,
        tally(found.verdicts),
        found.source,
    ]


def resources(view: View) -> str:
    """What a rank's process holds after the first and after the last committed update."""
    lanes = [lane for lane in view.lanes() if any(run.resources for run in lane.ran())]
    fields = list(
        dict.fromkeys(
            field
            for lane in lanes
            for run in lane.ran()
            for values in run.resources.values()
            for field in values
        )
    )
    ordered = [name for name in RESOURCES if name in fields]
    ordered += [name for name in fields if name not in RESOURCES]
    rows = []
    for lane in lanes:
        row: list[object] = [lane.name, lane.kind]
        for field in ordered:
            divisor = RESOURCES.get(field, (field, 1))[1]
            for moment in ("before", "after"):
                value = median(run.resources.get(moment, {}).get(field) for run in lane.ran())
                row.append(DASH if value is None else _amount(value / divisor))
        rows.append(row)
    headers = ["contender", "runs"]
    for field in ordered:
        title = RESOURCES.get(field, (field, 1))[0]
        headers += [f"{title}, before", f"{title}, after"]
    return table(headers, rows)


def _amount(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def published(view: View) -> str:
    """The paper's figures beside ours; conditions differ and are stated."""
    rows = [*_published_accelpact(view), *_published_others(view)]
    headers = ["figure", f"published ({paper.SOURCE})", "published conditions", "ours, median"]
    return table(headers, rows)


def _published_accelpact(view: View) -> list[list[object]]:
    repair_s = _repair_s(view, SUBJECT)
    ranks = num_ranks(view.summary.spec)
    rows = [
        _row(
            f"whole run, {rival} / {SUBJECT}, ratio",
            figure,
            short_ratio(view.ratio("wall_s", rival, SUBJECT)),
        )
        for rival, figure in paper.WHOLE_RUN_OVER.items()
    ]
    rows.append(_row(f"repair, {SUBJECT}, s", paper.REPAIR_MACRO_S, number(repair_s, digits=3)))
    for size, figure in paper.REPAIR_TOTAL_MS.items():
        ours = None if repair_s is None or ranks != size else 1000 * repair_s
        title = f"repair total at {size} ranks, {SUBJECT}, ms"
        rows.append(_row(title, figure, number(ours, digits=3)))
    return rows


def _published_others(view: View) -> list[list[object]]:
    next_update_s = median_of(view.faulted("torchft_pg"), TIMES["fault_to_next_update_s"])
    return [
        _row(
            "repair, torchft, s (ours: torchft_pg)",
            paper.TORCHFT_REPAIR_S,
            number(_repair_s(view, "torchft_pg"), digits=3),
        ),
        _row(
            "fault to next update, torchft, s (ours: torchft_pg)",
            paper.TORCHFT_NEXT_UPDATE_S,
            number(next_update_s),
        ),
        _row(
            "stale references when only the communicator is replaced, per rank",
            paper.STALE_REFERENCES,
            _left(view),
        ),
    ]


def _row(title: str, figure: Published, ours: str) -> list[object]:
    return [title, f"{figure.value}, {figure.place}", figure.conditions, ours]


def _repair_s(view: View, name: str) -> float | None:
    found = median(run.repair_ms for run in timed(view.faulted(name)))
    return None if found is None else found / 1000


def _left(view: View) -> str:
    """Stale references per affected rank of the ablation, every distinct count."""
    runs = view.faulted("comm_only")
    counts = sorted({each.left for run in runs for each in run.references if each.left})
    return ", ".join(str(each) for each in counts) or DASH


def environment(view: View) -> str:
    """The machine and its versions."""
    return table(["what", "value"], flatten(view.environment))


def specification(view: View) -> str:
    """What the comparison was asked to do."""
    return table(["option (times in s)", "value"], flatten(view.summary.spec))


def faults(view: View) -> str:
    """Every planned fault with the evidence that it fired."""
    rows = [
        [each.run, each.planned, "yes" if each.fired else "no", each.evidence]
        for each in view.summary.faults
    ]
    return table(["run", "planned", "fired", "evidence"], rows)


def limits(view: View) -> list[str]:
    """What these records cannot say: from the records, and from their shape."""
    found = list(view.summary.limits)
    divisions = sorted({run.division for run in view.runs})
    if len(divisions) > 1:
        found.append(
            f"The records hold {len(divisions)} divisions ({listing(divisions, most=4)}); medians "
            "are over all of them, paired ratios are within one."
        )
    sizes = [ratio.n for ratio in view.summary.ratios]
    sizes += [overhead.n for overhead in view.summary.overhead]
    few = sorted({size for size in sizes if size < FEWEST_PAIRS})
    if few:
        found.append(
            f"Some ratios rest on {' or '.join(map(str, few))} pairs; below {FEWEST_PAIRS} no 95 % "
            "interval of the median exists, so their range is given."
        )
    return found


def reading(view: View) -> str:
    """How the ratios of this report are to be read."""
    if len(view.blocks) < 2:
        return "With one block a ratio is a single figure; nothing is known of its spread."
    return (
        "Each ratio is taken within a block, then its median over the blocks. From 6 pairs on, "
        "low to high is an interval of the median by order statistics with at least 95 % "
        "coverage; below that it is the range of the pairs."
    )
