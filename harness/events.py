"""The event record: the only thing a worker leaves behind."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from harness.records import Digests, Event, Resources

if TYPE_CHECKING:
    from pathlib import Path

_ENCODER = msgspec.json.Encoder()


class JsonLines:
    """Appends records to a file that several processes share.

    Every record is one `write` to a descriptor opened for appending, so lines
    of different ranks never mix and a killed rank loses nothing it has written.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; create it if needed."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: msgspec.Struct) -> None:
        """Append one record."""
        os.write(self._descriptor, _ENCODER.encode(record) + b"\n")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class Recorder:
    """Writes the records of one rank (or of the supervisor, rank None)."""

    def __init__(self, folder: Path, *, rank: int | None, attempt: int = 0) -> None:
        """Open the record files of the run in `folder`."""
        self.rank = rank
        self.attempt = attempt
        self._events = JsonLines(folder / "events.jsonl")
        self._digests = JsonLines(folder / "digests.jsonl")
        self._resources = JsonLines(folder / "resources.jsonl")

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event, stamped now."""
        fields.setdefault("attempt", self.attempt)
        self._events.write(
            Event(t=time.monotonic(), event=event, rank=self.rank, **fields)  # type: ignore[arg-type]
        )

    def digests(self, update: int, root: str, tensors: dict[str, str]) -> None:
        """Write the state of this rank at a committed update."""
        assert self.rank is not None
        self._digests.write(
            Digests(update=update, rank=self.rank, attempt=self.attempt, root=root, tensors=tensors)
        )

    def resources(self, **fields: Any) -> None:
        """Write what this rank's process holds."""
        assert self.rank is not None
        self._resources.write(
            Resources(t=time.monotonic(), rank=self.rank, attempt=self.attempt, **fields)
        )

    def close(self) -> None:
        """Close all files."""
        for lines in (self._events, self._digests, self._resources):
            lines.close()
