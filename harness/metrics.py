"""Pure functions from the records of a run to its measures."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from harness.records import Ledger, References
from harness.timeline import Timeline
from harness.workload.ledger import ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.records import Event, Resources

REPAIR_PHASES = ("guard", "admit", "retire", "rebuild", "rebind", "validate", "release")
SHARES = (
    "start-up",
    "productive",
    "replay",
    "discarded",
    "checkpoint save",
    "detection",
    "recovery",
    "other",
)
_RESTART_MILESTONES = (
    ("process", "restart"),
    ("imported", "import"),
    ("connected", "connect"),
    ("built", "build"),
    ("restored", "restore"),
    ("healed", "heal"),
)
"""Event that ends a phase of a restart, and the phase's name."""


def replayed_updates(timeline: Timeline) -> int:
    """Updates that were executed and committed again, on the rank that did so most."""
    counts = [0]
    for rank in range(timeline.world_size):
        commits = [event.update for event in timeline.select("commit", rank=rank)]
        counts.append(len(commits) - len(set(commits)))
    return max(counts)


def counts_tokens(timeline: Timeline) -> bool:
    """Whether the workload has tokens; else samples are what it gets through."""
    return any(event.tokens is not None for event in timeline.select("commit"))


def committed(timeline: Timeline) -> int:
    """Tokens, or samples, of all ranks in the committed history, each counted once."""
    in_tokens = counts_tokens(timeline)
    return sum(_amount(event, in_tokens=in_tokens) for event in timeline.final_commits())


def _amount(event: Event, *, in_tokens: bool) -> int:
    return (event.tokens or 0) if in_tokens else len(event.samples or [])


def curve(timeline: Timeline) -> list[tuple[float, int]]:
    """(seconds since launch, what all ranks have committed) whenever all reach a new update.

    In tokens, or in samples. An update that is replayed does not move the curve again.
    """
    launch = timeline.launch
    if launch is None:
        return []
    found = [(0.0, 0)]
    total, in_tokens = 0, counts_tokens(timeline)
    for update in range(1, timeline.committed + 1):
        commits = timeline.select("commit", update=update)
        first = {event.rank: event for event in reversed(commits)}
        total += sum(_amount(event, in_tokens=in_tokens) for event in first.values())
        found.append((max(event.t for event in first.values()) - launch, total))
    return found


def data_ledger(timeline: Timeline) -> Ledger:
    """Account for every sample's place in the committed history."""
    samples = [place for event in timeline.final_commits() for place in event.samples or []]
    per_update = max((len(event.samples or []) for event in timeline.select("commit")), default=0)
    missing, duplicated = ledger(
        samples, expected=timeline.committed * per_update * timeline.world_size
    )
    return Ledger(missing=missing, duplicated=duplicated)


def update_seconds(timeline: Timeline) -> float | None:
    """Median time of an update, slowest rank, begin to commit.

    Left out: the first update after a start (it pays for lazy initialization)
    and the one after a fault (healthy ranks wait for the repair in it).
    """
    fault_update = timeline.fault.update if timeline.fault else None
    slowest: dict[tuple[int, int], float] = {}
    first: dict[int, int] = {}
    for rank in range(timeline.world_size):
        begun: Event | None = None
        for event in timeline.of_rank(rank):
            if event.event == "begin":
                begun = event
                first.setdefault(event.attempt, event.update or 0)
            elif event.event == "commit" and begun is not None and event.update is not None:
                key = (event.attempt, event.update)
                slowest[key] = max(slowest.get(key, 0.0), event.t - begun.t)
    times = [
        seconds
        for (attempt, update), seconds in slowest.items()
        if update != first[attempt] and (fault_update is None or update != fault_update + 1)
    ]
    return statistics.median(times) if times else None


def critical_rank(timeline: Timeline) -> int:
    """The rank whose wall time is divided into shares: the first that saw the fault, else 0."""
    if timeline.fault is not None:
        for event in timeline.select("failure"):
            if event.rank is not None and event.t >= timeline.fault.t:
                return event.rank
    return 0


def shares(timeline: Timeline) -> dict[str, float]:
    """Divide the run's wall time, launch to finish, on its critical rank; they add up to 1.

    A run that did not finish is divided to its end.

    start-up      launch to the first update
    productive    updates executed for the first time, begin to commit
    replay        updates executed again
    discarded     updates that were not let commit, up to the fault if it struck in them
    detection     fault to notice
    recovery      notice to the next update's beginning, whichever update that is
    other         digests, loss logging, an update that was cut short
    """
    launch = timeline.launch
    end = timeline.end if timeline.finish is None else timeline.finish
    if launch is None or end is None or end <= launch:
        return {}
    rank = critical_rank(timeline)
    events = [event for event in _with_faults(timeline, rank) if event.t <= end]
    totals = dict.fromkeys(SHARES, 0.0)
    share, since, reached = "start-up", launch, 0
    for place, event in enumerate(events):
        entered = _share_entered(event, events[place + 1 :], reached)
        if event.event == "commit" and event.update is not None:
            reached = max(reached, event.update)
        if entered is None:
            continue
        totals[share] += event.t - since
        share, since = entered, event.t
    totals[share] += end - since
    return {name: seconds / (end - launch) for name, seconds in totals.items()}


def _with_faults(timeline: Timeline, rank: int) -> list[Event]:
    """Events of `rank`, and the faults of others at the moment from which they concern it.

    The absent rank may have committed a little earlier than this one.
    """
    own = timeline.of_rank(rank)
    faults = []
    for fault in timeline.select("fault"):
        if fault.rank != rank:
            commits = timeline.select("commit", update=fault.update, rank=rank)
            moment = max(fault.t, commits[0].t if commits else fault.t)
            faults.append(msgspec.structs.replace(fault, t=moment))
    return sorted([*own, *faults], key=lambda event: event.t)


