"""Hand-made event logs of a run of 2 x 2 ranks: every time in them is chosen, none measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from harness.records import Digests, Event, Resources, write_json
from harness.spec import Fault, RunSpec, Schedule, Spec
from harness.timeline import Timeline
from strategies import Outcome, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from strategies import Failure, Job

CLOCK = 1000.0
"""The monotonic clock at launch. Logs below give seconds since then."""
RANKS = (0, 1, 2, 3)
ABSENT, PEER = 3, 1
"""The rank that stays away, and the one that waits for it; 0 and 2 are the healthy column."""
UPDATES, CHECKPOINT, FAULT = 5, 1, 3
TOKENS = 128
"""Tokens of one rank in one update."""
SAMPLES = 2
"""Samples of one rank in one update."""

SCHEDULE = Schedule(
    updates=UPDATES,
    checkpoint_at=CHECKPOINT,
    faults=(Fault(kind="absent", phase="boundary", update=FAULT),),
)


class Log:
    """Collects events; times are seconds since launch."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, t: float, event: Any, *ranks: int | None, **fields: Any) -> Log:
        """Append `event` of each of `ranks`; without any, of all four."""
        for rank in ranks or RANKS:
            self.events.append(Event(t=CLOCK + t, event=event, rank=rank, **fields))
        return self

    def supervise(self, t: float, event: Any, **fields: Any) -> Log:
        """Append an event of the supervisor."""
        return self.add(t, event, None, **fields)

    def update(
        self, begin: float, commit: float, update: int, *ranks: int, attempt: int = 0
    ) -> Log:
        """Append an update of `ranks`, by default all four."""
        self.add(begin, "begin", *ranks, update=update, attempt=attempt)
        return self.commit(commit, update, *ranks, attempt=attempt)

    def commit(self, t: float, update: int, *ranks: int, attempt: int = 0) -> Log:
        """Append the commits of `ranks`, by default all four."""
        for rank in ranks or RANKS:
            self.add(
                t,
                "commit",
                rank,
                update=update,
                attempt=attempt,
                tokens=TOKENS,
                samples=places(update, rank),
            )
        return self

    def timeline(self) -> Timeline:
        return Timeline(self.events, world_size=len(RANKS))


def places(update: int, rank: int) -> list[int]:
    """Places in the data order that `rank` consumes in `update`."""
    first = ((update - 1) * len(RANKS) + rank) * SAMPLES
    return list(range(first, first + SAMPLES))


def start(log: Log, *ranks: int) -> Log:
    """Launch at 0, the first update begins at 5; checkpoint after it; update 3 commits at 10."""
    log.supervise(0, "launch")
    for t, event in ((1, "process"), (2, "imported"), (3, "connected"), (4, "built")):
        log.add(t, event, *ranks)
    log.update(5, 6, 1, *ranks)
    log.add(6.25, "checkpoint_begin", *ranks, update=1)
    log.add(6.75, "checkpoint", *ranks, update=1)
    log.update(7, 8, 2, *ranks)
    return log.update(9, 10, 3, *ranks)


def uninterrupted() -> Log:
    """5 updates of 1 s each with 1 s between them, finished after 14.5 s."""
    log = start(Log()).update(11, 12, 4).update(13, 14, 5)
    return log.add(14.5, "finish", update=5).supervise(16, "end", code=0)


def struck(log: Log) -> Log:
    """The fault at 10.5; the peer has its notice at 13.5, the absent rank at 13.6."""
    log.add(10.25, "logged", 0, 2, update=3, loss=1.0)
    log.add(10.5, "fault", ABSENT, update=3, role="absent")
    log.add(10.75, "begin", 0, 2, update=4)
    log.add(13.5, "failure", PEER, update=3, error="RuntimeError: timed out")
    log.add(13.5, "notice", PEER, update=3)
    return log.add(13.6, "notice", ABSENT, update=3)


def repaired() -> Log:
    """The group is replaced in place; the healthy ranks wait inside update 4; 17.5 s."""
    log = struck(start(Log()))
    for rank, began, guard, rebuild in ((PEER, 13.6, 0.1, 2.0), (ABSENT, 13.6002, 0.2, 1.5)):
        log.add(began, "recover", rank, update=3)
        log.add(13.9, "phase", rank, phase="guard", ms=guard, generation=1)
        log.add(13.9, "phase", rank, phase="rebuild", ms=rebuild, generation=1)
        log.add(13.9, "references", rank, generation=1, rebound=5, left=0, holders=["root"])
        log.add(13.9, "recovered", rank, update=3, outcome="resumed")
    log.add(14.0, "begin", PEER, update=4).add(14.1, "begin", ABSENT, update=4)
    log.commit(15.0, 4, 0, 1, 2).commit(15.05, 4, ABSENT)
    log.update(16, 17, 5).add(17.5, "finish", update=5)
    for rank, ms in ((PEER, 1.0), (PEER, 2.0), (PEER, 9.0), (ABSENT, 1.5)):
        log.add(17.6, "floor", rank, ms=ms)
    return log.supervise(19, "end", code=0)


