"""Heartbeats: a rank that stops answering is noticed, however long the collectives' timeouts are.

Each rank counts up a key of its own and looks at that of the next rank of a ring that has not
ended, so the cost per rank does not grow with their number. What it finds goes into one record that
all read:

======  ===========================================================================
`s<r>`  rank r has not beaten for `silence` seconds
`b<r>`  it does again; it says so itself
`g<r>`  it said farewell
======  ===========================================================================

Silence is counted in the watcher's own beats and not by the clock: a machine that stood still for a
while has let none of them die.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import Store

BEATS_TO_SILENCE = 4
"""Beats that a silent rank has missed."""

_RECORD = "ends"


class Heartbeat:
    """This rank's heartbeat, and its eye on the next rank.

    Attributes:
        ended: `silent` or `gone`, by rank; replaced and never changed.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        silence: float,
        on_beat: Callable[[], None],
    ) -> None:
        """Beat once, so that whoever looks finds a beat.

        Args:
            store: a client that no call of others blocks for long.
            rank: this rank's global rank.
            world_size: number of ranks in W.
            silence: seconds after which a rank that does not beat counts as silent.
            on_beat: called by the heartbeat's thread after each look, with `ended` up to date.
        """
        self.ended: Mapping[int, str] = {}
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval = silence / BEATS_TO_SILENCE
        self._on_beat = on_beat
        self._watched = rank
        self._seen = b""
        self._missed = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        store.append(_RECORD, "")
        self._beat()

    def start(self) -> None:
        """Go on beating, and watch; once every rank has beaten."""
        self._thread = threading.Thread(target=self._run, name="accelpact-heartbeat", daemon=True)
        self._thread.start()

    def close(self, patience: float) -> None:
        """Say farewell, and stop.

        Args:
            patience: seconds to wait for the thread.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join(patience)
        self._store.append(_RECORD, f"g{self._rank} ")

    def _beat(self) -> None:
        self._store.add(f"beat/{self._rank}", 1)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._interval):
                self._beat()
                self._look()
                self._on_beat()
        except dist.DistError:
            return  # the store is gone; whoever depends on it has deadlines of its own

    def _look(self) -> None:
        seen, record = self._store.multi_get([f"beat/{self._watched}", _RECORD])
        self._read(record.decode())
        nearest = self._nearest()
        if nearest != self._watched:
            self._watched, self._seen, self._missed = nearest, b"", 0
        elif seen != self._seen:
            self._seen, self._missed = seen, 0
        else:
            self._missed += 1
            if self._missed >= BEATS_TO_SILENCE:
                self._store.append(_RECORD, f"s{self._watched} ")

    def _read(self, record: str) -> None:
        ended: dict[int, str] = {}
        for entry in record.split():
            kind, rank = entry[0], int(entry[1:])
            if kind == "b":
                ended.pop(rank, None)
            elif kind == "g" or rank not in ended:
                ended[rank] = "gone" if kind == "g" else "silent"
        if ended.get(self._rank) == "silent":
            self._store.append(_RECORD, f"b{self._rank} ")
            del ended[self._rank]
        self.ended = ended

    def _nearest(self) -> int:
        """Return the next rank of the ring that has not ended; this one, if there is none."""
        ring = ((self._rank + step) % self._world_size for step in range(1, self._world_size))
        return next((rank for rank in ring if rank not in self.ended), self._rank)