def _share_entered(event: Event, following: Sequence[Event], reached: int) -> str | None:
    """The share that begins with `event`; None if the current one goes on."""
    if event.event == "begin" and event.update is not None:
        return _share_of_update(event, following, reached)
    return {
        "commit": "other",
        "checkpoint_begin": "checkpoint save",
        "checkpoint": "other",
        "fault": "detection",
        "notice": "recovery",
        "finish": "other",
    }.get(event.event)


def _share_of_update(begin: Event, following: Sequence[Event], reached: int) -> str:
    for event in following:
        if event.event == "commit" and event.update == begin.update:
            return "productive" if begin.update is not None and begin.update > reached else "replay"
        if event.event == "discard":
            return "discarded"
        if event.event == "begin":
            break
    return "other"


def phases_ms(timeline: Timeline) -> dict[str, float]:
    """Milliseconds of every phase between the last notice and the commit of the next update.

    Phases that the strategy timed itself are those of the rank that took longest
    in all. Those of a restart are cut at the moments when the last rank had
    reached each step. Either way they add up.
    """
    notice, resumed = timeline.last_notice, timeline.resumed()
    if notice is None or resumed is None or timeline.fault is None:
        return {}
    timed: dict[int | None, dict[str, float]] = {}
    for event in timeline.select("phase"):
        if event.phase is not None and event.ms is not None and event.t <= resumed:
            timed.setdefault(event.rank, {})[event.phase] = event.ms
    found = max(timed.values(), key=lambda phases: sum(phases.values()), default={})
    if not found:
        found = _restart_phases(timeline, fault=timeline.fault.t, since=notice, until=resumed)
    else:
        found["resume"] = max(0.0, (resumed - notice) * 1e3 - sum(found.values()))
    commit = timeline.slowest(timeline.select("commit", update=(timeline.fault.update or 0) + 1))
    if commit is not None:
        found["next update"] = (commit - resumed) * 1e3
    return found


def _restart_phases(
    timeline: Timeline, *, fault: float, since: float, until: float
) -> dict[str, float]:
    found: dict[str, float] = {}
    now = since
    # A launcher can be at work before the last rank has its notice.
    restarted = _restarted(timeline, since=fault, until=until)
    for name, phase in _RESTART_MILESTONES:
        events = [event for event in timeline.select(name) if since < event.t <= until]
        reached = timeline.slowest(events, of=restarted)
        if reached is not None and reached >= now:
            # In process there is no new interpreter: the restart ends with the connection.
            label = "restart" if name == "connected" and "restart" not in found else phase
            found[label] = (reached - now) * 1e3
            now = reached
    begins = [event for event in timeline.select("begin") if now <= event.t <= until]
    if begins:
        found[_way_on(timeline, since=now, until=until)] = (until - now) * 1e3
    return found


def _way_on(timeline: Timeline, *, since: float, until: float) -> str:
    """What is done between a restart and the update after the fault, by name."""
    for name, phase in (("commit", "replay"), ("discard", "discarded")):
        if any(since < event.t <= until for event in timeline.select(name)):
            return phase
    return "resume"


def _restarted(timeline: Timeline, *, since: float, until: float) -> set[int]:
    """Ranks whose process was started between; all of them if the restart was in process."""
    started = {
        event.rank
        for event in timeline.select("process")
        if since < event.t <= until and event.rank is not None
    }
    return started or set(range(timeline.world_size))


def repair_ms(timeline: Timeline) -> float | None:
    """From the last member's guard to the last member's release; None without such phases.

    What an earlier member waits for the others to have their notice is detection.
    """
    totals: dict[int, float] = {}
    for event in timeline.select("phase"):
        if event.phase in REPAIR_PHASES and event.rank is not None and event.generation == 1:
            totals[event.rank] = totals.get(event.rank, 0.0) + (event.ms or 0.0)
    begun = {
        rank: timeline.select("recover", rank=rank)[0].t
        for rank in totals
        if timeline.select("recover", rank=rank)
    }
    if not totals or len(begun) != len(totals):
        return None
    released = max(begun[rank] + ms / 1e3 for rank, ms in totals.items())
    return (released - max(begun.values())) * 1e3


def floor_ms(timeline: Timeline) -> float | None:
    """Median bare cost of the same repair, slowest rank."""
    times: dict[int, list[float]] = {}
    for event in timeline.select("floor"):
        if event.rank is not None and event.ms is not None:
            times.setdefault(event.rank, []).append(event.ms)
    return max((statistics.median(values) for values in times.values()), default=None)


def references(timeline: Timeline) -> list[References]:
    """Cached references to the retired group, per rank of the repaired group."""
    return [
        References(
            rank=event.rank if event.rank is not None else -1,
            rebound=event.rebound or 0,
            left=event.left or 0,
            holders=event.holders or [],
        )
        for event in timeline.select("references")
    ]


def resources(records: Sequence[Resources]) -> dict[str, dict[str, float]]:
    """Largest value over the ranks, before and after; of several attempts the last."""
    found: dict[str, dict[str, float]] = {}
    last = {(record.rank, record.at): record for record in records}
    for record in last.values():
        values = found.setdefault(record.at, {})
        for name in ("threads", "descriptors", "rss_bytes", "groups", "device_bytes"):
            value = getattr(record, name)
            if value is not None:
                values[name] = max(values.get(name, 0), value)
    return dict(sorted(found.items(), key=lambda item: item[0] != "before"))
