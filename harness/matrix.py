"""The verdict matrix: every contender, under every wrapper, struck in every phase of an update.

A folder `torch-VERSION/WRAPPER` holds the records of one wrapper under one torch; `matrix.md` and
`matrix.json` are made of all that lie side by side. Ranks are forks, so only verdicts count.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec

from harness import compare, compiling, drift, plan, summarize
from harness.launching import Forks
from harness.layout import CHECKSUMS, COMPARISON, RUNS
from harness.records import SCHEMA_VERSION, Digests, Verdict, read_lines, write_json
from harness.spec import WRAPPERS, Fault, Mesh, Schedule, SpecError, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.plan import Entry
    from harness.progress import Progress
    from harness.records import RunSummary, Summary
    from harness.spec import Spec
    from strategies import Platform

MATRIX, CELLS, TOOK = "matrix.md", "matrix.json", "seconds.json"
USUAL = "tiny"
"""The workload of a matrix that names none."""
UPDATES, CHECKPOINT_AT, FRONTIER = 5, 2, 3
STRIKES = ("absent@boundary", "absent@forward", "absent@backward", "kill@boundary", "kill@backward")


class Cell(msgspec.Struct, kw_only=True):
    """One verdict, and what it rests on."""

    torch: str
    wrapper: str
    strike: str
    """KIND@PHASE."""
    strategy: str
    verdict: Verdict
    expected: str | None
    """None where nothing ran."""
    reason: str
    evidence: str
    """That the fault fired."""
    replayed_updates: int = 0
    discarded_updates: int = 0
    ranks_equal: int = 0
    ranks: int = 0


class Matrix(msgspec.Struct, kw_only=True):
    """`matrix.json`."""

    schema_version: int
    workload: str | msgspec.UnsetType = msgspec.UNSET
    """What was trained, where it is not the usual one."""
    seconds: dict[str, float]
    """What each wrapper took, by folder."""
    cells: list[Cell]


def faults(strikes: Sequence[str]) -> list[Fault]:
    """Make the faults, all of which strike after update `FRONTIER` and before the next commit.

    Raises:
        SpecError: a kind or a phase is unknown, or one is named twice.
    """
    if len(set(strikes)) != len(strikes):
        raise SpecError(f"faults: expected each once; found {', '.join(strikes)}")
    found = []
    for strike in strikes:
        fault = Fault.parse(f"{strike}:{FRONTIER}")
        found.append(dataclasses.replace(fault, update=FRONTIER + 1) if fault.inside else fault)
    return found


def run(
    base: Spec,
    entries: Sequence[Entry],
    *,
    wrappers: Sequence[str],
    strikes: Sequence[str],
    platform: Platform,
    folder: Path,
    progress: Progress,
    check: Callable[[Spec], Spec],
) -> Matrix:
    """Run what is asked for, one wrapper after the other, and write the matrix of `folder`.

    Before the first run every wrapper's specification goes through `check`.

    Raises:
        SpecError: a wrapper is unknown, or has its records there already for this torch.
    """
    planned = faults(strikes)
    _check_workload(folder, base)
    version = _torch_version()
    places = {
        choose("wrappers", name, WRAPPERS): folder / f"torch-{version}" / name for name in wrappers
    }
    for place in places.values():
        if place.exists():
            raise SpecError(f"out: expected no {place.parent.name}/{place.name} yet; found {place}")
    # A fault inside an update, if any: it asks more of a workload of the user's own.
    hardest = max(planned, key=lambda fault: fault.inside)
    schedule = Schedule(updates=UPDATES, checkpoint_at=CHECKPOINT_AT, faults=(hardest,))
    specs = [
        check(
            dataclasses.replace(
                base, wrapper=name, mesh=Mesh.parse(WRAPPERS[name]), schedule=schedule
            )
        )
        for name in places
    ]
    with Forks() as forks:
        for spec, place in zip(specs, places.values(), strict=True):
            _run_wrapper(spec, entries, planned, platform, place, progress, forks)
    return finish(folder)


def _run_wrapper(  # noqa: PLR0917  private, and called once
    spec: Spec,
    entries: Sequence[Entry],
    planned: Sequence[Fault],
    platform: Platform,
    folder: Path,
    progress: Progress,
    forks: Forks,
) -> None:
    began = time.monotonic()
    able, unable = plan.availability(entries, platform)
    folder.mkdir(parents=True)
    title = f"Verdicts on {spec.workload}, {spec.wrapper} {spec.mesh}"
    described = compare.describe(spec, able, unable, platform=platform, title=title)
    described.spec["strikes"] = [str(fault) for fault in planned]
    runs = plan.matrix_runs(spec, able, planned, backend=platform.backend)
    compare.record(
        described, [runs], platform=platform, folder=folder, progress=progress, launch=forks
    )
    _compact(folder)
    write_json(folder / TOOK, round(time.monotonic() - began, 1))


def _compact(folder: Path) -> None:
    """Keep what verdicts rest on: no logs of runs that went well, no digests that say the same."""
    reference = folder / RUNS / "0-reference"
    roots = drift.final(read_lines(reference / "digests.jsonl", Digests))
    for found in summarize.summarize(folder).runs:
        own = folder / RUNS / found.name
        if found.verdict == "not_run":
            continue
        if found.verdict in ("pass", "rejected"):
            for log in own.glob("*.log"):
                log.unlink()
        (own / "resources.jsonl").unlink(missing_ok=True)
        kept = read_lines(own / "digests.jsonl", Digests)
        for record in kept:
            other = roots.get((record.rank, record.update))
            if other is not None and other.root == record.root:
                record.tensors = None
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in kept)
        (own / "digests.jsonl").write_bytes(lines)


def finish(folder: Path) -> Matrix:
    """Write matrix and checksums from the records in `folder`."""
    for name, content in build(folder).items():
        (folder / name).write_bytes(content)
    return msgspec.json.decode((folder / CELLS).read_bytes(), type=Matrix)


def check(folder: Path) -> list[str]:
    """Names of what differs from what the records give; empty if nothing does."""
    return [
        name
        for name, content in build(folder).items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    ]


def is_matrix(folder: Path) -> bool:
    """Whether `folder` holds a matrix, and not a comparison."""
    return (folder / CELLS).is_file()


def build(folder: Path) -> dict[str, bytes]:
    """Return file name -> content: a pure function of the records."""
    places = sorted(path.parent for path in folder.glob(f"torch-*/*/{COMPARISON}"))
    cells: list[Cell] = []
    seconds = {}
    workloads: dict[str, None] = {}
    summaries = {place: summarize.summarize(place) for place in places}
    for place, summary in summaries.items():
        workloads[_workload(summary.spec)] = None
        cells += _cells(summary, torch=place.parent.name.removeprefix("torch-"))
        if (place / TOOK).is_file():
            took = msgspec.json.decode((place / TOOK).read_bytes(), type=float)
            seconds[f"{place.parent.name}/{place.name}"] = took
    named = ", ".join(workloads)
    matrix = Matrix(
        schema_version=SCHEMA_VERSION,
        workload=msgspec.UNSET if named in ("", USUAL) else named,
        seconds=seconds,
        cells=cells,
    )
    text = msgspec.json.format(msgspec.json.encode(matrix), indent=1)
    own = (MATRIX, CELLS, CHECKSUMS, compiling.TABLE, compiling.COUNTS)
    records = [path for path in folder.rglob("*") if path.is_file() and path.name not in own]
    return {
        CELLS: text + b"\n",
        MATRIX: render(matrix).encode(),
        **compiling.build(summaries),
        CHECKSUMS: compare.checksums_of(records, folder).encode(),
    }


def _workload(spec: Mapping[str, Any]) -> str:
    """Name of what was trained, and of the user's own the version."""
    name, own = str(spec.get("workload", USUAL)), spec.get("own")
    return f"{name} ({own['sha256'][:12]})" if own else name


