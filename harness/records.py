"""The records of a run and of a comparison: their types, and nothing else.

Everything a report says is computed from these. The JSON Schemas in
`harness/schemas/` are generated from the types, so that another tool's records
can be checked and reported as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

SCHEMA_VERSION = 1

T = TypeVar("T")

Verdict = Literal["pass", "rejected", "fail", "invalid", "unknown", "not_run"]

EventName = Literal[
    "launch",  # supervisor: the ranks are about to be started
    "process",  # a rank's interpreter reached the worker, before any import of torch
    "imported",  # the rank's imports are done
    "connected",  # process groups exist
    "built",  # model, optimizer and data exist
    "restored",  # a checkpoint was loaded; update = C
    "begin",  # update `update` begins
    "commit",  # update `update` is committed
    "checkpoint_begin",  # the state of update `update` is about to be saved; mode
    "checkpoint",  # training goes on; seconds it waited, of which `waited` for the save before
    "checkpoint_complete",  # it can be restored; bytes, seconds since it began
    "checkpoint_failed",  # it never will be, and training went on; reason
    "fault",  # a planned fault fired on this rank
    "failure",  # a collective failed; error
    "notice",  # this rank has the notice of the failure
    "logged",  # the loss was averaged over the replicas; loss
    "recover",  # Strategy.recover is called
    "phase",  # a named phase of recovery took `ms`
    "references",  # cached references to the retired group: rebound, left
    "recovered",  # Strategy.recover returned; outcome
    "healed",  # a peer's state was loaded; update, bytes; reason: what of it no peer had
    "discard",  # an update was executed and thrown away
    "reject",  # recovery was refused; reason
    "floor",  # the bare cost of a repair, measured on this rank; ms
    "finish",  # the target frontier is reached and the results are written
    "closed",  # torn down
    "end",  # supervisor: the launcher ended; code
]


class Event(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `events.jsonl`."""

    t: float
    """Seconds on the machine's monotonic clock, one clock for all ranks."""
    event: EventName
    rank: int | None = None
    """None for the supervisor."""
    attempt: int = 0
    update: int | None = None
    tokens: int | None = None
    """Tokens that this rank contributed to the committed update."""
    samples: list[int] | None = None
    """Places in the data order of every sample this rank consumed in the update."""
    cursor: int | None = None
    """Samples this rank has consumed since the beginning of the committed history."""
    loss: float | None = None
    phase: str | None = None
    ms: float | None = None
    role: Literal["absent", "waiting", "killed"] | None = None
    error: str | None = None
    outcome: str | None = None
    reason: str | None = None
    generation: int | None = None
    rebound: int | None = None
    left: int | None = None
    holders: list[str] | None = None
    """Names of what held the retired group: those rebound, or those left stale."""
    code: int | None = None
    mode: str | None = None
    """How a checkpoint is saved."""
    seconds: float | None = None
    waited: float | None = None
    bytes: int | None = None


