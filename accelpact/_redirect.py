"""Where calls made with a retired group go."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Redirects:
    """Retired group -> the group that has its place now. Keeps no retired group alive.

    A variable of the script cannot be rebound while its frame runs, so the script may go on
    calling with the group it had.
    """

    def __init__(self) -> None:
        """Redirect nothing yet."""
        self._current: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, old: ProcessGroup, new: ProcessGroup) -> None:
        """Send calls made with `old`, and with whatever was sent to `old`, to `new`."""
        for before, target in list(self._current.items()):
            if target is old:
                self._current[before] = new
        self._current[old] = new

    def current(self, group: ProcessGroup | None) -> ProcessGroup | None:
        """Return the group that has the place of `group`; itself if it was never retired."""
        if not self._current or group is None:
            return group
        return self._current.get(group, group)
