"""What a comparison is asked to do. Every field is checked where it is made."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Collection
from typing import Any

from strategies import Layout, Timeouts

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
WRAPPERS = {"fsdp1": "2x2", "fsdp2": "2x2", "ddp": "4x1"}
"""How the model is spread over the ranks -> the mesh if none is asked for."""
LONGEST_S = 86_400.0
"""No deadline is longer than a day."""
LARGEST_SEED = 2**63 - 1
"""torch takes no larger one."""
NO_CHECKPOINT = "none"
CHECKPOINT_MODES = {
    "sync": "training waits until the checkpoint is written",
    "async-thread": "training waits for a copy, which a thread of the rank writes",
    "async-process": "training waits for a copy, which a process beside the rank writes",
    "async-cached": "as async-process, and all copies go into the same shared buffers",
    NO_CHECKPOINT: "nothing is saved",
}
FAULT_KINDS = {
    "absent": ("boundary", "forward", "backward"),
    "kill": ("boundary", "forward", "backward"),
    "error": ("step",),
}
"""Kind of fault -> phases of an update in which it can strike."""


class SpecError(ValueError):
    """A user's mistake in the configuration; one line, names the field."""


def choose(field: str, value: str, known: Collection[str]) -> str:
    """Return `value` if it is one of `known`.

    Raises:
        SpecError: it is not; the nearest known name is offered.
    """
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SpecError(f"{field}: expected one of {', '.join(sorted(known))}; found {value!r}{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Replicas x shards of the HSDP layout."""

    replicate: int = 2
    shard: int = 2

    def __post_init__(self) -> None:
        """Refuse meshes that have nothing to replicate."""
        if self.replicate < 2 or self.shard < 1:
            raise SpecError(
                f"mesh: expected at least 2 replicas and 1 shard, as in 2x2; found {self}; "
                "without a second replica no replicate group exists that could fail"
            )

    def __str__(self) -> str:
        """`RxS`."""
        return f"{self.replicate}x{self.shard}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    def layout(self, rank: int = 0) -> Layout:
        """Where `rank` stands in it."""
        return Layout(rank=rank, num_replicas=self.replicate, shard_size=self.shard)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `RxS`, for example `2x2`."""
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        if match is None:
            raise SpecError(f"mesh: expected RxS, for example 2x2; found {text!r}")
        return cls(replicate=int(match[1]), shard=int(match[2]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planned fault: what happens, in which phase, after or in which update.

    At a `boundary` it strikes after update `update`, else inside it.
    """

    kind: str
    phase: str
    update: int

    def __post_init__(self) -> None:
        """Refuse unknown kinds and phases."""
        choose("fault kind", self.kind, FAULT_KINDS)
        choose(f"fault phase of {self.kind}", self.phase, FAULT_KINDS[self.kind])

    @property
    def inside(self) -> bool:
        """Whether it strikes inside an update, and not between two."""
        return self.phase != "boundary"

    @property
    def frontier(self) -> int:
        """Last update that is committed when it strikes."""
        return self.update - 1 if self.inside else self.update

    def __str__(self) -> str:
        """`KIND@PHASE:UPDATE`."""
        return f"{self.kind}@{self.phase}:{self.update}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `KIND@PHASE:UPDATE`, for example `absent@boundary:15`."""
        match = re.fullmatch(r"([\w-]+)@([\w-]+):(\d+)", text)
        if match is None:
            raise SpecError(
                f"fault: expected KIND@PHASE:UPDATE, for example absent@boundary:15; found {text!r}"
            )
        return cls(kind=match[1], phase=match[2], update=int(match[3]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How many updates, where the checkpoint is taken, when the faults strike."""

    updates: int
    checkpoint_at: int
    faults: tuple[Fault, ...]

    def __post_init__(self) -> None:
        """Refuse schedules in which nothing could be restored or nothing follows."""
        if self.updates < 2:
            raise SpecError(f"updates: expected at least 2; found {self.updates}")
        if not 1 <= self.checkpoint_at <= self.updates:
            raise SpecError(
                f"checkpoint-at: expected an update from 1 to {self.updates}; "
                f"found {self.checkpoint_at}"
            )
        seen: set[int] = set()
        for fault in self.faults:
            self._check(fault)
            if fault.frontier in seen:
                raise SpecError(
                    f"fault: expected at most one per update; found two after {fault.frontier}"
                )
            seen.add(fault.frontier)

    def _check(self, fault: Fault) -> None:
        first, last = (2, self.updates) if fault.inside else (1, self.updates - 1)
        why = "is committed before" if fault.inside else "follows"
        if not first <= fault.update <= last:
            raise SpecError(
                f"fault: expected an update from {first} to {last}, so that one {why}; "
                f"found {fault} with --updates {self.updates}"
            )
        if fault.frontier < self.checkpoint_at:
            raise SpecError(
                f"checkpoint-at: expected at most {fault.frontier}, the last before "
                f"{fault}; found {self.checkpoint_at}; a restart would have nothing to restore"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """How checkpoints are saved, and how often."""

    modes: tuple[str, ...] = ("sync",)
    """Taken in turn."""
    every: int | None = None
    """Updates from one save to the next, from the schedule's on; None for that one alone."""
    in_turn: int = 1
    """Saves in one mode before the next mode's turn."""

    def __post_init__(self) -> None:
        """Refuse unknown modes, and numbers below 1."""
        for mode in self.modes:
            choose("checkpoint-mode", mode, CHECKPOINT_MODES)
        if not self.modes:
            raise SpecError(f"checkpoint-mode: expected one of {', '.join(CHECKPOINT_MODES)}")
        for field, value in (("checkpoint-every", self.every), ("in-turn", self.in_turn)):
            if value is not None and value < 1:
                raise SpecError(f"{field}: expected at least 1; found {value}")

    def mode_after(self, update: int, *, first: int) -> str | None:
        """The mode in which update `update` is saved if `first` is the first that is; else None."""
        past = update - first
        if past < 0 or (past > 0 if self.every is None else past % self.every):
            return None
        return self.modes[past // (self.every or 1) // self.in_turn % len(self.modes)]


PRESETS = {
    "quick": Schedule(
        updates=12,
        checkpoint_at=4,
        faults=(Fault(kind="absent", phase="boundary", update=8),),
    ),
    "paper": Schedule(
        updates=25,
        checkpoint_at=10,
        faults=(Fault(kind="absent", phase="boundary", update=15),),
    ),
}


def check_timeouts(timeouts: Timeouts) -> None:
    """Refuse deadlines that cannot nest.

    Raises:
        SpecError: unless 0 < group < soft < hard < barrier, at most a day, and group < world.
    """
    chain = [
        ("group-timeout", timeouts.group),
        ("soft-timeout", timeouts.soft),
        ("hard-timeout", timeouts.hard),
        ("barrier-timeout", timeouts.barrier),
    ]
    for name, seconds in (*chain, ("world-timeout", timeouts.world)):
        if not 0 < seconds <= LONGEST_S:  # nor NaN
            raise SpecError(
                f"{name}: expected more than 0 s and at most {LONGEST_S:g} s; found {seconds:g} s"
            )
    for (low, small), (high, large) in itertools.pairwise(chain):
        if not small < large:
            raise SpecError(
                f"{low}: expected group < soft < hard < barrier, so less than {high} "
                f"({large:g} s); found {small:g} s"
            )
    if not timeouts.group < timeouts.world:
        raise SpecError(
            f"world-timeout: expected more than group-timeout ({timeouts.group:g} s), so that "
            f"healthy ranks outlast a detection; found {timeouts.world:g} s"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """A workload of the user's: a function in a Python file."""

    path: str
    """Resolved; in published records the file's name alone."""
    function: str
    sha256: str
    """Of the file. A rank builds nothing from another."""
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What trying it once has shown (`harness.workload.preflight`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One comparison, or one run of it."""

    preset: str = "quick"
    schedule: Schedule = PRESETS["quick"]
    workload: str = "tiny"
    own: Own | None = None
    """None for one of the built-in workloads."""
    wrapper: str = "fsdp1"
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    device: str = "cpu"
    dtype: str = "float32"
    activation_checkpointing: bool = False
    seed: int = 1
    data: str | None = None
    """A text file or a folder of them; None for CPython's documentation."""
    compiled: bool = False
    """Whether every block of the model goes through `torch.compile`."""
    count_compiled: bool = False
    """Whether what the compiler does is counted after every update."""
    envelope: str | None = None
    """File that the contender accelpact asks what it may do; None: it does what it can."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    saving: Saving = dataclasses.field(default_factory=Saving)
    strategies: tuple[str, ...] = ()
    blocks: int = 1

    def __post_init__(self) -> None:
        """Check what can be checked without the workload, the data or the machine."""
        choose("device", self.device, DEVICES)
        choose("dtype", self.dtype, DTYPES)
        choose("wrapper", self.wrapper, WRAPPERS)
        if self.blocks < 1:
            raise SpecError(f"blocks: expected at least 1; found {self.blocks}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SpecError(f"seed: expected 0 to {LARGEST_SEED}; found {self.seed}")
        check_timeouts(self.timeouts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Everything a rank needs to know; `run.json` holds it."""

    name: str
    """Folder under `runs/`."""
    strategy: str
    variant: str
    block: int
    order: int
    faulted: bool
    control: bool
    """The second of the two reference runs of a block."""
    expected: str
    """The verdict that this run should get."""
    backend: str
    spec: Spec
    settings: dict[str, Any]
    """The contender's `Settings`, as recorded."""
    launcher_recovers: bool = True
    """Whether that the launcher starts all ranks again is the contender's own way to recover."""

    @property
    def division(self) -> str:
        """What two runs must share to be compared."""
        spec = self.spec
        precision = spec.dtype + ("+ac" if spec.activation_checkpointing else "")
        precision += "+compiled" if spec.compiled else ""
        place = f"{self.backend}-{spec.device}"
        workload = f"{spec.workload}@{spec.own.sha256[:12]}" if spec.own else spec.workload
        return f"{workload}/{spec.wrapper}/{spec.mesh}/{place}/{precision}"
