"""The three figures of a report, as SVG, the same bytes for the same records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from harness.report import _style
from harness.report._format import number, short_ratio
from harness.report._view import (
    DETECTION,
    REPAIR,
    Lane,
    View,
    median_way_ms,
    phase_order,
    unnamed_ms,
)
from harness.stats import ORDER_STATISTIC, REFERENCE, matches, reached

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.records import Ratio, RunSummary

WIDTH = 10.0
NAME_LENGTH = 14
LEGEND_DROP = 0.32
"""Inches from the axes to the legend under them."""
UNNAMED = "not named"
IN_PLACE = "repair in place"
BASELINES = ("cold", "nvrx")
RATIO_METRICS = {"wall_s": "whole run", "recovery_s": "recovery after detection"}


def draw(view: View) -> dict[str, bytes]:
    """Return file name -> SVG of every figure."""
    with _style.fixed():
        return {
            "goodput.svg": _style.svg(goodput(view)),
            "phases.svg": _style.svg(phases(view)),
            "ratios.svg": _style.svg(ratios(view)),
        }


# -- committed tokens, or samples, against time ------------------------------


def goodput(view: View) -> Figure:
    """Committed tokens or samples of all ranks against seconds, first block, the fault marked."""
    figure = _style.new_figure(width=WIDTH, height=4.6)
    axes = figure.add_axes((0.095, 0.12, 0.68, 0.80))
    drawn = [run for run in _first_runs(view) if run.curve]
    if not drawn:
        _style.empty(axes, f"No run with a curve of committed {view.unit} is in these records.")
        return figure
    names = view.names
    for run in drawn:
        _curve(axes, run, names)
    axes.plot([], [], marker="X", color=_style.GREY, linestyle="none", label="fault")
    axes.set_title(f"Committed {view.unit}, block {drawn[0].block}")
    axes.set_xlabel("time since launch, s")
    axes.set_ylabel(f"committed {view.unit} of all ranks")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return figure


def _first_runs(view: View) -> list[RunSummary]:
    """The first block's faulted runs, and its reference, which has no fault."""
    runs = [run for run in view.runs if run.verdict != "not_run"]
    faulted = [run for run in runs if run.faulted]
    block = min((run.block for run in faulted or runs), default=None)
    plain = [run for run in runs if run.strategy == REFERENCE and not run.control]
    chosen = [run for run in [*plain, *faulted] if run.block == block]
    return sorted(chosen, key=lambda run: view.names.index(run.strategy))


def _curve(axes: Axes, run: RunSummary, names: list[str]) -> None:
    colour, dashes = _style.contender_style(run.strategy, names)
    seconds, amounts = zip(*run.curve, strict=True)
    label = _short(run.strategy)
    if not run.faulted:
        label += " (no fault)"
    elif not reached(run):
        label += f" ({run.verdict})"
    axes.step(
        (0.0, *seconds),
        (0, *amounts),
        where="post",
        color=colour,
        linestyle=dashes,
        linewidth=1.5,
        label=label,
    )
    axes.plot(seconds[-1], amounts[-1], marker="o", markersize=3.5, color=colour)
    if run.fault_s is not None:
        done = [amount for second, amount in run.curve if second <= run.fault_s]
        axes.plot(
            run.fault_s,
            max(done, default=0),
            marker="X",
            markersize=8,
            color=colour,
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=5,
        )


# -- phases from the fault to the next update --------------------------------


def phases(view: View) -> Figure:
    """Stacked phases: the whole way in seconds, and repairs in place in milliseconds."""
    lanes = [lane for lane in view.faulted_lanes() if median_way_ms(lane.ran())]
    repairs = [lane for lane in lanes if set(REPAIR) & median_way_ms(lane.ran()).keys()]
    tops = [max(len(lanes), 1), len(repairs)]
    heights = [0.36 * amount + (1.25 if amount else 0.0) for amount in tops]
    total = sum(heights)
    figure = _style.new_figure(width=WIDTH, height=total)
    bottom = total
    for index, chosen in enumerate((lanes, repairs)):
        if not heights[index]:
            continue
        bottom -= heights[index]
        axes = figure.add_axes((0.16, (bottom + 0.85) / total, 0.80, 0.36 * tops[index] / total))
        if not chosen:
            _style.empty(axes, "No faulted run with named phases is in these records.")
        elif index == 0:
            _stack(axes, chosen, [_coarse(lane) for lane in chosen], unit="s")
            axes.set_title("Fault to next update, s (slowest rank, median over blocks)")
        else:
            _stack(axes, chosen, [_fine(lane) for lane in chosen], unit="ms")
            axes.set_title("of that: repair in place, ms")
    return figure


def _coarse(lane: Lane) -> dict[str, float]:
    """The way in seconds, the phases of a repair in place as one."""
    way = median_way_ms(lane.ran())
    found: dict[str, float] = {}
    for name, ms in way.items():
        key = IN_PLACE if name in REPAIR else name
        found[key] = found.get(key, 0.0) + ms / 1000
    rest = unnamed_ms(lane.ran())
    if rest is not None and rest > 0:
        found[UNNAMED] = rest / 1000
    return found


def _fine(lane: Lane) -> dict[str, float]:
    """The phases of a repair in place, ms."""
    return {name: ms for name, ms in median_way_ms(lane.ran()).items() if name in REPAIR}


