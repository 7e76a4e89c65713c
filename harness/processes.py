"""Processes that never outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
GRACE_S = 3.0
_WATCH_S = 0.2


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however it ends.

    A parent that ended before this call is noticed as well, by the id that the
    orphan was handed to.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_parent() -> None:
    """End this process soon after its parent, however that ends.

    For processes that a thread has started: the kernel would end them with that thread.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of descendants whose own parent has ended, so that `end_tree` finds them.

    Only for the time that somebody looks: who does not reap what it adopts collects zombies.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def descendants() -> set[int]:
    """Process ids of all living descendants of this process."""
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def end_tree(keep: set[int]) -> list[int]:
    """End and reap every descendant of this process but those in `keep`, within seconds.

    Returns:
        Ids of the processes that were still there.
    """
    import psutil

    found = [child for child in psutil.Process().children(recursive=True) if child.pid not in keep]
    alive = [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
    for child in alive:
        _signal(child.pid, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(found, timeout=GRACE_S if alive else 0.1)
    for child in stubborn:
        _signal(child.pid, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=GRACE_S)
    return [child.pid for child in alive]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
