"""A sharded model to measure on: with no peers at all, or with real ones."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from accelpact import _frameworks
from harness.workload import decoder, hsdp
from harness.workload.model import Block, Decoder, initializer
from harness.workload.presets import Workload, find_workload
from strategies import Groups, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accelpact._frameworks import Framework

FSDP1, FSDP2 = "fsdp1", "fsdp2"
WRAPPERS = (FSDP1, FSDP2)
ENDS_S = 20.0


class Built(NamedTuple):
    """A model on one rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    groups: Groups


def framework(name: str) -> Framework:
    """Return what the runtime knows of the wrapper `name`."""
    return {each.name: each for each in _frameworks.ALL}[name]


def workload(num_modules: int = 33) -> Workload:
    """Return `decoder-32l` with as many layers as make `num_modules` units, the root included."""
    preset = find_workload("decoder-32l")
    model = dataclasses.replace(preset.model, num_layers=num_modules - 1)
    return dataclasses.replace(preset, model=model)


def build(
    layout: Layout, *, wrapper: str = FSDP1, num_modules: int = 33, timeout: float = 30.0
) -> Built:
    """Build the model on `layout`'s mesh over the default group's backend."""
    if wrapper == FSDP2:
        return _build_fsdp2(layout, workload(num_modules))
    limit = timedelta(seconds=timeout)
    shards = [
        dist.new_group(layout.shard_ranks(each), timeout=limit)
        for each in range(layout.num_replicas)
    ]
    replicas = [
        dist.new_group(layout.replicate_ranks(each), timeout=limit)
        for each in range(layout.shard_size)
    ]
    groups = Groups(shard=shards[layout.replica], replicate=replicas[layout.shard])
    model, optimizer, _ = hsdp.build(
        decoder.maker(workload(num_modules)),
        layout=layout,
        groups=groups,
        device=torch.device("cpu"),
        dtype=torch.float32,
        activation_checkpointing=False,
        seed=1,
    )
    return Built(model, optimizer, groups)


def _build_fsdp2(layout: Layout, chosen: Workload) -> Built:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cpu", (layout.num_replicas, layout.shard_size), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(1)
    model = Decoder(chosen.model)
    initialize = initializer(model, torch.device("cpu"))
    for module in model.modules():
        initialize(module)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr, fused=True)
    groups = Groups(shard=mesh.get_group("shard"), replicate=mesh.get_group("replicate"))
    return Built(model, optimizer, groups)


@contextmanager
def without_peers(*, rank: int = 0, wrapper: str = FSDP1, num_modules: int = 33) -> Iterator[Built]:
    """One rank of 2x2 whose collectives do nothing (torch's fake backend)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        layout = Layout(rank=rank, num_replicas=2, shard_size=2)
        yield build(layout, wrapper=wrapper, num_modules=num_modules)
    finally:
        dist.destroy_process_group()


@contextmanager
def forked(serve: Callable[[int, int], None], *, ranks: Sequence[int]) -> Iterator[list[int]]:
    """Fork `ranks`, each of which runs `serve(rank, line)`.

    A process that has been a rank itself should not fork others: what torch's threads held then
    stays held in them.

    Yields:
        The other ends of their lines, in the order of `ranks`: descriptors to write commands to
        and read answers from. Ranks end when theirs is closed, or are killed.
    """
    ends: list[int] = []
    pids: list[int] = []
    try:
        for rank in ranks:
            theirs, ours = (each.detach() for each in socket.socketpair())
            pid = os.fork()
            if pid == 0:
                _be(rank, theirs, [ours, *ends], serve)
            os.close(theirs)
            ends.append(ours)
            pids.append(pid)
        yield ends
    finally:
        for end in ends:
            os.close(end)
        deadline = time.monotonic() + ENDS_S
        for pid in pids:
            _reap(pid, deadline)


def _be(rank: int, line: int, inherited: list[int], serve: Callable[[int, int], None]) -> None:
    """Be a rank; never return to the code of the benchmark."""
    status = 1
    try:
        for descriptor in inherited:
            os.close(descriptor)
        torch.set_num_threads(1)
        serve(rank, line)
        status = 0
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _reap(pid: int, deadline: float) -> None:
    """Wait for a child to end, and make it at the deadline."""
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def client(port: int) -> dist.TCPStore:
    """Return a new client of the benchmark's store."""
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
