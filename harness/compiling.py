"""What the compiler does for every kind of group, before and after a recovery.

Two things are compiled: every block of the model, whose collectives the wrapper issues around the
graphs, and a function that sums over the replicate group, so that the group is in its graph. Ranks
record what the compiler has counted after every update. The rest are pure functions of that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from harness import plan
from harness.events import JsonLines
from harness.layout import RUNS
from harness.records import SCHEMA_VERSION, Verdict, read_lines
from harness.spec import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.records import Summary
    from strategies import Groups

RECORD, COUNTS, TABLE = "compiled.jsonl", "compiled.json", "compiled.md"
CONTENDERS = ("accelpact", "c10d_reconfigure", "torchft_pg", "cold")
STRIKE = "absent@boundary"
KINDS = {
    plan.REFERENCE: "torch's own, no failure",
    "accelpact": "torch's own, rebuilt under its name",
    "c10d_reconfigure": "torch's own, reconfigured in place",
    "torchft_pg": "torchft's wrapper, configured anew",
    "torchft_manager": "torchft's managed wrapper",
    "cold": "torch's own, in new processes",
    "nvrx": "torch's own, new in the same processes",
}
"""What the contenders do with the group between the replicas."""


class Counts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the compiler had done in one process, for the model or for the function."""

    graphs: int
    breaks: int
    recompiled: int | None
    """Frames that were compiled although there was code for them; None if torch does not tell."""


class Compiled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of `compiled.jsonl`: a rank after an update."""

    rank: int
    start: int
    """How often the launcher had started all ranks again: each start counts from nothing."""
    update: int
    model: Counts
    function: Counts


class Row(msgspec.Struct, kw_only=True):
    """One contender under one wrapper; counts are the largest of any rank."""

    torch: str
    wrapper: str
    strategy: str
    verdict: Verdict
    reason: str
    before: dict[str, Counts] | None = None
    """`model` and `function`: until the failure."""
    after: dict[str, Counts] | None = None
    """From there to the end; everything, where the processes are new."""


class Counting:
    """Counts on one rank, in a process that has compiled nothing else."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        """Open the record; have the compiler remember every compilation."""
        from torch._dynamo import utils

        self._lines = JsonLines(folder / RECORD)
        self._rank = rank
        self._start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._function = Counts(graphs=0, breaks=0, recompiled=0)
        self._total = _compiled_total()
        if hasattr(utils, "set_compilation_metrics_limit"):
            utils.set_compilation_metrics_limit(2**16)

    def record(self, update: int, groups: Groups) -> None:
        """Call the compiled function and write what has been counted; a collective."""
        before = _so_far()
        self._total(groups.replicate)
        after = _so_far()
        self._function = _sum(self._function, _difference(after, before))
        model = _difference(after, self._function)
        self._lines.write(
            Compiled(
                rank=self._rank,
                start=self._start,
                update=update,
                model=model,
                function=self._function,
            )
        )


def _compiled_total() -> Callable[[Any], Any]:
    """Return a function that sums ones over a group, compiled."""
    import torch
    import torch.distributed._functional_collectives as funcol

    from harness.workload.hsdp import COMPILER_BACKEND

    def total(x: torch.Tensor, group: Any) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", group) + 1

    compiled = torch.compile(total, backend=COMPILER_BACKEND, dynamic=False)
    return lambda group: compiled(torch.ones(4), group)


def _so_far() -> Counts:
    """Read the compiler's counters."""
    from torch._dynamo import utils

    recompiled: int | None = None
    if hasattr(utils, "get_compilation_metrics"):
        found = utils.get_compilation_metrics()
        if all(hasattr(each, "recompile_reason") for each in found):
            recompiled = sum(each.recompile_reason is not None for each in found)
    return Counts(
        graphs=utils.counters["stats"]["unique_graphs"],
        breaks=sum(utils.counters["graph_break"].values()),
        recompiled=recompiled,
    )


def _sum(a: Counts, b: Counts) -> Counts:
    return _joined(a, b, 1)


def _difference(a: Counts, b: Counts) -> Counts:
    return _joined(a, b, -1)


def _joined(a: Counts, b: Counts, sign: int) -> Counts:
    unknown = a.recompiled is None or b.recompiled is None
    return Counts(
        graphs=a.graphs + sign * b.graphs,
        breaks=a.breaks + sign * b.breaks,
        recompiled=None if unknown else (a.recompiled or 0) + sign * (b.recompiled or 0),
    )