def restarted() -> Log:
    """New processes load the checkpoint of update 1 and replay updates 2 and 3; 26.5 s."""
    log = struck(start(Log()))
    for rank, late in ((0, 0.0), (1, 0.0), (2, 0.0), (3, 0.2)):
        log.add(15 + late, "process", rank, attempt=1)
        log.add(17 + late, "imported", rank, attempt=1)
    log.add(17.5, "connected", attempt=1).add(18, "built", attempt=1)
    log.add(18.5, "restored", 0, 1, 3, attempt=1, update=1)
    log.add(18.75, "restored", 2, attempt=1, update=1)
    log.update(19, 20, 2, attempt=1).update(21, 22, 3, attempt=1)
    log.update(23, 24, 4, 0, 1, 3, attempt=1).update(23.2, 24, 4, 2, attempt=1)
    log.update(25, 26, 5, attempt=1).add(26.5, "finish", update=5, attempt=1)
    return log.supervise(28, "end", code=0)


def healed() -> Log:
    """Rank 3 dies; its replica, ranks 2 and 3, comes back and gets update 3's state; 19.5 s."""
    log = start(Log()).add(10.5, "fault", ABSENT, update=3, role="killed")
    log.add(10.75, "failure", PEER, update=3, error="RuntimeError: connection closed")
    log.add(10.75, "notice", PEER, update=3)
    for rank, late in ((2, 0.0), (3, 0.25)):
        log.add(11.25 + late, "process", rank, attempt=1)
        log.add(13.25 + late, "imported", rank, attempt=1)
    log.add(14, "connected", 2, 3, attempt=1).add(14.5, "built", 2, 3, attempt=1)
    log.add(15, "restored", 2, 3, attempt=1, update=1)
    log.add(15.5, "healed", 2, 3, attempt=1, update=3, bytes=1000)
    log.update(15.75, 17, 4, 0, 1).update(15.75, 17, 4, 2, 3, attempt=1)
    log.update(18, 19, 5, 0, 1).update(18, 19, 5, 2, 3, attempt=1)
    log.add(19.5, "finish", 0, 1, update=5).add(19.5, "finish", 2, 3, update=5, attempt=1)
    return log.supervise(21, "end", code=0)


def run_spec(strategy: str = "cold", **changes: Any) -> RunSpec:
    """One planned run of the schedule above; `changes` replace fields."""
    faulted = changes.get("faulted", strategy != "reference")
    fields: dict[str, Any] = {
        "name": f"0-{strategy}",
        "strategy": strategy,
        "variant": "default",
        "block": 0,
        "order": 0,
        "faulted": faulted,
        "control": False,
        "expected": "fail" if faulted and strategy == "comm_only" else "pass",
        "backend": "gloo",
        "spec": Spec(schedule=SCHEDULE),
        "settings": {},
    }
    return RunSpec(**{**fields, **changes})


def digests(log: Log) -> list[Digests]:
    """What every commit of `log` leaves when the state depends on rank and update alone."""
    return [
        digest(event.update, event.rank, attempt=event.attempt)
        for event in log.events
        if event.event == "commit" and event.update is not None and event.rank is not None
    ]


def digest(update: int, rank: int, *, attempt: int = 0, weights: str = "w") -> Digests:
    """The state of a rank, of which `weights` may differ."""
    tensors = {"weights/a": f"{weights}{rank}.{update}", "moments/a": f"m{rank}.{update}"}
    root = "/".join(tensors.values())
    return Digests(update=update, rank=rank, attempt=attempt, root=root, tensors=tensors)


def resources(*, threads: int) -> list[Resources]:
    """What the ranks hold after the first and after the last update."""
    return [
        Resources(
            t=CLOCK,
            rank=rank,
            attempt=0,
            at=at,
            threads=threads + rank,
            descriptors=40,
            rss_bytes=10**8,
            groups=3,
        )
        for at in ("before", "after")
        for rank in RANKS
    ]


def write_lines(path: Path, records: Iterable[msgspec.Struct]) -> None:
    """Write a JSON-lines file."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def write_run(runs: Path, spec: RunSpec, log: Log, states: Iterable[Digests]) -> None:
    """Write the folder of one run below `runs`."""
    folder = runs / spec.name
    folder.mkdir(parents=True)
    write_json(folder / "run.json", spec)
    write_lines(folder / "events.jsonl", log.events)
    write_lines(folder / "digests.jsonl", states)
    write_lines(folder / "resources.jsonl", resources(threads=20))
    (folder / "rank0.log").write_text("what the rank printed\n")


def changed(record: Event, **fields: Any) -> Event:
    """A copy of `record` with other fields."""
    return msgspec.structs.replace(record, **fields)


def planned(run: RunSpec, **changes: Any) -> RunSpec:
    """A copy of `run` with other fields."""
    return dataclasses.replace(run, **changes)


class Dummy(Strategy):
    """A contender of another package, found by its entry point."""

    name = "dummy"
    summary = "gives up"
    distribution = "a-package-that-nobody-has"

    def recover(self, job: Job, failure: Failure) -> Outcome:  # noqa: ARG002
        return Outcome.EXIT
