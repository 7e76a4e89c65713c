"""What every contender answers, and the few types it speaks in.

A contender is one subclass of `Strategy`. Everything else (the training loop,
the model, the data, the faults and the measures) is shared by all of them, so
that what differs between two runs is only what this interface lets differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed import ProcessGroup, Store


class Outcome(enum.Enum):
    """What `Strategy.recover` achieved."""

    RESUMED = "resumed"
    """The rank holds its state and goes on from its own frontier."""
    FORGONE = "forgone"
    """The same, but the collective that failed is given up: nobody issues it again."""
    RERAISE = "reraise"
    """The failure must leave the training function, for whoever wraps it."""
    EXIT = "exit"
    """The process must end; the launcher decides what follows."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Whether a contender can run here, and if not, why."""

    available: bool
    reason: str = ""
    version: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """What a contender may ask about the machine before it is started."""

    device: str
    """`cpu` or `cuda`."""
    backend: str
    """`gloo` or `nccl`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Deadlines in seconds; they must nest: group < soft < hard < barrier."""

    group: float = 3.0
    """A collective of a replicate group, the one the faults strike."""
    soft: float = 10.0
    """In-process restart: a rank without progress is interrupted."""
    hard: float = 20.0
    """In-process restart: a rank without progress is ended."""
    barrier: float = 30.0
    """In-process restart: the ranks that restart wait for each other."""
    world: float = 60.0
    """Every other collective: the default group and the shard groups."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a contender needs from its surroundings; recorded with every run."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every rank."""
    max_restarts: int = 0
    """How often a launcher may start all of its ranks again."""
    launchers: Literal["world", "replica"] = "world"
    """One launcher for all ranks, or one per replica, each with restarts of its own."""
    group_timeout: float = 3.0
    """Seconds; replicate groups."""
    shard_timeout: float = 60.0
    """Seconds; shard groups and the default group."""
    notes: Sequence[str] = ()
    """What a reader must know to judge the settings."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The contender's own settings, those of the chosen variant."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where one rank stands in the replicate x shard mesh.

    Ranks are numbered replica by replica: rank = replica * shard_size + shard.
    """

    rank: int
    num_replicas: int
    shard_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_replicas * self.shard_size

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.rank // self.shard_size

    @property
    def shard(self) -> int:
        """Index of this rank's shard, its column."""
        return self.rank % self.shard_size

    def replicate_ranks(self, column: int | None = None) -> list[int]:
        """Ranks that hold the same shard: `column`'s, by default this rank's own."""
        column = self.shard if column is None else column
        return [replica * self.shard_size + column for replica in range(self.num_replicas)]

    def shard_ranks(self, replica: int | None = None) -> list[int]:
        """Ranks of one replica, by default this rank's own."""
        replica = self.replica if replica is None else replica
        return [replica * self.shard_size + shard for shard in range(self.shard_size)]


@dataclasses.dataclass(kw_only=True, slots=True)
class Groups:
    """The process groups that the model is built on."""

    replicate: ProcessGroup
    shard: ProcessGroup
    ddp: ProcessGroup | None = None
    """What DistributedDataParallel is built on, where that cannot be `replicate`."""
    ddp_hook: tuple[object, Callable[[Any, Any], Any]] | None = None
    """State and function of the communication hook that then averages DDP's gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One life of a rank: a start, or a restart in the same or a new process."""

    index: int
    """0 for the first start, then one more for every restart by this rank's launcher."""
    layout: Layout
    device: torch.device
    backend: str
    settings: Settings
    store: Callable[[], Store]
    """Gives a new client of the store that the supervisor hosts."""
    store_address: tuple[str, int]
    """Host and port of that store."""
    timed: bool = True
    """Whether anybody looks at the times of this run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A communication failure, as the training loop saw it."""

    phase: str
    """`boundary`: after a commit, before the next update; `update`: anywhere else."""
    group: ProcessGroup | None
    """The group whose collective failed; None where that is not known."""
    error: BaseException


def raising_environment(backend: str) -> dict[str, str]:
    """Environment in which a collective that times out raises in the thread that waits for it.

    Gloo does so by itself. NCCL's watchdog ends the process unless told otherwise, and only a
    blocking wait raises; what that costs is part of a contender's overhead.
    """
    if backend != "nccl":
        return {}
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


def root_cause(error: BaseException) -> str:
    """Type and first line of the error behind `error`.

    torch's own logging of a failed collective can fail in turn on a group that
    is no longer registered; what really happened is then in the context.
    """
    while error.__context__ is not None:
        error = error.__context__
    line = (str(error).splitlines() or [""])[0]
    # Gloo puts its source file before what happened, and advice behind it.
    line = re.sub(r"^\[[^\]\s]*:\d+\]\s*", "", line).partition(". This is typically")[0]
    return f"{type(error).__name__}: {line}"


class Loader(Protocol):
    """The part of the data loader that a contender may use."""

    def state_dict(self) -> dict[str, int]:
        """Return this rank's place in the data order."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to that place."""
        ...


class Job(Protocol):
    """What a contender may see and touch of the training loop."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    attempt: Attempt
    groups: Groups
    frontier: int
    """Last committed update F; 0 before the first."""

    @property
    def loader(self) -> Loader:
        """The data."""
        ...

    def state(self) -> Mapping[str, torch.Tensor | int]:
        """Return this rank's S_app by name, without copies."""
        ...

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event to the run's record."""
        ...


