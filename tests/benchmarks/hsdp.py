"""A sharded model to measure on: with no peers at all, or with real ones."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from harness.workload import hsdp
from harness.workload.presets import find_workload
from strategies import Groups, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_REPLICAS = SHARD_SIZE = 2


def build(rank: int, workload: str, *, timeout: float = 30.0) -> tuple[
    torch.nn.Module, torch.optim.Optimizer, Groups
]:  # fmt: skip
    """Build `workload` as FSDP1 on a 2x2 mesh over the default group's backend."""
    layout = Layout(rank=rank, num_replicas=NUM_REPLICAS, shard_size=SHARD_SIZE)
    limit = timedelta(seconds=timeout)
    shards = [dist.new_group(layout.shard_ranks(each), timeout=limit) for each in range(2)]
    replicas = [dist.new_group(layout.replicate_ranks(each), timeout=limit) for each in range(2)]
    groups = Groups(shard=shards[layout.replica], replicate=replicas[layout.shard])
    model, optimizer = hsdp.build(
        find_workload(workload),
        layout=layout,
        groups=groups,
        device=torch.device("cpu"),
        dtype=torch.float32,
        activation_checkpointing=False,
        seed=1,
    )
    return model, optimizer, groups


@contextmanager
def without_peers(workload: str) -> Iterator[tuple[torch.nn.Module, Groups]]:
    """One rank of four whose collectives do nothing (torch's fake backend)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model, _, groups = build(0, workload)
        yield model, groups
    finally:
        dist.destroy_process_group()


@contextmanager
def peers(serve: Callable[[int, int, int], None], *, store_port: int) -> Iterator[list[int]]:
    """Fork ranks 1 to 3, which run `serve(rank, store_port, commands)`.

    Yields:
        Descriptors to write one byte per command to, by rank - 1. Ranks end when
        theirs is closed, or are killed.
    """
    ends, pids = [], []
    for rank in range(1, NUM_REPLICAS * SHARD_SIZE):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for inherited in (writer, *ends):
                    os.close(inherited)
                torch.set_num_threads(1)
                serve(rank, store_port, reader)
                status = 0
            finally:
                os._exit(status)
        os.close(reader)
        ends.append(writer)
        pids.append(pid)
    try:
        yield ends
    finally:
        for writer in ends:
            os.close(writer)
        for pid in pids:
            _reap(pid)


def _reap(pid: int) -> None:
    """Wait a bounded time for a child to end, then make it."""
    import time

    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
