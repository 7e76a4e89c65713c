"""Progress of a comparison on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

    from harness.records import Event
    from harness.spec import RunSpec

_EVERY_S = 10.0
"""Without a terminal, an update is reported this often."""


class Progress:
    """Tells a person what a comparison is doing."""

    def __init__(self) -> None:
        """Write to stderr, which results never go to."""
        self._console = Console(stderr=True, highlight=False)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._done = 0
        self._total = 0

    @contextmanager
    def over(self, total: int) -> Iterator[None]:
        """Count `total` runs while the body lasts."""
        self._done, self._total = 0, total
        if not self._console.is_terminal:
            yield
            return
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Bar(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task("starting", total=total)
            yield
        self._bar = None

    @contextmanager
    def run(self, run: RunSpec) -> Iterator[Watch]:
        """Report one run while the body lasts."""
        yield Watch(self, run)
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def note(self, text: str, *, lasting: bool) -> None:
        """Say `text`; if it is not lasting, only the bar shows it."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
            if lasting:
                self._console.print(text, soft_wrap=True, markup=False)
        elif lasting:
            place = f"[{self._done + 1}/{self._total}] " if self._total else ""
            self._console.print(place + text, soft_wrap=True, markup=False)


class Watch:
    """Turns one run's events into progress."""

    def __init__(self, progress: Progress, run: RunSpec) -> None:
        """Say that `run` starts."""
        self._progress = progress
        self._run = run
        self._began = self._spoke = time.monotonic()
        self._updates = run.spec.schedule.updates
        self._absent: int | None = None
        kind = "with the fault" if run.faulted else "without a fault"
        progress.note(f"{run.name}: starting {run.spec.mesh} ranks, {kind}", lasting=True)

    def event(self, event: Event) -> None:
        """Take note of one event."""
        text = self._tell(event)
        if text is not None:
            self._progress.note(f"{self._run.name}: {text}", lasting=True)
        elif event.event == "commit" and event.rank == 0:
            now = time.monotonic()
            self._progress.note(
                f"{self._run.name}: update {event.update}/{self._updates}",
                lasting=now - self._spoke > _EVERY_S,
            )
            if now - self._spoke > _EVERY_S:
                self._spoke = now

    def _tell(self, event: Event) -> str | None:
        if event.event == "fault":
            self._absent = event.rank
            what = {"killed": "is killed", "absent": "stays away"}.get(
                event.role or "", f"fails in its {event.phase}"
            )
            return f"fault after update {event.update}: rank {event.rank} {what}"
        if event.event == "recovered" and event.rank == self._absent:
            return f"rank {event.rank} has the notice; {self._run.strategy} answers {event.outcome}"
        if event.event == "restored" and event.rank == 0:
            return f"restarted, checkpoint of update {event.update} loaded"
        if event.event == "reject":
            return f"rank {event.rank} refuses: {event.reason}"
        return None

    def ended(self, status: int | None) -> None:
        """Say that the run is over."""
        seconds = time.monotonic() - self._began
        how = "stalled and was ended" if status is None else f"exit {status}"
        self._progress.note(f"{self._run.name}: {how}, {seconds:.1f} s", lasting=True)
