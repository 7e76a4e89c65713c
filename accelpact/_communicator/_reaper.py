"""Dropping retired groups."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PATIENCE_S = 10.0
_POLL_S = 0.005


class Reaper:
    """Drops the last references to retired groups away from the training thread.

    The destructor of a Gloo group joins its threads, which takes 15 to 20 ms, and with an
    operation in flight it blocks until that operation times out.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._held: list[ProcessGroup] = []
        self._thread: threading.Thread | None = None

    def take(self, group: ProcessGroup) -> None:
        """Keep `group` alive until `release`."""
        self._held.append(group)

    def release(self) -> None:
        """Let go of everything held, each once nobody else holds it, in a thread of its own."""
        held, self._held = self._held, []
        if held:
            self._thread = threading.Thread(
                target=_drop_last,
                args=(held, self._thread),
                name="accelpact-reaper",
                daemon=True,
            )
            self._thread.start()

    def join(self) -> None:
        """Wait a bounded time until everything released is gone."""
        if self._thread is not None:
            self._thread.join(2 * _PATIENCE_S)


def _drop_last(held: list[ProcessGroup], before: threading.Thread | None) -> None:
    """Empty `held`, waiting a bounded time for the frames that still name its groups.

    A thread that was started `before` is waited for, so that the last one's end is all's end.
    """
    if before is not None:
        before.join()
    end = time.monotonic() + _PATIENCE_S
    while held:
        # One reference in the list and one as the argument of getrefcount.
        while sys.getrefcount(held[-1]) > 2 and time.monotonic() < end:
            time.sleep(_POLL_S)
        held.pop()
