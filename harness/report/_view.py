"""The records of a comparison, as the sections of a report ask for them."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from harness.report._format import DASH, flatten, plural
from harness.stats import REFERENCE, ratio_between, reached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from harness.records import Contender, Overhead, Ratio, RunSummary, Summary

REPAIR = (
    "guard", "admit", "retire", "rebuild", "rebind", "validate", "release", "reconfigure",
)  # fmt: skip
"""Phases of a repair in place, in their order."""
OUTER = ("restart", "import", "connect", "build", "restore", "replay", "resume", "next update")
DETECTION = "detection"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of a table by contender: a kind of run that was repeated over blocks."""

    name: str
    kind: str
    """`faulted`, `fault-free` or, for the second reference, `control`."""
    runs: list[RunSummary]

    def ran(self) -> list[RunSummary]:
        """Those that were not left out."""
        return [run for run in self.runs if run.verdict != "not_run"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A summary with its runs sorted by block, and the environment to print."""

    summary: Summary
    environment: dict[str, Any]

    @property
    def runs(self) -> list[RunSummary]:
        """All runs, by block and order."""
        return sorted(self.summary.runs, key=lambda run: (run.division, run.block, run.order))

    @property
    def names(self) -> list[str]:
        """Contenders in the order of the records, the reference first."""
        known = [contender.name for contender in self.summary.contenders]
        names = dict.fromkeys([*known, *(run.strategy for run in self.summary.runs)])
        return sorted(names, key=lambda name: name != REFERENCE)

    @property
    def blocks(self) -> list[int]:
        """Numbers of all blocks."""
        return sorted({run.block for run in self.summary.runs})

    @property
    def unit(self) -> str:
        """What the workload gets through: tokens, or samples where it has none."""
        in_samples = any(run.goodput_samples_s for run in self.summary.runs)
        return "samples" if in_samples else "tokens"

    def contender(self, name: str) -> Contender | None:
        """What the records say about a contender as such."""
        return next((each for each in self.summary.contenders if each.name == name), None)

    def faulted(self, name: str) -> list[RunSummary]:
        """Faulted runs of a contender that were not left out."""
        return [run for run in self._of(name, faulted=True) if run.verdict != "not_run"]

    def lanes(self) -> list[Lane]:
        """Every contender's faulted and fault-free runs; the reference's two apart."""
        lanes = []
        for name in self.names:
            plain = self._of(name, faulted=False)
            kinds = {
                "faulted": self._of(name, faulted=True),
                "fault-free": [run for run in plain if not run.control],
                "control": [run for run in plain if run.control],
            }
            lanes += [Lane(name=name, kind=kind, runs=runs) for kind, runs in kinds.items() if runs]
        return lanes

    def faulted_lanes(self) -> list[Lane]:
        """The lanes a fault was planned for, without those that did not run at all."""
        return [lane for lane in self.lanes() if lane.kind == "faulted" and lane.ran()]

    def left_out(self) -> list[tuple[str, str]]:
        """Contenders or runs that were not run, with the reason."""
        rows = []
        for run in self.runs:
            if run.verdict == "not_run":
                kind = "faulted" if run.faulted else "fault-free"
                rows.append((f"{run.strategy} ({kind}, block {run.block})", run.reason))
        ran = {run.strategy for run in self.summary.runs}
        rows += [
            (each.name, each.reason or "no run in the records")
            for each in self.summary.contenders
            if each.name not in ran
        ]
        return rows

    def ratio(self, metric: str, above: str, below: str) -> Ratio | None:
        """The recorded ratio; computed from the runs where the records have none."""
        for found in self.summary.ratios:
            if (found.metric, found.numerator, found.denominator) == (metric, above, below):
                return found
        return ratio_between(self.summary.runs, metric=metric, numerator=above, denominator=below)

    def overhead(self, name: str) -> Overhead | None:
        """The recorded fault-free overhead of a contender."""
        return next((each for each in self.summary.overhead if each.strategy == name), None)

    def recovered(self) -> list[str]:
        """Contenders whose faulted runs all reached the frontier with the right state."""
        return [
            lane.name for lane in self.faulted_lanes() if all(reached(run) for run in lane.ran())
        ]

    def _of(self, name: str, *, faulted: bool) -> list[RunSummary]:
        return [run for run in self.runs if run.strategy == name and run.faulted == faulted]


def median(values: Iterable[float | None]) -> float | None:
    """Median of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def timed(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Runs whose times may be summarized: those that reached the frontier rightly."""
    return [run for run in runs if reached(run)]


def median_of(
    runs: Iterable[RunSummary], measure: Callable[[RunSummary], float | None]
) -> float | None:
    """Median of a measure over the runs that reached the frontier rightly."""
    return median(measure(run) for run in timed(runs))


def tally(values: Iterable[str]) -> str:
    """Write `pass 5, fail 1`."""
    return ", ".join(f"{value} {number}" for value, number in Counter(values).items()) or DASH


def in_seconds_to_ms(value: float | None) -> float | None:
    """Seconds as milliseconds."""
    return None if value is None else 1000 * value


def way_ms(run: RunSummary) -> dict[str, float]:
    """Named parts of the way from the fault to the next update, ms, slowest rank.

    Detection comes first, then the phases of a repair in place, then the others
    in the order of the records.
    """
    parts = dict(run.phases_ms)
    detection = in_seconds_to_ms(run.detection_s)
    if detection is not None:
        parts.setdefault(DETECTION, detection)
    return {name: parts[name] for name in phase_order(parts)}


def phase_order(names: Iterable[str]) -> list[str]:
    """Sort names of phases by their place on the way."""
    known = (DETECTION, *REPAIR, *OUTER)
    present = dict.fromkeys(names)
    return [name for name in known if name in present] + [
        name for name in present if name not in known
    ]


def median_way_ms(runs: Sequence[RunSummary]) -> dict[str, float]:
    """Median over the runs of each named part, ms."""
    ways = [way_ms(run) for run in runs]
    names = phase_order(name for way in ways for name in way)
    found = {name: median(way.get(name) for way in ways) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def unnamed_ms(runs: Sequence[RunSummary]) -> float | None:
    """Median of fault to next update less all named parts, ms; the update itself is in it."""
    return median(
        None
        if run.fault_to_next_update_s is None
        else 1000 * run.fault_to_next_update_s - sum(way_ms(run).values())
        for run in runs
    )


def mesh_text(spec: dict[str, Any]) -> str:
    """`2x2`, however the records hold the mesh."""
    mesh = spec.get("mesh")
    if isinstance(mesh, dict):
        return f"{mesh.get('replicate', DASH)}x{mesh.get('shard', DASH)}"
    return DASH if mesh is None else str(mesh)


def num_ranks(spec: dict[str, Any]) -> int | None:
    """Number of ranks of the mesh; None where the records do not say."""
    parts = mesh_text(spec).split("x")
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        return int(parts[0]) * int(parts[1])
    return None


def workload_text(view: View) -> str:
    """One line: workload, mesh, device, schedule, blocks and versions."""
    spec, schedule = view.summary.spec, view.summary.spec.get("schedule")
    parts = [f"workload {spec.get('workload', DASH)}"]
    if spec.get("wrapper"):
        parts.append(str(spec["wrapper"]))
    parts.append(f"mesh {mesh_text(spec)}")
    parts.append(f"device {spec.get('device', DASH)}")
    if isinstance(schedule, dict):
        parts.append(f"{schedule.get('updates', DASH)} updates")
        parts.append(f"checkpoint at {schedule.get('checkpoint_at', DASH)}{_saving(spec)}")
        parts += [f"fault {fault_text(each)}" for each in schedule.get("faults", [])]
    parts.append(plural(len(view.blocks), "block"))
    torch = torch_version(view.environment)
    versions = {"torch": torch} if torch else {}
    # A contender that comes with torch alone has torch's version, said once.
    versions |= {
        each.name: each.version
        for each in view.summary.contenders
        if each.version and each.version != torch
    }
    parts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return "; ".join(part for part in parts if part)


def _saving(spec: dict[str, Any]) -> str:
    """How checkpoints are saved where that is not the default, a single one and synchronous."""
    saving = spec.get("saving")
    if not isinstance(saving, dict):
        return ""
    modes = ", ".join(saving.get("modes", []))
    often = f" and every {saving['every']} updates" if saving.get("every") else ""
    return often + (f" ({modes})" if modes != "sync" else "")


def torch_version(environment: dict[str, Any]) -> str | None:
    """The version of torch, wherever in the environment it stands."""
    for name, value in flatten(environment):
        if name.rpartition(".")[2] in ("torch", "torch_version") and value != DASH:
            return value
    return None


def fault_text(fault: object) -> str:
    """`absent@boundary:15`, however the records hold the fault."""
    if isinstance(fault, dict):
        return f"{fault.get('kind')}@{fault.get('phase')}:{fault.get('update')}"
    return str(fault)
