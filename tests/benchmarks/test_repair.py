"""A whole repair on 2x2 ranks, guard to release, against its bare cost."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import accelpact
from accelpact import _communicator
from accelpact._floor import bare_repair
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = pytest.mark.benchmark

REPAIR, FLOOR = b"r", b"f"
PARTNER = 2
"""The rank that shares the replicate group of rank 0."""


class Rank:
    """One rank's part in every round; all members do the same."""

    def __init__(self, rank: int, store_port: int) -> None:
        def store() -> dist.Store:
            return dist.TCPStore(
                "127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=30)
            )

        self.rank = rank
        self.store = store()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", self.store),
            rank=rank,
            world_size=4,
            timeout=timedelta(seconds=30),
        )
        model, optimizer, groups = hsdp.build(rank, "decoder-32l")
        self.group = groups.replicate
        self.pact = accelpact.attach(model, optimizer, store=store, prefix="benchmark")
        self.description = _communicator.describe(self.group)
        self.reaper = _communicator.Reaper()
        self.rounds = 0

    def repair(self) -> None:
        self.group = self.pact.repair(self.group).group

    def floor(self) -> None:
        self.rounds += 1
        scope = dist.PrefixStore(f"floor/{self.rounds}/", self.store)
        self.reaper.take(bare_repair(self.description, store=scope, rank=self.rank))
        self.reaper.release()

    def close(self) -> None:
        self.pact.close()
        self.reaper.join()
        dist.destroy_process_group()


def serve(rank: int, store_port: int, commands: int) -> None:
    """Do what rank 0 says until it says no more."""
    own = Rank(rank, store_port)
    while command := os.read(commands, 1):
        own.repair() if command == REPAIR else own.floor()
    own.close()


def test_repair(against_floor: AgainstFloor) -> None:
    """Repairing the replicate group of a 33-module model, against its bare cost."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with hsdp.peers(serve, store_port=server.port) as ends:
        own = Rank(0, server.port)

        def together(command: bytes) -> None:
            os.write(ends[PARTNER - 1], command)
            own.repair() if command == REPAIR else own.floor()

        ratio = against_floor(
            lambda: together(REPAIR),
            lambda: together(FLOOR),
            description="two control round trips, one Gloo group of the same members, one probe",
            rounds=40,
        )
        own.close()

    assert ratio > 0
