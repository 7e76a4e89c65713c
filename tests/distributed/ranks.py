"""Runs a function on several ranks, each a process forked from the test's, and ends them all.

A fork has torch imported already, so a rank starts in milliseconds. Where ranks use CUDA they are
spawned, since a fork of a process that has used it cannot. Nothing of a
rank outlives `run`: what has not ended by the deadline is killed and reaped.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.forking import preload
from harness.processes import die_with_parent
from strategies import Attempt, Layout, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

DEADLINE_S = 60.0
_KILLED_S = 10.0
preload()


@dataclasses.dataclass(kw_only=True)
class Result:
    """How one rank ended."""

    rank: int
    value: Any = None
    """What the function returned."""
    reports: list[Any] = dataclasses.field(default_factory=list)
    """What the rank reported on its way."""
    error: str | None = None
    """The traceback of what the function raised."""
    status: int | None = None
    """Exit status; negative for a signal; None if the deadline passed."""
    ended: float = math.inf
    """When it ended, by `time.time()`."""


class Rank:
    """What the function gets: who it is, a store that outlives it, a way to report."""

    def __init__(self, number: int, world_size: int, channel: connection.Connection) -> None:
        """Wait for the port of the store, which the parent opens after the last fork."""
        self.number = number
        self.world_size = world_size
        self._channel = channel
        self._lock = threading.Lock()
        self.port: int = channel.recv()
        """Of the store."""

    @property
    def layout(self) -> Layout:
        """Two shards to a replica, as far as the ranks go."""
        shards = min(2, self.world_size)
        return Layout(rank=self.number, num_replicas=self.world_size // shards, shard_size=shards)

    def store(self) -> dist.TCPStore:
        """Return a new client of the parent's store."""
        return dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
        )

    def attempt(self, *, group_timeout: float, shard_timeout: float) -> Attempt:
        """Describe this rank as the harness would."""
        return Attempt(
            index=0,
            layout=self.layout,
            device=torch.device("cpu"),
            backend="gloo",
            settings=Settings(group_timeout=group_timeout, shard_timeout=shard_timeout),
            store=self.store,
            store_address=("127.0.0.1", self.port),
        )

    def report(self, value: Any) -> None:
        """Tell the parent `value`, whatever becomes of this rank."""
        self.send("report", value)

    def send(self, kind: str, value: Any) -> None:
        """Send one message; from any thread."""
        with self._lock:
            self._channel.send_bytes(pickle.dumps((kind, value)))


def run(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int = 4,
    deadline: float = DEADLINE_S,
    method: str = "fork",
    **options: Any,
) -> list[Result]:
    """Call `function(rank, *arguments, **options)` on `world_size` ranks; see how each ended.

    Args:
        function: anything, closures included, if forked; its value must be picklable.
        arguments: handed to it.
        world_size: number of ranks.
        deadline: seconds after which ranks that have not ended are killed.
        method: `fork` or `spawn`; with the latter, all that is handed over must be picklable.
        options: handed to it.
    """
    end = time.monotonic() + deadline
    results = [Result(rank=number) for number in range(world_size)]
    processes: list[BaseProcess] = []
    context: Any = multiprocessing.get_context(method)
    channels: list[connection.Connection] = []
    try:
        for number in range(world_size):
            ours, theirs = context.Pipe()
            call = (function, arguments, options)
            process = context.Process(
                target=_rank, args=(number, world_size, theirs, call, deadline), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            channels.append(ours)
        # After the forks: no rank inherits the store's sockets or waits for its thread.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for channel in channels:
            channel.send(store.port)
        _collect(results, channels, end)
        for process, result in zip(processes, results, strict=True):
            process.join(max(0.0, end - time.monotonic()))
            result.status = process.exitcode
    finally:
        _end(processes)
        for channel in channels:
            channel.close()
    return results


def values(results: list[Result]) -> list[Any]:
    """Return what every rank returned.

    Raises:
        AssertionError: one did not; says how each of them ended.
    """
    failed = [result for result in results if result.status != 0 or result.error]
    if failed:
        raise AssertionError("\n".join(_describe(result) for result in failed))
    return [result.value for result in results]


def _rank(
    number: int,
    world_size: int,
    channel: connection.Connection,
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    deadline: float,
) -> None:
    """Be a rank; never return to the code of the test process."""
    die_with_parent()
    faulthandler.dump_traceback_later(0.9 * deadline, file=sys.__stderr__)
    torch.set_num_threads(1)
    status = 1
    rank = Rank(number, world_size, channel)
    function, arguments, options = call
    try:
        rank.send("value", function(rank, *arguments, **options))
        status = 0
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        rank.send("error", traceback.format_exc())
    finally:
        os._exit(status)


def _collect(results: list[Result], channels: list[connection.Connection], end: float) -> None:
    """Take in messages until every rank has closed its channel, or the deadline."""
    waiting = dict(zip(channels, results, strict=True))
    while waiting and (left := end - time.monotonic()) > 0:
        for channel in connection.wait(list(waiting), left):
            assert isinstance(channel, connection.Connection)
            try:
                message = channel.recv_bytes()
            except (EOFError, ConnectionError):
                waiting.pop(channel).ended = time.time()
                continue
            kind, value = pickle.loads(message)  # noqa: S301  from a fork of this process
            if kind == "report":
                waiting[channel].reports.append(value)
            else:
                setattr(waiting[channel], kind, value)


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(_KILLED_S)
        process.close()


def _describe(result: Result) -> str:
    how = "was killed at the deadline" if result.status is None else f"status {result.status}"
    return f"rank {result.rank}: {how}; reports {result.reports}\n{result.error or ''}"


def wait_until(condition: Callable[[], bool], patience: float = 20.0) -> bool:
    """Wait until `condition` holds, `patience` seconds at most; whether it does."""
    end = time.monotonic() + patience
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def num_threads(patience: float = 3.0) -> int:
    """Count this process's threads, once two looks agree: one that was joined shows for a moment.

    Args:
        patience: seconds after which the last look counts.
    """
    end = time.monotonic() + patience
    count = -1
    while time.monotonic() < end:
        before, count = count, len(list(Path("/proc/self/task").iterdir()))
        if before == count:
            break
        time.sleep(0.1)
    return count


def meet(store: dist.Store, name: str, num: int, patience: float = 20.0) -> None:
    """Wait for `num` ranks that come under the same new `name`, without any group.

    Raises:
        AssertionError: they do not come within `patience` seconds.
    """
    key = f"meet/{name}"
    store.add(key, 1)
    wait_until(lambda: store.add(key, 0) >= num, patience)
    assert store.add(key, 0) >= num
