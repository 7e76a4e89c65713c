"""The runtime's own record: one JSON object per line and event, one file per rank."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "ACCELPACT_EVENTS"
"""Environment variable that names the folder of the records; unset, nothing is written."""

_FIELDS: dict[str, Any] = {
    "generation": None,
    "group": None,
    "ranks": [],
    "frontier": None,
    "trigger": None,
    "phases_ms": {},
    "holders": {"rebound": [], "redirected": [], "left": []},
}
"""Every event has these; what an event does not speak of keeps the value given here."""


class EventLog:
    """Appends events of one rank to `rank<r>.jsonl`; from any thread."""

    def __init__(self, directory: str | None, *, rank: int) -> None:
        """Open the record in `directory`, or write nothing if there is none."""
        self._rank = rank
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        if directory:
            folder = Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(folder / f"rank{rank}.jsonl", flags, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Write one event; it is in the file when this returns, whatever ends the process then.

        Args:
            event: `attach`, `repair`, `release`, `reject` or `exit`.
            fields: those of `_FIELDS` that the event speaks of, and any others.
        """
        if self._descriptor is None:
            return
        entry = {"event": event, "time": time.time(), "rank": self._rank, **_FIELDS, **fields}
        line = json.dumps(entry, default=str) + "\n"
        with self._lock:
            os.write(self._descriptor, line.encode())

    @property
    def kept(self) -> bool:
        """Whether anything is written."""
        return self._descriptor is not None

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None
