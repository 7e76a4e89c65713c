"""What checkpoints cost in each mode: one run that takes the modes in turn (the paper's Table I).

After every update a checkpoint is saved, several in a row in one mode before the next one's turn.
What a save costs is the time from its beginning to the next one's, which holds its copy, the next
update, beside which it is written, and what the next save must wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
from typing import TYPE_CHECKING

import msgspec

from harness import compare, environment, plan, supervisor
from harness.launching import torchrun
from harness.layout import CHECKSUMS, ENVIRONMENT, STATE
from harness.records import SCHEMA_VERSION, Event, read_lines, write_json
from harness.redact import redact
from harness.report import paper
from harness.spec import CHECKPOINT_MODES, NO_CHECKPOINT, RunSpec, Saving, Schedule, SpecError
from harness.stats import Interval, interval
from harness.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.launching import Launch
    from harness.progress import Progress
    from harness.spec import Spec
    from strategies import Platform

TABLE, COSTS, MEMORY, RUN = "checkpoints.md", "checkpoints.json", "memory.json", "run"
MODES = (NO_CHECKPOINT, *(mode for mode in CHECKPOINT_MODES if mode != NO_CHECKPOINT))


class RunFailed(RuntimeError):
    """The run did not reach its end; says where its output is."""


class Memory(msgspec.Struct, kw_only=True):
    """What all processes of the run held at one save, uploading ones included."""

    update: int
    pss_bytes: int


class Cost(msgspec.Struct, kw_only=True):
    """One save, of the rank that it took longest on."""

    update: int
    round: int
    mode: str
    step_s: float
    """From here to the next save, without what this one waited for the one before."""
    update_s: float
    """The update in between, beside which this checkpoint was written."""
    stood_s: float
    """How long training stood still for the save itself."""
    waited_s: float
    """How long the next save had to wait until this one was written."""
    complete_s: float | None = None
    """Until it could be restored; None where there is none, or it failed."""
    bytes: int | None = None


class Row(msgspec.Struct, kw_only=True):
    """One mode: medians over its saves, and ratios paired by round."""

    mode: str
    n: int
    failed: int
    step_s: float
    stood_s: float
    waited_s: float
    update_s: float
    complete_s: float | None
    bytes: float | None
    pss_bytes: float | None
    step_ratio: Interval
    """Its steps over those without a save of the same round."""
    update_ratio: Interval


class Costs(msgspec.Struct, kw_only=True):
    """`checkpoints.json`."""

    schema_version: int
    conditions: str
    rows: list[Row]


def planned(base: Spec, *, rounds: int, saves: int, backend: str) -> RunSpec:
    """Plan the one run: `rounds` rounds of `saves` saves per mode, after one that is not counted.

    Raises:
        SpecError: a number is below 1.
    """
    for field, value in (("rounds", rounds), ("saves", saves)):
        if value < 1:
            raise SpecError(f"{field}: expected at least 1; found {value}")
    updates = (rounds + 1) * len(MODES) * saves + 1
    spec = dataclasses.replace(
        base,
        schedule=Schedule(updates=updates, checkpoint_at=1, faults=()),
        saving=Saving(modes=MODES, every=1, in_turn=saves),
    )
    return plan.reference_run(spec, backend=backend)


def run(
    run: RunSpec, *, platform: Platform, folder: Path, progress: Progress, launch: Launch = torchrun
) -> Costs:
    """Run it into `folder`, which is new or empty, and write the table.

    Raises:
        RunFailed: the run did not reach its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = environment.describe(device=platform.device, backend=platform.backend)
    write_json(folder / ENVIRONMENT, described)
    memory: list[Memory] = []
    with progress.over(1), progress.run(run) as watch:

        def look(event: Event) -> None:
            watch.event(event)
            if event.event == "checkpoint" and event.rank == 0 and _last_in_turn(run, event.update):
                memory.append(Memory(update=event.update or 0, pss_bytes=_pss()))

        status = supervisor.execute(run, folder / RUN, on_event=look, launch=launch)
        watch.ended(status)
    write_json(folder / MEMORY, memory)
    redact(folder)
    if status != 0:
        how = "stood still and was ended" if status is None else f"ended with status {status}"
        raise RunFailed(f"the run {how}; what its ranks said is in {folder / RUN}")
    _compact(folder / RUN)
    return finish(folder)