def _stack(axes: Axes, lanes: list[Lane], ways: list[dict[str, float]], *, unit: str) -> None:
    names = phase_order(name for way in ways for name in way)
    names.sort(key=lambda name: (name != DETECTION, name == UNNAMED))
    longest = max(sum(way.values()) for way in ways) or 1.0
    for name in names:
        lefts = [_before(way, names, name) for way in ways]
        axes.barh(
            range(len(ways)),
            [way.get(name, 0.0) for way in ways],
            left=lefts,
            height=0.62,
            color=_style.phase_colour(name, names),
            edgecolor="#333333",
            linewidth=0.5,
            hatch="////" if name == UNNAMED else None,
            label=name,
        )
    for row, way in enumerate(ways):
        total = sum(way.values())
        axes.text(total + 0.008 * longest, row, f"{number(total, digits=3)} {unit}", va="center")
    axes.set_yticks(range(len(ways)), [_lane_label(lane) for lane in lanes])
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * longest)
    axes.grid(visible=False, axis="y")
    _legend_below(axes)


def _before(way: dict[str, float], names: list[str], name: str) -> float:
    """Where the part `name` begins."""
    return sum(way.get(each, 0.0) for each in names[: names.index(name)])


def _lane_label(lane: Lane) -> str:
    """The contender, and how many of its runs did not come out right."""
    wrong = [run.verdict for run in lane.ran() if not reached(run)]
    if not wrong:
        return _short(lane.name)
    if len(wrong) == len(lane.ran()) and len(set(wrong)) == 1:
        return f"{_short(lane.name)} ({wrong[0]})"
    return f"{_short(lane.name)}\n({len(wrong)} of {len(lane.ran())} not right)"


def _legend_below(axes: Axes) -> None:
    """Put the legend a fixed distance under the axes, whatever their height."""
    below = ScaledTranslation(0, -LEGEND_DROP, axes.figure.dpi_scale_trans)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        bbox_transform=axes.transAxes + below,
        ncol=8,
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=1.2,
        columnspacing=1.2,
        handletextpad=0.5,
    )


# -- paired ratios -----------------------------------------------------------


def ratios(view: View) -> Figure:
    """Every pair, its median and its interval, against each baseline."""
    panels = [
        (metric, baseline, found)
        for metric in RATIO_METRICS
        for baseline in BASELINES
        if (found := _against(view, metric, baseline))
    ]
    rows = max((len(found) for *_, found in panels), default=1)
    lines = len({metric for metric, *_ in panels}) or 1
    height = lines * (0.4 * rows + 1.1)
    figure = _style.new_figure(width=WIDTH, height=height)
    if not panels:
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        _style.empty(axes, "No pair of faulted runs against cold or nvrx is in these records.")
        return figure
    for metric, baseline, found in panels:
        line = list(dict.fromkeys(each for each, *_ in panels)).index(metric)
        column = BASELINES.index(baseline)
        bottom = height - (line + 1) * (0.4 * rows + 1.1) + 0.62
        axes = figure.add_axes(
            (
                0.115 + 0.5 * column,
                (bottom + 0.4 * (rows - len(found))) / height,
                0.22,
                0.4 * len(found) / height,
            )
        )
        _panel(axes, found, view.names)
        axes.set_title(f"{RATIO_METRICS[metric]}: {baseline} / contender")
    return figure


def _against(view: View, metric: str, baseline: str) -> list[Ratio]:
    names = [name for base, name in matches(view.names) if base == baseline]
    found = [view.ratio(metric, baseline, name) for name in names]
    return [each for each in found if each is not None]


def _panel(axes: Axes, found: list[Ratio], names: list[str]) -> None:
    logarithmic = max(max(each.values) for each in found) > 20
    if logarithmic:
        axes.set_xscale("log")
    for row, each in enumerate(found):
        colour, _ = _style.contender_style(each.denominator, names)
        axes.plot([each.low, each.high], [row, row], color=colour, linewidth=2.0)
        axes.plot(each.median, row, marker="|", markersize=15, markeredgewidth=2.2, color=colour)
        # Spread sideways by block, so that equal points stay visible.
        places = [row + 0.22 * (-1) ** index for index in range(each.n)]
        axes.plot(
            each.values,
            places,
            linestyle="none",
            marker="o",
            markersize=3.8,
            color=colour,
            markerfacecolor="white",
            markeredgewidth=1.0,
        )
        axes.text(
            1.04,
            row,
            _label(each),
            va="center",
            fontsize=7.5,
            transform=axes.get_yaxis_transform(),
        )
    axes.axvline(1.0, color=_style.GREY, linewidth=0.9, linestyle=(0, (4, 2)), zorder=0)
    axes.set_yticks(range(len(found)), [_short(each.denominator) for each in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    if logarithmic:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("ratio, log scale" if logarithmic else "ratio")


def _label(ratio: Ratio) -> str:
    """The figures of a ratio, and what its line is."""
    if ratio.n == 1:
        return f"{short_ratio(ratio)}\n1 pair"
    kind = "95 % interval" if ratio.method == ORDER_STATISTIC else ratio.method
    return f"{short_ratio(ratio)}\n{ratio.n} pairs, {kind}"


def _short(name: str) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 2]}.."
