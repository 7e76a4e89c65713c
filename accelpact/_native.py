"""What a communicator leaves in the process besides Python objects: its threads and descriptors.

A C++ object that owns a communicator (the Reducer of DistributedDataParallel is one) is invisible
to Python: nothing on the heap names the group and its weak reference is dead, yet it lives. Its
threads and descriptors show it.

Other groups have threads of the same names, and a replacement is built while the old group is on
its way out. So threads are told apart by identity (thread id and start time), not counted: from
those that ran before the group was retired, as many must have ended as one such group has.

Names seen in torch 2.13.0 and 2.14.1 (Gloo); those of NCCL are read in the source.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelpact._communicator import has_watchdog

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_GLOO_WORKER, _GLOO_LOOP, _NCCL_WATCHDOG = "pt_gloo_runloop", "gloo_tcp_loop", "pt_nccl_watchdg"
_NAMES = frozenset((_GLOO_WORKER, _GLOO_LOOP, _NCCL_WATCHDOG))
"""The kernel cuts a thread's name at 15 characters."""

_POLL_S = 0.005
_SELF = Path("/proc/self")


class Thread(NamedTuple):
    """One thread of this process; ids are used again, start times are not."""

    tid: int
    started: int
    name: str


class Descriptor(NamedTuple):
    """One open descriptor; the target has an inode number."""

    number: int
    target: str


def threads() -> frozenset[Thread]:
    """Return the threads that communicators run in this process."""
    return frozenset(filter(None, map(_read_thread, (_SELF / "task").iterdir())))


def _read_thread(task: Path) -> Thread | None:
    """Describe a thread, if it is a communicator's and has not ended meanwhile."""
    try:
        name = (task / "comm").read_text().strip()
        if name not in _NAMES:
            return None
        # Fields after the name, which is in parentheses and may contain anything.
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Thread(int(task.name), int(fields[19]), name)


def descriptors() -> frozenset[Descriptor]:
    """Return the open sockets and pipes, which are what a communicator opens and can be told apart.

    (It opens anonymous inodes too, which all look alike.)
    """
    found = []
    for entry in (_SELF / "fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:")):
            found.append(Descriptor(int(entry.name), target))
    return frozenset(found)


class Footprint:
    """What one group has in this process, noted while it is there.

    Attributes:
        threads: how many of each name the group runs; empty if its backend is not known here.
        num_descriptors: how many descriptors it has open at least.
    """

    def __init__(self, backends: list[Any]) -> None:
        """Note what runs now.

        Args:
            backends: the backend objects of the group; none of them is kept.
        """
        self.threads: Counter[str] = Counter()
        self.num_descriptors = 0
        for backend in backends:
            self._expect(backend)
        self._proven = False
        self._tids = {int(task.name) for task in (_SELF / "task").iterdir()}
        with _LOCK:
            self._threads = threads()
            _NOTED.add(self)
        self._descriptors = descriptors()

    def _expect(self, backend: Any) -> None:
        kind = backend.name()
        if kind == "gloo":
            num_devices = len(backend.options._devices)
            self.threads += Counter({_GLOO_WORKER: backend.options._threads})
            self.threads += Counter({_GLOO_LOOP: num_devices})
            # Those of the connections are closed when an operation fails. That of the device, on
            # which it listens, is open as long as the device lives.
            self.num_descriptors += num_devices
        elif kind == "nccl" and has_watchdog(os.environ):
            # The thread of `nccl2` gives itself no name.
            self.threads += Counter({_NCCL_WATCHDOG: 1})

    def settle(self) -> None:
        """Note threads that had no name yet: call it once more before the group may go.

        A thread gives itself its name some time after it has started.
        """
        with _LOCK:
            self._threads |= {thread for thread in threads() if thread.tid in self._tids}

    def left(self) -> str:
        """Describe what of the group is still there; empty if all of it has gone.

        What has gone counts for one group only, whichever asks first.
        """
        missing = self._missing()
        parts = [f"{count} {name}" for name, count in sorted(missing.items())]
        still = [f"{', '.join(parts)} threads still run"] if parts else []
        num_closed = len(self._descriptors - descriptors())
        if num_closed < self.num_descriptors:
            still.append(f"{self.num_descriptors - num_closed} descriptors are still open")
        return " and ".join(still)

    @property
    def works(self) -> bool:
        """Whether the communicator itself is there: its workers are.

        Without them, a device that is left has nobody to serve. The result of an operation keeps
        it, for example DDP's of its last backward pass, until the next one.
        """
        return bool(self._missing().keys() & {_GLOO_WORKER, _NCCL_WATCHDOG})

    def _missing(self) -> Counter[str]:
        """Count the threads of the group that have not ended, by name."""
        with _LOCK:
            if self._proven:
                return Counter()
            alive = {thread[:2] for thread in threads()}
            gone = {thread for thread in self._threads if thread[:2] not in alive}
            mine = _take(gone - _CLAIMED, self.threads)
            missing = self.threads - Counter(thread.name for thread in mine)
            if not missing:
                self._proven = True
                _CLAIMED.update(mine)
                # Nobody else asks for those that no other footprint has noted.
                waiting = [each._threads for each in _NOTED if not each._proven]
                _CLAIMED.intersection_update(frozenset[Thread]().union(*waiting))
            return missing

    def wait(self, seconds: float) -> str:
        """Wait until nothing is left, `seconds` at most; describe what is."""
        end = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        return left


_LOCK = threading.Lock()
_CLAIMED: set[Thread] = set()
"""Threads that have ended and were counted as those of a group whose end was proven."""
_NOTED: weakref.WeakSet[Footprint] = weakref.WeakSet()
"""Every footprint there is."""


def _take(gone: set[Thread], wanted: Counter[str]) -> list[Thread]:
    """Return up to as many of `gone` of each name as are `wanted`."""
    chosen: list[Thread] = []
    room = Counter(wanted)
    for thread in sorted(gone):
        if room[thread.name] > 0:
            room[thread.name] -= 1
            chosen.append(thread)
    return chosen


def backends(group: ProcessGroup) -> list[Any]:
    """Return the backend objects of `group`, each once."""
    found: list[Any] = []
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # declared for this device and never made
            continue
        if not any(backend is each for each in found):
            found.append(backend)
    return found