def _check_workload(folder: Path, base: Spec) -> None:
    """Refuse to put two workloads into one matrix."""
    wanted = _workload(msgspec.to_builtins(base))
    for path in folder.glob(f"torch-*/*/{COMPARISON}"):
        found = _workload(msgspec.json.decode(path.read_bytes())["spec"])
        if found != wanted:
            raise SpecError(
                f"out: expected a folder for {wanted} alone; found records of {found} in {folder}; "
                "name another"
            )


def _cells(summary: Summary, *, torch: str) -> list[Cell]:
    """One cell per contender and strike; what has no run says why."""
    found = []
    fired = {fault.run: fault for fault in summary.faults}
    runs = {run.name: run for run in summary.runs}
    for contender in summary.contenders:
        for text in summary.spec["strikes"]:
            fault = Fault.parse(text)
            name = plan.run_name(0, plan.matrix_label(contender.name, fault))
            run = runs.get(name)
            shared = {
                "torch": torch,
                "wrapper": summary.spec["wrapper"],
                "strike": f"{fault.kind}@{fault.phase}",
                "strategy": contender.name,
            }
            if run is None:
                reason = contender.reason or "the matrix was interrupted before this run"
                cell = Cell(**shared, verdict="not_run", expected=None, reason=reason, evidence="")
            else:
                cell = _cell(run, shared, fired[name].evidence)
            found.append(cell)
    return found