class Strategy:
    """A contender. Subclasses override what they need; the rest does nothing."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for people."""
    distribution: ClassVar[str | None] = None
    """The package that does the work, as `pip` names it; None for torch alone."""
    expected: ClassVar[str] = "pass"
    """The verdict that a run with faults at boundaries should get."""
    expected_inside: ClassVar[str] = "rejected"
    """The verdict that a run with a fault inside an update should get."""
    expected_killed: ClassVar[str] = "rejected"
    """The verdict that a run in which a rank is killed should get."""
    expected_step: ClassVar[str] = "rejected"
    """The verdict that a run should get in which the optimizer's step fails after it has written
    weights."""
    asks_envelope: ClassVar[bool] = False
    """Whether an envelope decides what it may do."""
    launcher_recovers: ClassVar[bool] = False
    """Whether that the launcher starts all ranks again is this contender's own way to recover."""
    on_request: ClassVar[bool] = False
    """Whether it takes part only where it is named."""
    gates_updates: ClassVar[bool] = False
    """Whether `may_commit` can say no, so that the loop must be able to take an update back."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Settings that were tried, by name. The first is the one that comparisons use."""

    def __init__(self, *, variant: str | None = None) -> None:
        """Choose one of `variants`; ValueError if there is none of that name."""
        self.variant = variant or next(iter(self.variants))
        if self.variant not in self.variants:
            known = ", ".join(self.variants)
            raise ValueError(
                f"variant: {self.name} has {known}; found {self.variant!r}; choose one of them"
            )

    @property
    def options(self) -> Mapping[str, Any]:
        """The settings of the chosen variant."""
        return self.variants[self.variant]

    # -- before anything runs ------------------------------------------------

    def availability(self, platform: Platform) -> Availability:
        """Say whether this contender can run on `platform`; never raises."""
        distribution = self.distribution or "torch"
        try:
            version = importlib.metadata.version(distribution)
            prefix = "" if self.distribution else "torch "
            return Availability(available=True, version=prefix + version)
        except importlib.metadata.PackageNotFoundError:
            return Availability(available=False, reason=f"package {distribution} is not installed")

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Return what this contender needs to be at its best.

        Args:
            timeouts: the deadlines that were asked for.
            num_faults: how many faults are planned.
            backend: `gloo` or `nccl`.
        """
        return Settings(
            environment=raising_environment(backend),
            max_restarts=num_faults,  # for what it refuses
            group_timeout=timeouts.group,
            shard_timeout=timeouts.world,
            options=self.options,
        )

    # -- in the supervisor, around a run ---------------------------------------

    def services(self, layout: Layout) -> AbstractContextManager[Mapping[str, str]]:
        """Run what must outlive every rank; return environment variables that lead there.

        Args:
            layout: of rank 0.
        """
        del layout
        return contextlib.nullcontext({})

    # -- in a rank -----------------------------------------------------------

    def enter(self, body: Callable[[Attempt], None], attempt: Attempt) -> None:
        """Run the training function; wrap it if restarts happen in process."""
        body(attempt)

    def connect(self, attempt: Attempt) -> Groups:
        """Initialize `torch.distributed` and return the two groups of HSDP."""
        return connect_native(attempt)

    def attach(self, job: Job) -> None:
        """Take hold of the finished model and optimizer."""

    def begin(self, job: Job) -> None:
        """Take note that an attempt at update `job.frontier` + 1 begins."""

    def swallowed(self, job: Job) -> BaseException | None:
        """Return the failure of a collective that returned as if nothing had been, if any."""
        del job
        return None

    def may_commit(self, job: Job) -> bool:
        """Say whether the optimizer may step: if not, the update is taken back and done again.

        Called when the gradients are complete, if `gates_updates`.
        """
        del job
        return True

    def committed(self, job: Job) -> None:
        """Take note that update `job.frontier` is committed."""

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Recover from `failure`, or say who must."""
        raise NotImplementedError

    def settle(self, job: Job) -> None:
        """Wait, a bounded time, for what goes on beside training; then resources are counted."""

    def close(self, job: Job) -> None:
        """Let go of everything; the results are already written."""


def connect_native(attempt: Attempt) -> Groups:
    """Build torch's own groups: the default group, then one per row and per column.

    The rendezvous goes through the supervisor's store under a prefix of the
    attempt: a store that outlives a restart still holds the addresses of the
    ranks that died.
    """
    groups = connect_shards(attempt)
    layout = attempt.layout
    replicate = new_groups(
        attempt.backend,
        [layout.replicate_ranks(column) for column in range(layout.shard_size)],
        layout.rank,
        attempt.settings.group_timeout,
    )
    return Groups(replicate=replicate, shard=groups)


def connect_shards(attempt: Attempt) -> ProcessGroup:
    """Initialize the default group and return this rank's shard group.

    With a launcher per replica the default group is the replica's: it ends with its ranks.
    """
    import torch.distributed as dist

    layout, settings = attempt.layout, attempt.settings
    if settings.launchers == "replica":
        dist.init_process_group(
            attempt.backend,
            store=dist.PrefixStore(
                f"replica{layout.replica}/attempt{attempt.index}", attempt.store()
            ),
            rank=layout.shard,
            world_size=layout.shard_size,
            timeout=timedelta(seconds=settings.shard_timeout),
        )
        return dist.group.WORLD
    dist.init_process_group(
        attempt.backend,
        store=dist.PrefixStore(f"attempt{attempt.index}", attempt.store()),
        rank=layout.rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=settings.shard_timeout),
    )
    return new_groups(
        attempt.backend,
        [layout.shard_ranks(replica) for replica in range(layout.num_replicas)],
        layout.rank,
        settings.shard_timeout,
    )


def new_groups(
    backend: str, members: Sequence[Sequence[int]], rank: int, timeout: float
) -> ProcessGroup:
    """Create one group per entry of `members` on every rank; return the one of `rank`."""
    import torch.distributed as dist

    mine: ProcessGroup | None = None
    for ranks in members:
        group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=timeout))
        if rank in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"members: rank {rank} is in none of {members}")
    return mine