def _compact(own: Path) -> None:
    """Keep what the table rests on: no tensors, no digests, no logs of a run that went well."""
    shutil.rmtree(own / STATE, ignore_errors=True)
    for path in (*own.glob("*.log"), own / "digests.jsonl", own / "resources.jsonl"):
        path.unlink(missing_ok=True)


def _last_in_turn(run: RunSpec, update: int | None) -> bool:
    return update is not None and update % run.spec.saving.in_turn == 0


def _pss() -> int:
    """Proportional set size of all descendants: memory that several share counts once."""
    import psutil

    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended in the meantime
            total += child.memory_full_info().pss
    return total


def costs(timeline: Timeline, saving: Saving) -> list[Cost]:
    """What each save cost, the last one left out, which no other follows."""
    last = max((event.update or 0 for event in timeline.select("checkpoint")), default=0)
    return [_cost(timeline, saving, update) for update in range(1, last)]


def _cost(timeline: Timeline, saving: Saving, update: int) -> Cost:
    found = []
    for rank in range(timeline.world_size):
        own, after = (_saved(timeline, each, rank) for each in (update, update + 1))
        begin, commit = (
            timeline.select(name, update=update + 1, rank=rank)[0].t for name in ("begin", "commit")
        )
        found.append(
            {
                "step_s": (after.begin + after.waited) - (own.begin + own.waited),
                "update_s": commit - begin,
                "stood_s": own.seconds - own.waited,
                "waited_s": after.waited,
            }
        )
    slowest = {name: max(each[name] for each in found) for name in found[0]}
    mode = saving.mode_after(update, first=1)
    complete = timeline.select("checkpoint_complete", update=update)
    return Cost(
        update=update,
        round=(update - 1) // (saving.in_turn * len(saving.modes)),
        mode=mode or NO_CHECKPOINT,
        complete_s=complete[0].seconds if complete else None,
        bytes=complete[0].bytes if complete else None,
        **slowest,
    )


@dataclasses.dataclass(frozen=True)
class _Saved:
    begin: float
    seconds: float
    waited: float


def _saved(timeline: Timeline, update: int, rank: int) -> _Saved:
    begin = timeline.select("checkpoint_begin", update=update, rank=rank)[0]
    done = timeline.select("checkpoint", update=update, rank=rank)[0]
    return _Saved(begin.t, done.seconds or 0.0, done.waited or 0.0)


def rows(found: Sequence[Cost], memory: Sequence[Memory], modes: Sequence[str]) -> list[Row]:
    """Summarize the saves by mode; the first round, which pays for what comes first, is left out.

    Raises:
        SpecError: a mode has no save in a round.
    """
    rounds = sorted({each.round for each in found if each.round > 0})
    # The last save of all has no cost; its round is as long as the others all the same.
    by_place: dict[tuple[str, int], list[Cost]] = {}
    for each in found:
        by_place.setdefault((each.mode, each.round), []).append(each)
    if not rounds or any((mode, number) not in by_place for mode in modes for number in rounds):
        raise SpecError("run: expected a save of every mode in every round; found fewer")
    return [_row(mode, by_place, memory, rounds) for mode in modes]


def _row(
    mode: str,
    by_place: dict[tuple[str, int], list[Cost]],
    memory: Sequence[Memory],
    rounds: Sequence[int],
) -> Row:
    own = [each for number in rounds for each in by_place[mode, number]]

    def median(name: str) -> float | None:
        values = [getattr(each, name) for each in own if getattr(each, name) is not None]
        return statistics.median(values) if values else None

    def ratio(name: str) -> Interval:
        pairs = [
            statistics.median(getattr(each, name) for each in by_place[mode, number])
            / statistics.median(getattr(each, name) for each in by_place[NO_CHECKPOINT, number])
            for number in rounds
        ]
        return interval(pairs)

    updates = {each.update for each in own}
    held = [each.pss_bytes for each in memory if each.update in updates]
    return Row(
        mode=mode,
        n=len(own),
        failed=sum(1 for each in own if each.complete_s is None) if mode != NO_CHECKPOINT else 0,
        step_s=median("step_s") or 0.0,
        stood_s=median("stood_s") or 0.0,
        waited_s=median("waited_s") or 0.0,
        update_s=median("update_s") or 0.0,
        complete_s=median("complete_s"),
        bytes=median("bytes"),
        pss_bytes=statistics.median(held) if held else None,
        step_ratio=ratio("step_s"),
        update_ratio=ratio("update_s"),
    )


