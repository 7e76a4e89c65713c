"""Trains in both forms that can execute an update again, and strikes collectives of updates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import accelpact
from accelpact import _communicator
from tests.distributed import wrappers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    from tests.distributed.ranks import Rank

NAMES = {
    "all-gather": ("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_single"),
    "reduce-scatter": ("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"),
    "all-reduce": ("all_reduce",),
}
"""What FSDP1 and `fully_shard` call, torch 2.8 to 2.14.1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strike:
    """A collective of one update that fails on one rank."""

    update: int
    kind: str
    place: float
    """Which of its kind in the update: 0 is the first, 1 the last."""
    rank: int
    completes: bool = False
    """Whether it completes for the peers, and only this rank takes it for failed."""
    attempts: int = 1
    """In how many attempts at the update."""


class Striker:
    """Stands in for collectives, below the runtime, and counts them in every update."""

    def __init__(self, strikes: list[Strike]) -> None:
        self.calls: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.usual: dict[str, int] = {}
        self.struck: list[int] = []
        self._planned = [each for each in strikes if each.rank == dist.get_rank()]
        self._update = 0
        self._inside = False

    def begin(self, update: int) -> None:
        """Note that an attempt at `update` begins."""
        self._update = update
        self.calls = dict.fromkeys(NAMES, 0)

    def end(self) -> None:
        """Note that its gradients are complete: what follows is not struck."""
        self.usual = self.usual or dict(self.calls)
        self._update = 0

    def install(self) -> None:
        """Do it; the runtime must not be attached yet."""
        for kind, names in NAMES.items():
            for name in names:
                if hasattr(c10d, name):
                    stand_in = self._counted(kind, getattr(c10d, name))
                    setattr(c10d, name, stand_in)
                    setattr(dist, name, stand_in)

    def _counted(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._update:
                return original(*args, **kwargs)
            self.calls[kind] += 1
            strike = self._due(kind)
            self._inside = True
            try:
                return self._strike(strike, original, args, kwargs)
            finally:
                self._inside = False

        return counted

    def _due(self, kind: str) -> Strike | None:
        for each in self._planned:
            if each.update != self._update or each.kind != kind:
                continue
            number = 1 + round(each.place * (self.usual[kind] - 1))
            tried = self.struck.count(each.update)
            if self.calls[kind] == number and tried < each.attempts:
                self.struck.append(each.update)
                return each
        return None

    def _strike(
        self,
        strike: Strike | None,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if strike is None:
            return original(*args, **kwargs)
        if strike.completes:
            work = original(*args, **kwargs)
            if isinstance(work, dist.Work):
                work.wait()
            raise dist.DistBackendError("injected: it is complete for all peers and failed here")
        group = next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        group = group or kwargs.get("group")
        assert isinstance(group, dist.ProcessGroup)
        assert _communicator.interrupt(group)
        del group
        return original(*args, **kwargs)


class Batches:
    """A loader that can be rewound, with a position of its own."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7 + dist.get_rank())
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(4, wrappers.DIM, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._generator.set_state(state["generator"])


class Training:
    """One training job on one rank."""

    def __init__(
        self, wrapped: wrappers.Wrapped, striker: Striker | None = None, *, clips: bool = True
    ) -> None:
        self.model = wrapped.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = Batches()
        self.striker = striker
        self.attempts = 0
        self.clips = clips
        self.before_step: Callable[[int], None] = lambda _: None

    def execute(self, update: int, batches: list[torch.Tensor] | None = None) -> None:
        """Execute one update; its batches come from the loader if they are not given."""
        self.attempts += 1
        if self.striker is not None:
            self.striker.begin(update)
        for number in range(wrappers.ACCUMULATION):
            batch = next(self.batches) if batches is None else batches[number]
            self.model(batch).square().mean().backward()
        if self.striker is not None:
            self.striker.end()
        if self.clips:
            self._clip()
        self.before_step(update)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _clip(self) -> None:
        """Clip by the norm of all gradients: nobody steps before all shards are reduced."""
        if isinstance(self.model, FullyShardedDataParallel):
            self.model.clip_grad_norm_(1.0)
            return
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if isinstance(norm, DTensor):
            norm.full_tensor()

    def root(self, update: int) -> str:
        """Digest weights, moments, random states, the loader's position and buffers."""
        state = accelpact.application_state(
            self.model, self.optimizer, cursor=self.batches.position, frontier=update
        )
        buffers = {name: each for name, each in self.model.named_buffers() if each.numel()}
        loader = self.batches.state_dict()["generator"]
        return accelpact.tree_digest({**state, "loader": loader, **buffers}).root


def plain(rank: Rank, build: Callable[[], wrappers.Wrapped], updates: int) -> list[str]:
    """Train without the runtime and without a fault."""
    training = Training(build())
    torch.manual_seed(100 + rank.number)
    roots = []
    for update in range(1, updates + 1):
        training.execute(update)
        roots.append(training.root(update))
    return roots


def protected(
    rank: Rank,
    build: Callable[[], wrappers.Wrapped],
    updates: int,
    *,
    form: str,
    strikes: list[Strike],
    events: str | None = None,
    prepare: Callable[[Training], None] = lambda _: None,
    clips: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Train with the runtime attached as a script does that protects its updates."""
    if events is not None:
        os.environ["ACCELPACT_EVENTS"] = events
    striker = Striker(strikes)
    with _installed(striker):
        training = Training(build(), striker, clips=clips)
        pact = accelpact.attach(
            training.model,
            training.optimizer,
            store=rank.store,
            prefix=f"inflight/{form}",
            loader=training.batches if form == "iterator" else None,
            **settings,
        )
        prepare(training)
        torch.manual_seed(100 + rank.number)
        roots = list(FORMS[form](pact, training, updates))
        pact.close()
    return {
        "roots": roots,
        "attempts": training.attempts,
        "struck": striker.struck,
        "usual": striker.usual,
        "generation": pact.generation,
    }


@contextlib.contextmanager
def _installed(striker: Striker) -> Iterator[None]:
    """Install it, and put back what it and the runtime stand in for."""
    names = [name for kind in NAMES.values() for name in kind if hasattr(c10d, name)]
    originals = {name: getattr(c10d, name) for name in names}
    striker.install()
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)
            setattr(dist, name, original)


def _iterator(pact: accelpact.Pact, training: Training, updates: int) -> Iterator[str]:
    for update in pact.updates(updates):
        with update:
            training.execute(update.index + 1)
        if not update.discarded:
            yield training.root(update.index + 1)


def _decorated(pact: accelpact.Pact, training: Training, updates: int) -> Iterator[str]:
    @pact.protect
    def step(batches: list[torch.Tensor]) -> None:
        training.execute(pact.frontier + 1, batches)

    for update in range(1, updates + 1):
        step([next(training.batches) for _ in range(wrappers.ACCUMULATION)])
        yield training.root(update)


FORMS: dict[str, Callable[[accelpact.Pact, Training, int], Iterator[str]]] = {
    "iterator": _iterator,
    "decorated": _decorated,
}


class Normalized(nn.Module):
    """A block whose forward passes change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(wrappers.DIM, wrappers.DIM)
        self.norm = nn.BatchNorm1d(wrappers.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(self.linear(x))
        return x + normalized


def pair(rank: int) -> ProcessGroup:
    """Return the group of the column of `rank`."""
    return wrappers.pairs()[rank % 2]
