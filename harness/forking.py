"""Starts ranks as forks of a process that has imported torch, in place of torch's launcher.

A rank that torchrun starts imports torch for seconds; a fork starts in milliseconds. What a
restart costs is not the same, so comparisons do not use this: it is for trials in which only the
verdict counts. Ranks know it by `UNTIMED_VARIABLE` and measure nothing beside the training.

Usage: python -m harness.forking, one request per line on stdin, one exit status on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.layout import FIRST_RANK
from harness.processes import GRACE_S, die_with_parent, end_with_parent
from harness.worker import UNTIMED_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

_POLL_S = 0.02
_FAILED = 1


def main() -> None:
    """Serve requests until stdin ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    preload()
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _launch(json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


def preload() -> None:
    """Import what ranks need, which their forks then have; it starts no thread."""
    import torch._dynamo  # noqa: F401  DDP and the optimizers import it when they are made

    import harness.train  # noqa: F401  the loop
    import strategies
    from harness.spec import WRAPPERS
    from harness.workload import wrappers

    for name in WRAPPERS:
        wrappers.find(name)
    for name in strategies.names():
        strategies.find(name)


def _launch(request: Mapping[str, Any]) -> NoReturn:
    """Be the launcher of one run, or the process that has forked several and attends to them."""
    status = _FAILED
    try:
        die_with_parent()
        _redirect(os.devnull, os.O_RDONLY, 0)
        _redirect(request["log"], os.O_WRONLY, 1, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in added if path and path not in sys.path]
        number = request["num_launchers"]
        ended_well = (
            _start_all(request)
            if number == 1
            else _attend([_fork_launcher(request, place) for place in range(number)])
        )
        status = 0 if ended_well else _FAILED
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(status)


def _start_all(request: Mapping[str, Any]) -> bool:
    """Start all ranks of this launcher, and all again while restarts are left."""
    return any(
        _attend([_fork(request, rank, restart) for rank in range(request["num_ranks"])])
        for restart in range(request["max_restarts"] + 1)
    )


def _fork_launcher(request: Mapping[str, Any], place: int) -> int:
    """Fork one launcher of several, the one that stands at `place`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = _FAILED
    try:
        die_with_parent()
        os.environ[FIRST_RANK] = str(place * request["num_ranks"])
        status = 0 if _start_all(request) else _FAILED
    except BaseException:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(status)


def _redirect(path: str, flags: int, *standard: int) -> None:
    descriptor = os.open(path, flags | os.O_APPEND)
    for each in standard:
        os.dup2(descriptor, each)
    os.close(descriptor)


def _fork(request: Mapping[str, Any], rank: int, restart: int) -> int:
    """Start one rank with the variables that torchrun gives it; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    from harness import worker

    size = str(request["num_ranks"])
    address, port = os.environ["ACCELPACT_STORE"].rsplit(":", 1)
    die_with_parent()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR=address,
        MASTER_PORT=port,
        TORCHELASTIC_RESTART_COUNT=str(restart),
        TORCHELASTIC_MAX_RESTARTS=str(request["max_restarts"]),
        **{UNTIMED_VARIABLE: "1"},
    )
    worker.main(Path(request["folder"]))
    raise AssertionError


def _attend(pids: list[int]) -> bool:
    """Wait until all ranks have ended well; or end all when one has not. Reaps every one."""
    left = set(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        left.discard(pid)
        if pid in pids and status != 0:
            _end(left)
            return False
    return True


def _end(left: set[int]) -> None:
    """End what is left: asked first, then made to."""
    deadline = time.monotonic() + GRACE_S
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    killed = False
    while left:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        left.discard(pid)
        if not killed and time.monotonic() > deadline:
            killed = True
            for each in left:
                os.kill(each, signal.SIGKILL)
        if not pid:
            time.sleep(_POLL_S)


if __name__ == "__mp_main__":  # imported by a process that a rank has spawned
    end_with_parent()
if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # its parent says so, once
        main()
