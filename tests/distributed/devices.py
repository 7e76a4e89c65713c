"""Training that runs on Gloo and on NCCL alike, in processes of their own."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelpact
from accelpact import _communicator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from accelpact import Pact
    from tests.distributed.ranks import Rank

WORLD_TIMEOUT_S = 40.0
DIM = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks run, and how."""

    device: str
    backend: str
    timeout: float
    """Seconds, of the replicate groups."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bound: bool = False
    """Whether the default group is bound to a device, so that torch splits its communicator."""

    def enter(self, rank: Rank) -> torch.device:
        """Set variables and device; connect the default group."""
        os.environ.update(self.environment)
        device = torch.device("cpu")
        if self.device == "cuda":
            device = torch.device("cuda", rank.number)
            torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(mode=True)
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("world", rank.store()),
            rank=rank.number,
            world_size=rank.world_size,
            timeout=timedelta(seconds=WORLD_TIMEOUT_S),
            device_id=device if self.bound else None,
        )
        return device


class Training:
    """DDP over two ranks, or `fully_shard` over two replicas of two shards."""

    def __init__(self, rank: Rank, place: Place) -> None:
        """Build model and optimizer."""
        self.rank = rank
        self.device = place.enter(rank)
        torch.manual_seed(7)
        layers = [nn.Linear(DIM, DIM), nn.Dropout(0.1), nn.GELU(), nn.Linear(DIM, DIM)]
        model = nn.Sequential(*layers).to(self.device)
        limit = timedelta(seconds=place.timeout)
        self.mesh: DeviceMesh | None = None
        self.model: nn.Module
        if rank.world_size == 2:
            group = _group([[0, 1]], rank.number, limit)
            self.model = DistributedDataParallel(model, process_group=group)
        else:
            replicate = _group([[0, 2], [1, 3]], rank.number, limit)
            # Those that wait for a repair of the others must not give up.
            patient = timedelta(seconds=WORLD_TIMEOUT_S)
            shard = _group([[0, 1], [2, 3]], rank.number, patient)
            self.mesh = DeviceMesh.from_group(
                [replicate, shard],
                self.device.type,
                mesh=torch.arange(4).view(2, 2),
                mesh_dim_names=("replicate", "shard"),
            )
            self.model = fully_shard(model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = torch.Generator().manual_seed(rank.number)
        torch.manual_seed(100 + rank.number)
        self.frontier = 0

    @property
    def replicate(self) -> ProcessGroup:
        """The replicate group of today, which no variable of the script keeps."""
        if self.mesh is not None:
            return self.mesh.get_group("replicate")
        return self.model.process_group  # type: ignore[return-value]

    def attach(self, **settings: Any) -> Pact:
        """Attach the runtime as a script does."""
        return accelpact.attach(
            self.model,
            self.optimizer,
            store=self.rank.store,
            prefix="accelpact/0",
            on_abort=self.rank.report,
            replacement="rebuild",
            deadline=20.0,
            patience=20.0,
            **settings,
        )

    def update(self, *, pause: float = 0.0) -> torch.Tensor:
        """Execute one update; return this rank's loss."""
        batch = torch.randn(4, DIM, generator=self.data).to(self.device)
        loss = self.model(batch).square().mean()
        time.sleep(pause)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.frontier += 1
        return loss.detach()

    def root(self) -> str:
        """Digest what must survive."""
        state = accelpact.application_state(
            self.model, self.optimizer, cursor=self.frontier, frontier=self.frontier
        )
        return accelpact.tree_digest(state | {"data": self.data.get_state()}).root

    def state_dict(self) -> dict[str, Any]:
        """Be the loader, too."""
        return {"data": self.data.get_state(), "frontier": self.frontier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a boundary."""
        self.data.set_state(state["data"])
        self.frontier = state["frontier"]


def _group(members: list[list[int]], rank: int, timeout: timedelta) -> ProcessGroup:
    """Make all groups; return the one of `rank`."""
    made = [dist.new_group(each, timeout=timeout) for each in members]
    return next(group for group, each in zip(made, members, strict=True) if rank in each)


def train(
    rank: Rank, place: Place, updates: int, late: Mapping[int, int] | None = None, events: str = ""
) -> dict[str, Any]:
    """Train, and sum the loss over the replicas at every boundary.

    Args:
        rank: who this is.
        place: where it runs.
        updates: how many.
        late: update -> rank that comes to the sum after it only when its peers have given up.
        events: folder of the runtime's record.
    """
    os.environ["ACCELPACT_EVENTS"] = events
    training = Training(rank, place)
    pact = training.attach()
    roots, sums, took = [], [], []
    while training.frontier < updates:
        loss = training.update()
        roots.append(training.root())
        if (late or {}).get(training.frontier) == rank.number:
            time.sleep(place.timeout + 1.0)
        start = time.monotonic()
        dist.all_reduce(loss, group=training.replicate)
        sums.append(loss.item())
        took.append(time.monotonic() - start)
    generation = pact.generation
    pact.close()
    return {"roots": roots, "sums": sums, "took": took, "generation": generation}


def take_back(rank: Rank, place: Place, updates: int, late: int | None = None) -> dict[str, Any]:
    """Train with updates protected; in update `late`, rank 1 stops until its peer has given up."""
    training = Training(rank, place)
    pact = training.attach(loader=training)
    roots, discarded = [], []
    paused = False
    for update in pact.updates(updates):
        with update:
            strikes = update.index + 1 == late and rank.number == 1 and not paused
            paused = paused or strikes
            training.update(pause=place.timeout + 1.0 if strikes else 0.0)
        if update.discarded:
            discarded.append(update.index + 1)
        else:
            roots.append(training.root())
    pact.close()
    return {"roots": roots, "discarded": discarded, "attempts": len(roots) + len(discarded)}


def release(rank: Rank, place: Place) -> dict[str, Any]:
    """Wait for the device, whose collective rank 1 never comes to; be let go by another thread."""
    device = place.enter(rank)
    group = _group([[0, 1]], rank.number, timedelta(seconds=WORLD_TIMEOUT_S))
    value = torch.ones(1, device=device)
    dist.all_reduce(value, group=group)
    value.item()
    if rank.number == 1:
        time.sleep(4.0)
        return {}
    cutter = threading.Timer(1.0, _communicator.interrupt, (group,))
    cutter.start()
    start = time.monotonic()
    dist.all_reduce(value, group=group, async_op=True)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    cutter.join()
    _communicator.stop([group], deadline=10.0)
    return {"took": took, "failure": _communicator.failure(group)}
