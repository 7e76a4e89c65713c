"""Whether the training thread gets on, as another thread can tell."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelpact._boundary import Boundary

_WORKING_S = 0.01
"""Processor time between two looks from which a thread counts as working."""


class Progress:
    """Looks at the thread that made it, again and again, and says for how long it has hung.

    It hangs when it is inside an update or a collective and neither moves on nor computes. A
    thread that waits for a Gloo collective uses no processor time. One that waits for a CUDA
    device may, so there the time used tells nothing and is left out.
    """

    def __init__(self, boundary: Boundary) -> None:
        """Look at the calling thread."""
        self._boundary = boundary
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._mark: tuple[object, ...] = ()
        self._used = 0.0
        self._since = time.monotonic()

    def hanging(self) -> float:
        """Look, and return the seconds for which no look has seen it get on."""
        now = time.monotonic()
        mark, used = self._where(), self._processor_time()
        working = used - self._used > _WORKING_S and not torch.cuda.is_initialized()
        if mark is None or mark != self._mark or working:
            self._mark, self._since = mark or (), now
        self._used = used
        return now - self._since

    def _where(self) -> tuple[object, ...] | None:
        """Where it is inside an update or a collective; None elsewhere."""
        boundary = self._boundary
        waiting = boundary.waiting
        if boundary.declared and waiting is None:
            return None
        return boundary.frontier, boundary.stepping, waiting, boundary.completed.total()

    def _processor_time(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended, which is no hang
            self._mark = ()
            return self._used
