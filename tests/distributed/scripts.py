"""Runs a user's script on forked ranks as a launcher would, with a fault that the test chooses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import accelpact
from accelpact.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.distributed.ranks import Rank

EXAMPLES = Path(__file__).parents[2] / "examples"
DDP = str(EXAMPLES / "train_ddp.py")
HSDP = str(EXAMPLES / "train_hsdp.py")
_GROUPS: list[dist.ProcessGroup | None] = []


def run(
    rank: Rank,
    script: str,
    arguments: list[str],
    *,
    events: str | None = None,
    fault: Callable[[Rank], None] | None = None,
    options: tuple[str, ...] = (),
    protected: bool = True,
) -> dict[str, Any]:
    """Be a rank of `torchrun [-m accelpact options] script arguments`.

    Returns:
        `output`: what it printed. `root`: digest of all parameters and optimizer states.
    """
    launch_environment(rank)
    if events is not None:
        os.environ["ACCELPACT_EVENTS"] = events
    optimizers = _collect_optimizers()
    if fault is not None:
        fault(rank)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if protected:
            main([*options, script, *arguments])
        else:
            run_bare(script, arguments)
    import atexit

    atexit._run_exitfuncs()  # a forked rank ends by os._exit
    return {"output": output.getvalue().splitlines(), "root": _root(optimizers)}


def launch_environment(rank: Rank) -> None:
    """Set what torchrun sets, with the test's store as the agent's."""
    os.environ.update(
        RANK=str(rank.number),
        LOCAL_RANK=str(rank.number),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(rank.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_RESTART_COUNT="0",
    )


def run_bare(script: str, arguments: list[str]) -> None:
    import runpy

    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _collect_optimizers() -> list[torch.optim.Optimizer]:
    """Keep every optimizer that is made from now on, and the default group of that moment.

    A DDP module that is the last to hold a Gloo group frees it without letting go of the
    interpreter's lock; if a worker of the group wants that lock, neither ends (torch 2.13.0, within
    hundreds of trials with no runtime attached; not seen once somebody else holds the group).
    """
    made: list[torch.optim.Optimizer] = []
    original = torch.optim.Optimizer.__init__

    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)
        _GROUPS.append(dist.group.WORLD)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
    return made


def _root(optimizers: list[torch.optim.Optimizer]) -> str:
    state: dict[str, Any] = {"rng": torch.get_rng_state()}
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(parameters):
            state[f"{number}/{place}"] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                state[f"{number}/{place}/{key}"] = value
    return accelpact.tree_digest(state).root


def on_call(name: str, number: int, act: Callable[[Callable[[], Any]], Any]) -> None:
    """Have `act(call)` stand in for the `number`th call of torch.distributed's function `name`."""
    original = getattr(c10d, name)
    calls = 0

    import functools

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            return act(lambda: original(*args, **kwargs))
        return original(*args, **kwargs)

    setattr(c10d, name, counted)
    setattr(dist, name, counted)


def late(seconds: float) -> Callable[[Callable[[], Any]], Any]:
    """Come to a collective late."""

    def act(call: Callable[[], Any]) -> Any:
        time.sleep(seconds)
        return call()

    return act


def cut(rank: Rank) -> Callable[[Callable[[], Any]], Any]:
    """Break every connection of this process but those to the store."""

    def act(call: Callable[[], Any]) -> Any:
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(entry.name))) as link:
                    if link.family == socket.AF_UNIX:
                        continue
                    if rank.port not in (link.getpeername()[1], link.getsockname()[1]):
                        link.shutdown(socket.SHUT_RDWR)
        return call()

    return act


def fail_before(call: Callable[[], Any]) -> Any:  # noqa: ARG001
    """Fail and issue nothing."""
    raise dist.DistBackendError("injected: the collective failed before it began")


def fail_after(call: Callable[[], Any]) -> Any:
    """Complete a collective and report that it failed, when the others have long gone on."""
    call()
    time.sleep(0.5)
    raise dist.DistBackendError("injected: the collective is complete and says it failed")


def events(directory: Path, rank: int, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the runtime's record of `rank`, or its events of one kind."""
    path = directory / f"rank{rank}.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if kind in (None, entry["event"])]