def is_costs(folder: Path) -> bool:
    """Whether `folder` holds the costs of checkpoints."""
    return (folder / COSTS).is_file()


def finish(folder: Path) -> Costs:
    """Write table and checksums from the records in `folder`."""
    for name, content in build(folder).items():
        (folder / name).write_bytes(content)
    return msgspec.json.decode((folder / COSTS).read_bytes(), type=Costs)


def check(folder: Path) -> list[str]:
    """Names of what differs from what the records give; empty if nothing does."""
    return [
        name
        for name, content in build(folder).items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    ]


def build(folder: Path) -> dict[str, bytes]:
    """Return file name -> content: a pure function of the records.

    Raises:
        SpecError: the records are damaged or incomplete.
    """
    try:
        ran = msgspec.json.decode((folder / RUN / "run.json").read_bytes(), type=RunSpec)
        described = msgspec.json.decode((folder / ENVIRONMENT).read_bytes())
        memory = msgspec.json.decode((folder / MEMORY).read_bytes(), type=list[Memory])
        timeline = Timeline(
            read_lines(folder / RUN / "events.jsonl", Event), world_size=ran.spec.mesh.world_size
        )
        saves = costs(timeline, ran.spec.saving)
    except (OSError, msgspec.DecodeError, ValueError, IndexError) as error:
        raise SpecError(
            f"folder: expected the records of a run with checkpoints; {error}"
        ) from None
    found = Costs(
        schema_version=SCHEMA_VERSION,
        conditions=_conditions(ran, described),
        rows=rows(saves, memory, ran.spec.saving.modes),
    )
    own = (TABLE, COSTS, CHECKSUMS)
    records = [path for path in folder.rglob("*") if path.is_file() and path.name not in own]
    return {
        COSTS: msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n",
        TABLE: render(found).encode(),
        CHECKSUMS: compare.checksums_of(records, folder).encode(),
    }


def _conditions(ran: RunSpec, described: dict[str, object]) -> str:
    packages = described.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    load = described.get("load_before")
    busy = f", load {load[0]:.1f} before the run" if isinstance(load, list) and load else ""
    saving = ran.spec.saving
    return (
        f"{ran.division}; torch {torch}; {described.get('processor')}, "
        f"{described.get('cores')} cores{busy}; a save after every update, {saving.in_turn} in one "
        "mode before the next mode's turn; the first round is not counted"
    )


def render(found: Costs) -> str:
    """Write the table as Markdown, the paper's beside it."""
    lines = [
        "# What a checkpoint costs, by the mode in which it is saved",
        "",
        f"One run: {found.conditions}.",
        "",
        (
            "| mode | saves | step s | steps / without | updates / without | stood still s | "
            "next save waited s | complete after s | MiB | written TB/h | PSS GiB | failed |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in found.rows),
        "",
        (
            "Step: from one save to the next. Ratios are paired by round (median, with "
            f"{found.rows[0].step_ratio.method} over {found.rows[0].step_ratio.n} rounds). "
            "Updates: begin to commit of the update beside which the checkpoint was written. "
            "Stood still: what training waited for the save itself. Buffers and uploading process "
            "serve one save at a time, so the next one waits until the one before is written. "
            "PSS: all processes of the run at the last save of a turn; those that upload live "
            "through the run and are in every line. "
            "Modes: " + "; ".join(f"`{name}`: {CHECKPOINT_MODES[name]}" for name in MODES) + "."
        ),
        "",
        f"## The paper's ({paper.SOURCE}, {paper.CHECKPOINTS_PLACE})",
        "",
        f"Another machine and model: {paper.CHECKPOINTS}.",
        "",
        "| mode | step s | overhead % | fwd/bwd % | host PSS GiB | written TB/h |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in paper.CHECKPOINT_MODES),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    rate = row.bytes / row.step_s * 3600 / 1e12 if row.bytes and row.step_s else None
    cells = [
        row.mode,
        str(row.n),
        f"{row.step_s:.3f}",
        _ratio(row.step_ratio),
        _ratio(row.update_ratio),
        f"{row.stood_s:.3f}",
        f"{row.waited_s:.3f}",
        _shown(row.complete_s, 1, ".3f"),
        _shown(row.bytes, 2**20, ".1f"),
        _shown(rate, 1, ".4f"),
        _shown(row.pss_bytes, 2**30, ".2f"),
        str(row.failed),
    ]
    return "| " + " | ".join(cells) + " |"


def _ratio(found: Interval) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _shown(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)