def build(summaries: Mapping[Path, Summary]) -> dict[str, bytes]:
    """Return file name -> content for the places that have such records; nothing if none has.

    Args:
        summaries: folder `torch-VERSION/WRAPPER` -> what is said of its runs.
    """
    rows = [
        row
        for place, summary in summaries.items()
        if any(place.glob(f"{RUNS}/*/{RECORD}"))
        for row in _rows(place, summary)
    ]
    if not rows:
        return {}
    record = {"schema_version": SCHEMA_VERSION, "rows": rows}
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    return {COUNTS: text + b"\n", TABLE: render(rows).encode()}


def _rows(place: Path, summary: Summary) -> list[Row]:
    fault = Fault.parse(summary.spec["strikes"][0])
    names = {plan.REFERENCE: plan.run_name(0, plan.REFERENCE)}
    for contender in summary.contenders:
        label = plan.matrix_label(contender.name, fault)
        names[contender.name] = plan.run_name(0, label)
    runs = {run.name: run for run in summary.runs}
    reasons = {contender.name: contender.reason for contender in summary.contenders}
    found = []
    for strategy, name in names.items():
        row = Row(
            torch=place.parent.name.removeprefix("torch-"),
            wrapper=summary.spec["wrapper"],
            strategy=strategy,
            verdict="not_run",
            reason=reasons.get(strategy) or "interrupted before this run",
        )
        if name in runs:
            row.verdict, row.reason = runs[name].verdict, runs[name].reason
            records = read_lines(place / RUNS / name / RECORD, Compiled)
            row.before, row.after = split(records, fault.frontier)
        found.append(row)
    return found


def split(
    records: Sequence[Compiled], frontier: int
) -> tuple[dict[str, Counts] | None, dict[str, Counts] | None]:
    """Return what was counted until the failure, and what came on top; None where it is unknown.

    Args:
        records: of one run.
        frontier: the last update that was committed when it failed.
    """
    befores, afters = [], []
    for rank in sorted({record.rank for record in records}):
        own = [record for record in records if record.rank == rank]
        struck = [record for record in own if (record.start, record.update) == (0, frontier)]
        if struck:
            befores.append(struck[0])
        if struck and own[-1].update > frontier:
            afters.append((struck[0], own[-1]))
    return _largest([_both(record) for record in befores]), _largest(
        [_both(last) if last.start else _on_top(first, last) for first, last in afters]
    )


def _both(record: Compiled) -> dict[str, Counts]:
    return {"model": record.model, "function": record.function}


def _on_top(first: Compiled, last: Compiled) -> dict[str, Counts]:
    return {
        "model": _difference(last.model, first.model),
        "function": _difference(last.function, first.function),
    }


def _largest(found: Sequence[dict[str, Counts]]) -> dict[str, Counts] | None:
    if not found:
        return None
    largest = {}
    for what in ("model", "function"):
        counts = [each[what] for each in found]
        recompiled = [each.recompiled for each in counts if each.recompiled is not None]
        largest[what] = Counts(
            graphs=max(each.graphs for each in counts),
            breaks=max(each.breaks for each in counts),
            recompiled=max(recompiled) if len(recompiled) == len(counts) else None,
        )
    return largest


def render(rows: Sequence[Row]) -> str:
    """Write the table as Markdown, one per torch, reasons below it."""
    lines = [
        "# What the compiler does before and after a recovery",
        "",
        (
            "Counted, not timed: graphs / graph breaks / recompilations, the most of any of the "
            "ranks, which are forks on one machine. Compiled (`aot_eager`: all but the generation "
            "of code) are every block of the model, and a function that sums over the replicate "
            "group. *After* is what came on top from the failure to the end; where the processes "
            "are new that is everything. `pass`: every rank's state equals that of the compiled "
            "run without a failure bit for bit."
        ),
    ]
    for torch in dict.fromkeys(row.torch for row in rows):
        lines += ["", f"## torch {torch}", "", *_table([row for row in rows if row.torch == torch])]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    titles = ("wrapper", "contender", "group between the replicas", "verdict", "model, before",
              "model, after", "function, before", "function, after")  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    notes: dict[str, int] = {}
    for row in rows:
        verdict: str = row.verdict
        if row.reason:
            reason = " ".join(row.reason.split()).replace("|", "/")
            verdict += f" [{notes.setdefault(reason, len(notes) + 1)}]"
        kind = KINDS.get(row.strategy, "see its own documentation")
        counts = [
            _shown(found, what)
            for what in ("model", "function")
            for found in (row.before, row.after)
        ]
        lines.append("| " + " | ".join((row.wrapper, row.strategy, kind, verdict, *counts)) + " |")
    return [*lines, *([""] if notes else []), *(f"{at}. {text}" for text, at in notes.items())]


def _shown(found: dict[str, Counts] | None, what: str) -> str:
    if found is None:
        return "unknown"
    counts = found[what]
    recompiled = "unknown" if counts.recompiled is None else counts.recompiled
    return f"{counts.graphs} / {counts.breaks} / {recompiled}"
