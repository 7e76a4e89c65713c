"""The process that torch writes asynchronous checkpoints in, and its end.

torch keeps one such process per rank in a private name, ends it when the interpreter ends, and uses
it again after it has died (2.13, 2.14). A rank's interpreter does not end by itself, and a restart
inside the process may leave ranks of which some have the process and others do not.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import resource
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from harness.processes import GRACE_S

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_PROCESS = "_CHECKPOINT_PROCESS"
_DESCRIPTORS = 1 << 16


class Uploader:
    """What `async_save` starts in this process from now on."""

    def __init__(self) -> None:
        """Note which processes were there before; make room for the descriptors of the buffers."""
        self._before = {child.pid for child in _spawned()}
        self._future: Future[Any] | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # One per tensor that is handed over, in both processes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _DESCRIPTORS), most))
        _forget()

    def attend(self, future: Future[Any]) -> None:
        """Take note of the save that is under way."""
        self._future = future

    def end(self) -> None:
        """End the process, whatever it does, and have torch forget it."""
        children = [child for child in _spawned() if child.pid not in self._before]
        for child in children:
            child.kill()
        for child in children:
            child.join(GRACE_S)
        if self._future is not None:
            # Its thread must have seen the end before torch's name is cleared, or would set it.
            with contextlib.suppress(FutureTimeout):
                self._future.exception(GRACE_S)
        _forget()


def _forget() -> None:
    """Have torch start a new process for the next save; one that runs idle is ended by torch."""
    executor = importlib.import_module(_EXECUTOR)
    if hasattr(executor, _PROCESS):
        setattr(executor, _PROCESS, None)


def _spawned() -> list[BaseProcess]:
    return [each for each in multiprocessing.active_children() if isinstance(each, SpawnProcess)]
