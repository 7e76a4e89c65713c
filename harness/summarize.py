"""Records in a folder -> `Summary`. A pure function of the records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from harness import drift, metrics, stats, verdicts
from harness.layout import COMPARISON, DRIFT, ENVIRONMENT, RUNS
from harness.records import (
    SCHEMA_VERSION,
    Contender,
    Digests,
    Drift,
    Event,
    FaultRecord,
    Ledger,
    Resources,
    RunSummary,
    Summary,
    read_lines,
)
from harness.spec import FAULT_KINDS, RunSpec, SpecError
from harness.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path


class _Comparison(msgspec.Struct):
    title: str
    spec: dict[str, Any]
    contenders: list[Contender]
    complete: bool


class _Run:
    """The records of one run."""

    def __init__(self, folder: Path) -> None:
        self.spec = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunSpec)
        self.size = self.spec.spec.mesh.world_size
        self.timeline = Timeline(read_lines(folder / "events.jsonl", Event), world_size=self.size)
        self.digests = read_lines(folder / "digests.jsonl", Digests)
        self.resources = read_lines(folder / "resources.jsonl", Resources)
        self.numbers: tuple[float, float] | None = None
        path = folder / DRIFT
        if path.exists():
            found = msgspec.json.decode(path.read_bytes()).get("numbers")
            self.numbers = (found[0], found[1]) if found else None

    def drift_from(self, reference: _Run | None) -> Drift:
        if reference is None:
            return Drift(level="not_compared", equal=None, ranks=self.size)
        return drift.compare(
            self.digests,
            reference.digests,
            frontier=self.spec.spec.schedule.updates,
            world_size=self.size,
            numbers=self.numbers,
        )


class _Block:
    """The runs of one block; the two references say what the others are held to."""

    def __init__(self, runs: list[_Run]) -> None:
        self.runs = runs
        references = [run for run in runs if run.spec.strategy == "reference"]
        self.reference = next((run for run in references if not run.spec.control), None)
        self.control = next((run for run in references if run.spec.control), None)

    def drift(self, run: _Run) -> Drift:
        other = self.control if run is self.reference else self.reference
        return run.drift_from(other)

    def deterministic(self) -> bool | None:
        return self.reference.drift_from(self.control).equal if self.reference else None


def summarize(folder: Path) -> Summary:
    """Measure and judge every run in `folder`.

    Raises:
        SpecError: the folder has no `comparison.json`, or a record is damaged.
    """
    try:
        comparison = msgspec.json.decode((folder / COMPARISON).read_bytes(), type=_Comparison)
        environment = msgspec.json.decode((folder / ENVIRONMENT).read_bytes())
        runs = [_Run(path.parent) for path in sorted((folder / RUNS).glob("*/run.json"))]
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise SpecError(f"folder: expected the records of a comparison; {error}") from None
    blocks = [
        _Block([run for run in runs if run.spec.block == number])
        for number in sorted({run.spec.block for run in runs})
    ]
    faults: list[FaultRecord] = []
    measured = [_measure(run, block, faults) for block in blocks for run in block.runs]
    measured += [_not_run(each, comparison) for each in comparison.contenders if not each.available]
    measured.sort(key=lambda run: (run.block, run.order))
    return Summary(
        schema_version=SCHEMA_VERSION,
        title=comparison.title,
        spec=comparison.spec,
        environment=environment,
        contenders=comparison.contenders,
        runs=measured,
        overhead=stats.overheads(measured),
        ratios=stats.ratios(measured),
        faults=faults,
        limits=_limits(comparison, measured),
    )


def _measure(run: _Run, block: _Block, faults: list[FaultRecord]) -> RunSummary:
    timeline, spec = run.timeline, run.spec
    planned = spec.spec.schedule.faults if spec.faulted else ()
    fired = [verdicts.evidence(timeline, fault, run=spec.name) for fault in planned]
    faults += fired
    found, ledger = block.drift(run), metrics.data_ledger(timeline)
    judgement = verdicts.judge(
        spec,
        timeline,
        drift=found,
        ledger=ledger,
        faults=fired,
        reference_deterministic=block.deterministic(),
    )
    held = metrics.references(timeline)
    return RunSummary(
        **_identity(spec),
        verdict=judgement.verdict,
        reason=judgement.reason,
        committed_updates=timeline.committed,
        replayed_updates=metrics.replayed_updates(timeline),
        discarded_updates=len(timeline.select("discard", rank=0)),
        **_times(timeline, reached=timeline.committed == spec.spec.schedule.updates),
        phases_ms=metrics.phases_ms(timeline),
        repair_ms=metrics.repair_ms(timeline),
        floor_ms=metrics.floor_ms(timeline),
        references_rebound=max((each.rebound for each in held), default=None),
        references_left=max((each.left for each in held), default=None),
        references=held,
        drift=found,
        data_ledger=ledger,
        resources=metrics.resources(run.resources),
        curve=metrics.curve(timeline),
    )


def _identity(spec: RunSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "strategy": spec.strategy,
        "variant": spec.variant,
        "block": spec.block,
        "order": spec.order,
        "faulted": spec.faulted,
        "control": spec.control,
        "expected": spec.expected,
        "division": spec.division,
    }


def _times(timeline: Timeline, *, reached: bool) -> dict[str, Any]:
    """Everything in seconds, and the shares; whole-run figures only of runs that got there."""
    shares = metrics.shares(timeline)
    times: dict[str, Any] = {
        "update_s": metrics.update_seconds(timeline),
        "shares": shares,
        "runtime_goodput": shares.get("productive") if reached else None,
    }
    if timeline.launch is not None and timeline.finish is not None and reached:
        times["wall_s"] = timeline.finish - timeline.launch
        if timeline.end is not None:
            times["teardown_s"] = timeline.end - timeline.finish
        unit = "tokens" if metrics.counts_tokens(timeline) else "samples"
        times[f"goodput_{unit}_s"] = metrics.committed(timeline) / times["wall_s"]
    if timeline.fault is None or timeline.launch is None:
        return times
    start = timeline.fault.t
    following = timeline.select("commit", update=(timeline.fault.update or 0) + 1)
    last = timeline.select("commit", update=timeline.committed) if reached else []
    moments = {
        "detection_s": timeline.last_notice,
        "fault_to_resume_s": timeline.resumed(),
        "fault_to_next_update_s": timeline.slowest(following),
        "fault_to_frontier_s": timeline.slowest(last),
    }
    times |= {name: t - start if t is not None else None for name, t in moments.items()}
    times["fault_s"] = start - timeline.launch
    return times


def _not_run(contender: Contender, comparison: _Comparison) -> RunSummary:
    spec = comparison.spec
    return RunSummary(
        name=f"0-{contender.name}",
        strategy=contender.name,
        variant=contender.variant,
        block=0,
        order=10_000,
        faulted=True,
        control=False,
        verdict="not_run",
        expected="pass",
        reason=contender.reason,
        division=f"{spec.get('workload')}/{spec.get('wrapper')}",
        committed_updates=0,
        replayed_updates=0,
        discarded_updates=0,
        drift=Drift(level="not_compared", equal=None),
        data_ledger=Ledger(missing=0, duplicated=0),
    )


def _limits(comparison: _Comparison, runs: list[RunSummary]) -> list[str]:
    """What these records cannot say."""
    spec = comparison.spec
    blocks = len({run.block for run in runs if run.verdict != "not_run"})
    found = []
    if not comparison.complete:
        found.append("The comparison was interrupted: planned runs are missing.")
    if blocks < 6:
        found.append(
            f"{blocks} block{'s' if blocks != 1 else ''}: below 6 pairs no interval of the median "
            "reaches 95 %, so ranges are given."
        )
    if spec.get("device") == "cpu":
        found.append(
            "CPU and Gloo: nothing here was measured on a GPU or with NCCL, whose abort and "
            "rebuild cost hundreds of milliseconds in the paper (Table V)."
        )
    found.append("One machine: all ranks share its processor and its clock.")
    found += [f"{each.name} was not run: {each.reason}." for each in comparison.contenders
              if not each.available]  # fmt: skip
    silent = sorted({run.name for run in runs if run.verdict in ("invalid", "unknown")})
    if silent:
        found.append(
            f"No conclusion rests on runs that are invalid or unknown: {', '.join(silent)}."
        )
    found.append(_untried(spec))
    return found


def _untried(spec: dict[str, Any]) -> str:
    """Say which faults were planned, and which of those there are were not."""
    faults = spec.get("schedule", {}).get("faults", [])
    planned = [f"{each['kind']}@{each['phase']}" for each in faults]
    known = [f"{kind}@{phase}" for kind, phases in FAULT_KINDS.items() for phase in phases]
    others = [each for each in known if each not in planned]
    return (
        f"Faults tried: {', '.join(dict.fromkeys(planned)) or 'none'}. Not tried: "
        f"{', '.join([*others, 'faults that last', 'faults of a network'])}."
    )
