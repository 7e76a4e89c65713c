"""A whole repair, guard to release, against its bare cost."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import accelpact
from accelpact import _communicator
from strategies import Layout
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = pytest.mark.benchmark

REPAIR, FLOOR, DONE = b"r", b"f", b"d"
MESHES = [(2, 2), (4, 2), (4, 4)]
REPLACEMENTS = ["rebuild", "reconfigure"]


class Rank:
    """One rank's part in every round.

    The replicate group of rank 0 is repaired, always. Its members are told to repair it; all
    other ranks answer through their control threads.

    The floor is what nobody who repairs the same group can avoid: one control round trip of all
    ranks, since all depend on a member and have to agree on the frontier (one message wakes them,
    each sets one key, members read all keys); one communicator of the members and one probe; one
    control round trip of the members, who must know of each other that the new one works. The
    other ranks are not waited for there: they need to be let go, not to agree.
    """

    def __init__(self, layout: Layout, store_port: int, replacement: str) -> None:
        self.store = hsdp.client(store_port)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", self.store),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=30),
        )
        built = hsdp.build(layout)
        self.layout = layout
        self.group = built.groups.replicate
        self.members = layout.replicate_ranks(0)
        self.pact = accelpact.attach(
            built.model,
            built.optimizer,
            store=lambda: hsdp.client(store_port),
            prefix="benchmark",
            drive="manual",
            audit=False,
            replacement=replacement,
        )
        self.description = _communicator.describe(self.group)
        self.reaper = _communicator.Reaper()
        self.rounds = 0

    def do(self, command: bytes) -> None:
        if command == FLOOR:
            self.floor()
        elif self.layout.rank in self.members:
            self.group = self.pact.repair(self.group).group

    def floor(self) -> None:
        self.rounds += 1
        rank, members = self.layout.rank, self.members
        everyone = range(self.layout.world_size)
        scope = dist.PrefixStore(f"floor/{self.rounds}/", self.store)
        if rank == members[0]:
            scope.multi_set([f"wake/{each}" for each in everyone], ["1"] * len(everyone))
        else:
            scope.get(f"wake/{rank}")
        scope.set(f"first/{rank}", "1")
        if rank not in members:
            return
        scope.multi_get([f"first/{each}" for each in everyone])
        built = _communicator.connect(self.description, store=scope, rank=rank)
        _communicator.probe(built, self.description)
        scope.set(f"second/{rank}", "1")
        scope.multi_get([f"second/{each}" for each in members])
        self.reaper.take(built)
        del built
        self.reaper.release()

    def close(self) -> None:
        self.pact.close()
        self.reaper.join()
        dist.destroy_process_group()


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize(
    ("num_replicas", "shard_size"), MESHES, ids=[f"{r}x{s}" for r, s in MESHES]
)
def test_repair(
    against_floor: AgainstFloor,
    benchmark: Any,
    num_replicas: int,
    shard_size: int,
    replacement: str,
) -> None:
    """Repairing a replicate group of a 33-module model, against its bare cost."""
    world_size = num_replicas * shard_size
    if replacement == "reconfigure" and not hasattr(dist, "_reconfigure"):
        pytest.skip("this torch cannot reconfigure a group")

    def serve(rank: int, line: int) -> None:
        port = int.from_bytes(os.read(line, 2), "little")
        layout = Layout(rank=rank, num_replicas=num_replicas, shard_size=shard_size)
        own = Rank(layout, port, replacement)
        os.write(line, DONE)
        while command := os.read(line, 1):
            own.do(command)
            os.write(line, DONE)
        own.close()

    with hsdp.forked(serve, ranks=range(world_size)) as ends:
        # After the forks: no rank inherits the store's sockets or waits for its thread.
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def together(command: bytes) -> None:
            """Tell all ranks; return when the last is done."""
            for end in ends:
                os.write(end, command)
            for end in ends:
                assert DONE == os.read(end, 1)

        together(server.port.to_bytes(2, "little"))
        ratio = against_floor(
            lambda: together(REPAIR),
            lambda: together(FLOOR),
            description=(
                f"control round trips of {world_size} ranks and of {num_replicas} members, "
                f"one Gloo group of these, one probe"
            ),
            rounds=40,
        )
        benchmark.extra_info.update(times_the_floor=1 / ratio, replacement=replacement)