class Digests(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `digests.jsonl`: the state of a rank at a committed update."""

    update: int
    rank: int
    attempt: int
    root: str
    tensors: dict[str, str] | None = None
    """Kept at the last frontier, and wherever the root differs from the reference's."""


class Resources(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `resources.jsonl`: what a rank's process holds."""

    t: float
    rank: int
    attempt: int
    at: Literal["before", "after"]
    """After the first committed update, and after the last."""
    threads: int
    descriptors: int
    rss_bytes: int
    groups: int
    """Process groups registered with torch.distributed."""
    device_bytes: int | None = None


class Drift(msgspec.Struct, kw_only=True):
    """How far a run's final state is from its reference, worst rank."""

    level: Literal["bitwise", "differs", "not_compared"]
    equal: bool | None
    ranks_equal: int = 0
    ranks: int = 0
    max_abs: float | None = None
    l2: float | None = None
    first_update: int | None = None
    """First committed update at which a root differs."""
    tensors: list[str] = msgspec.field(default_factory=list)
    """Tensors that differ at the last common frontier (at most 20 named)."""


class Ledger(msgspec.Struct, kw_only=True):
    """Places in the data order against the committed history."""

    missing: int
    duplicated: int


class References(msgspec.Struct, kw_only=True):
    """Cached references to the retired group on one rank."""

    rank: int
    rebound: int
    left: int
    holders: list[str]


class FaultRecord(msgspec.Struct, kw_only=True):
    """A planned fault and the evidence that it fired."""

    run: str
    planned: str
    fired: bool
    evidence: str


class RunSummary(msgspec.Struct, kw_only=True):
    """One run, measured. Times are seconds, None where they do not apply."""

    name: str
    """Folder under `runs/`."""
    strategy: str
    variant: str
    block: int
    order: int
    faulted: bool
    control: bool
    """The second of the two reference runs."""
    verdict: Verdict
    expected: str
    reason: str
    division: str
    """Runs are compared only within a division: workload, mesh, wrapper, device."""
    committed_updates: int
    replayed_updates: int
    discarded_updates: int
    wall_s: float | None = None
    """Launch until the slowest rank has reached the target frontier and written its results."""
    teardown_s: float | None = None
    """From there until every process has ended."""
    update_s: float | None = None
    """Median time of an update that was neither hit by the fault nor first after a start."""
    goodput_tokens_s: float | None = None
    goodput_samples_s: float | msgspec.UnsetType = msgspec.UNSET
    """In place of tokens, where the workload has none."""
    runtime_goodput: float | None = None
    shares: dict[str, float] = msgspec.field(default_factory=dict)
    detection_s: float | None = None
    fault_to_resume_s: float | None = None
    fault_to_next_update_s: float | None = None
    fault_to_frontier_s: float | None = None
    phases_ms: dict[str, float] = msgspec.field(default_factory=dict)
    repair_ms: float | None = None
    """Guard to release, slowest rank."""
    floor_ms: float | None = None
    """Bare cost of the same repair, slowest rank, same run."""
    references_rebound: int | None = None
    references_left: int | None = None
    references: list[References] = msgspec.field(default_factory=list)
    drift: Drift
    data_ledger: Ledger
    resources: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """`before` and `after`: largest value over the ranks."""
    curve: list[tuple[float, int]] = msgspec.field(default_factory=list)
    """(seconds since launch, committed tokens, or samples, of all ranks), at every commit."""
    fault_s: float | None = None
    """Seconds from launch to the fault."""


class Ratio(msgspec.Struct, kw_only=True):
    """A paired ratio: one value per block, numerator over denominator."""

    metric: str
    numerator: str
    denominator: str
    n: int
    median: float
    low: float
    high: float
    method: str
    """`order-statistic 95 %` (coverage at least 95 %) or `range`."""
    values: list[float]


class Overhead(msgspec.Struct, kw_only=True):
    """Fault-free update time of a contender over the reference's, paired by block."""

    strategy: str
    n: int
    ratio: float
    low: float
    high: float
    method: str
    values: list[float]


class Tried(msgspec.Struct, kw_only=True):
    """A variant that was tried, and what it gave."""

    variant: str
    options: dict[str, Any]
    n: int
    recovery_s: float | None
    """Median of fault_to_resume_s - detection_s."""
    update_s: float | None
    verdicts: list[str]
    source: str
    """Where the figure was measured: torch version and processor."""


class Contender(msgspec.Struct, kw_only=True):
    """What a report says about a contender as such."""

    name: str
    summary: str
    available: bool
    reason: str
    version: str
    variant: str
    settings: dict[str, Any]
    integration_lines: int | None
    """Lines the contender needs in a training script, counted by code."""
    tried: list[Tried]


class Summary(msgspec.Struct, kw_only=True):
    """`summary.json`."""

    schema_version: int
    title: str
    spec: dict[str, Any]
    environment: dict[str, Any]
    contenders: list[Contender]
    runs: list[RunSummary]
    overhead: list[Overhead]
    ratios: list[Ratio]
    faults: list[FaultRecord]
    limits: list[str]
    """What these records cannot say, written by code."""


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, in one step."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(text + b"\n")
    scratch.replace(path)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Read a JSON-lines file; a torn last line (a killed writer) is left out.

    Raises:
        ValueError: a line that is not the last one is not a `kind`; the file
            and the line are named.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    decoder = msgspec.json.Decoder(kind)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path.parent.name}/{path.name}, line {number}: "
                f"expected a {kind.__name__} record; {error}"
            ) from None
    return records
