"""One small model under every wrapper, trained with dropout and accumulation on 2x2 ranks."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import accelpact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from tests.distributed.ranks import Rank

DIM = 16
NUM_BLOCKS = 3
UPDATES = 5
ACCUMULATION = 2
TIMEOUT_S = 20.0
_PAIRS: list[ProcessGroup] = []


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


@dataclasses.dataclass
class Wrapped:
    """A wrapped model, and its groups by the name of their dimension."""

    model: nn.Module
    groups: Callable[[str], ProcessGroup]
    held: dict[str, ProcessGroup] = dataclasses.field(default_factory=dict)

    def group(self, dimension: str) -> ProcessGroup:
        """Return the group as the script would look it up today."""
        return self.held.get(dimension) or self.groups(dimension)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)], nn.Linear(DIM, DIM))


def fsdp1(*, use_orig_params: bool, by_mesh: bool) -> Wrapped:
    """HYBRID_SHARD over a mesh, or over its two groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    where: dict[str, Any] = (
        {"device_mesh": mesh}
        if by_mesh
        else {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    )
    model = FullyShardedDataParallel(
        plain(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        **where,
    )
    return Wrapped(model, mesh.get_group)


def fsdp2(replicas: int = 2) -> Wrapped:
    """`fully_shard` on a 2-D mesh."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
    model = plain()
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    return Wrapped(fully_shard(model, mesh=mesh), mesh.get_group)


def pairs(timeout: float = TIMEOUT_S) -> list[ProcessGroup]:
    """Ranks 0 and 2, and ranks 1 and 3; made by the first call."""
    if not _PAIRS:
        limit = timedelta(seconds=timeout)
        _PAIRS.extend(dist.new_group([column, column + 2], timeout=limit) for column in range(2))
    return _PAIRS


def ddp(*, world: bool, static: bool = False) -> Wrapped:
    """Two independent pairs, or all ranks over the default group."""
    name = pairs()[dist.get_rank() % 2].group_name
    mine = None if world else accelpact._communicator.find(name)  # it may have been rebuilt
    model = DistributedDataParallel(plain(), process_group=mine, static_graph=static)
    name = (dist.group.WORLD if mine is None else mine).group_name
    return Wrapped(model, lambda _: accelpact._communicator.find(name))


WRAPPERS: dict[str, tuple[Callable[[], Wrapped], tuple[str, ...]]] = {
    "fsdp1-groups": (
        lambda: fsdp1(use_orig_params=True, by_mesh=False),
        ("replicate", "shard"),
    ),
    "fsdp1-mesh-flat": (
        lambda: fsdp1(use_orig_params=False, by_mesh=True),
        ("replicate", "shard"),
    ),
    "fsdp2": (fsdp2, ("replicate", "shard")),
    "ddp": (lambda: ddp(world=False), ("replicate",)),
    "ddp-world-static": (lambda: ddp(world=True, static=True), ("world",)),
}
"""How each is built, and the dimensions whose groups it uses."""


def connect(rank: Rank, timeout: float = TIMEOUT_S) -> None:
    """Join the default group."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("world", rank.store()),
        rank=rank.number,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout),
    )


def train(
    wrapped: Wrapped,
    *,
    attach: Callable[[nn.Module, torch.optim.Optimizer], accelpact.Pact] | None = None,
    at_boundary: Callable[[accelpact.Pact, int], None] = lambda *_: None,
) -> list[str]:
    """Train, and return the digest of the whole state after every update."""
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    pact = attach(wrapped.model, optimizer) if attach else None
    torch.manual_seed(100 + dist.get_rank())
    roots = []
    for update in range(1, UPDATES + 1):
        for _ in range(ACCUMULATION):
            wrapped.model(torch.randn(4, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = accelpact.application_state(wrapped.model, optimizer, cursor=0, frontier=update)
        roots.append(accelpact.tree_digest(state).root)
        if pact is not None:
            pact.commit(update)
            at_boundary(pact, update)
    if pact is not None:
        pact.close()
    return roots