def _cell(run: RunSummary, shared: dict[str, str], evidence: str) -> Cell:
    return Cell(
        **shared,
        verdict=run.verdict,
        expected=run.expected,
        reason=run.reason,
        evidence=evidence,
        replayed_updates=run.replayed_updates,
        discarded_updates=run.discarded_updates,
        ranks_equal=run.drift.ranks_equal,
        ranks=run.drift.ranks,
    )


def unexpected(matrix: Matrix) -> list[Cell]:
    """Cells that ran and have another verdict than expected."""
    return [cell for cell in matrix.cells if cell.expected not in (None, cell.verdict)]


def render(matrix: Matrix) -> str:
    """Write the matrix as Markdown: one table per torch, reasons in footnotes."""
    lines = [
        "# Verdicts by contender, wrapper and phase of the fault",
        "",
        (
            f"Ranks are forks on one machine; {UPDATES} updates, a checkpoint after update "
            f"{CHECKPOINT_AT}, the fault after update {FRONTIER} or inside the next. "
            "Verdicts only: nothing here was timed. `pass`: every rank's state equals the "
            "reference's bit for bit at every update. "
            "`rejected`: refused, started again from the checkpoint, then as `pass`. "
            "`(r+d)`: r updates replayed, d discarded."
        ),
    ]
    if matrix.workload:
        lines += ["", f"The workload is {matrix.workload}."]
    for torch in dict.fromkeys(cell.torch for cell in matrix.cells):
        cells = [cell for cell in matrix.cells if cell.torch == torch]
        took = sum(
            each for name, each in matrix.seconds.items() if name.startswith(f"torch-{torch}/")
        )
        lines += ["", f"## torch {torch}", "", *_table(cells), "", f"The runs took {took:.0f} s."]
    odd = unexpected(matrix)
    lines += ["", f"Cells that are not as expected: {len(odd) or 'none'}."]
    return "\n".join(lines) + "\n"


def _table(cells: Sequence[Cell]) -> list[str]:
    columns = list(dict.fromkeys((cell.wrapper, cell.strike) for cell in cells))
    notes: dict[str, int] = {}
    by_place = {(cell.strategy, cell.wrapper, cell.strike): cell for cell in cells}
    lines = [
        "| contender | " + " | ".join(f"{wrapper} {strike}" for wrapper, strike in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        shown = [_shown(by_place.get((strategy, *column)), notes) for column in columns]
        lines.append(f"| {strategy} | " + " | ".join(shown) + " |")
    return [*lines, "", *(f"{place}. {text}" for text, place in notes.items())]


def _shown(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return f"not_run [{notes.setdefault('not asked for', len(notes) + 1)}]"
    text: str = cell.verdict
    if cell.replayed_updates or cell.discarded_updates:
        text += f" ({cell.replayed_updates}+{cell.discarded_updates})"
    if cell.expected not in (None, cell.verdict):
        text = f"**{text}**, expected {cell.expected}"
    if cell.reason:
        reason = " ".join(cell.reason.split()).replace("|", "/")
        text += f" [{notes.setdefault(reason, len(notes) + 1)}]"
    return text


def _torch_version() -> str:
    import torch

    return str(torch.__version__).partition("+")[0]
