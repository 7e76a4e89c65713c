"""The checks: each names one fault of a contender, and says where the records show it.

A check returns the empty string if there is nothing to say against the contender. What only a run
that went on to the end can be asked is not held against one that had declared that it would not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from harness import metrics, verdicts
from harness.conformance.evidence import COMPONENTS, Evidence, by_component

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMED = 3
_START_S = 60.0
"""For the processes of one start, and for the updates, on a busy machine."""
_COUNTED = ("groups", "threads", "descriptors")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check says of one run."""

    check: str
    fault: str
    """One line; empty if the contender passes."""


def outcome(evidence: Evidence) -> str:
    """It does not recover, refuse or fail as it declares for a fault of this kind."""
    refused = evidence.timeline.select("reject")
    ended = "rejected" if refused else "pass"
    found = ended if evidence.finished else "fail"
    if found == evidence.run.expected:
        return ""
    last = evidence.timeline.committed
    why = f": {refused[0].reason}" if refused else ""
    return f"declared {evidence.run.expected!r}; found {found!r} at update {last}{why}"


def weights(evidence: Evidence) -> str:
    """A rank's weights, or the gradients that they were trained on, are not the reference's."""
    return _differs(evidence, "weights")


def moments(evidence: Evidence) -> str:
    """A rank lost or changed a moment of the optimizer."""
    return _differs(evidence, "moments")


def steps(evidence: Evidence) -> str:
    """A rank's optimizer has counted another number of steps."""
    return _differs(evidence, "steps")


def rng(evidence: Evidence) -> str:
    """A rank has another random state than in the reference, perhaps that of another rank."""
    return _differs(evidence, "rng")


def frontier(evidence: Evidence) -> str:
    """A rank is at another update than it has committed."""
    return _differs(evidence, "frontier")


def cursor(evidence: Evidence) -> str:
    """A sample is missing from the committed history or twice in it, or a cursor is elsewhere."""
    ledger = metrics.data_ledger(evidence.timeline)
    if ledger.missing or ledger.duplicated:
        return f"{ledger.missing} samples missing, {ledger.duplicated} duplicated"
    return _differs(evidence, "cursor")


def _differs(evidence: Evidence, component: str) -> str:
    assert component in COMPONENTS
    update, found = evidence.first_difference()
    names = by_component(found).get(component, [])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"differs from update {update} on: {', '.join(names[:_NAMED])}{more}" if names else ""


def trained_on(evidence: Evidence) -> str:
    """It says that it has recovered, but not every rank trained on to the last update."""
    if not evidence.finished:
        return ""  # it does not say so
    last = evidence.run.spec.schedule.updates
    committed = evidence.timeline.committed
    if committed < last:
        return f"every rank finished, and only {committed} of {last} updates were committed by all"
    for rank in range(evidence.timeline.world_size):
        roots = [record.root for record in evidence.digests if record.rank == rank]
        if len(set(roots)) < last:
            return f"rank {rank}: an update changed nothing; {len(set(roots))} states in {last}"
    return ""


def bounded_time(evidence: Evidence) -> str:
    """It waits for longer than its deadlines allow, or until somebody ends it."""
    ended = evidence.timeline.select("end")
    if not ended or ended[-1].code is None:
        return "it recorded nothing more and had to be ended"
    if evidence.timeline.launch is None or evidence.timeline.end is None:
        return "the record has no beginning or no end"
    seconds = evidence.timeline.end - evidence.timeline.launch
    timeouts, faults = evidence.run.spec.timeouts, len(evidence.run.spec.schedule.faults)
    # Each fault may cost a detection, a meeting of all ranks and a start.
    limit = _START_S + faults * (timeouts.group + timeouts.barrier + _START_S)
    return f"took {seconds:.0f} s; at most {limit:g} s" if seconds > limit else ""


def left_behind(evidence: Evidence) -> str:
    """A process holds more than before the fault, or was not torn down in time."""
    if not evidence.finished:
        return ""
    last = {(record.rank, record.at): record for record in evidence.resources}
    for rank in range(evidence.timeline.world_size):
        closed = evidence.timeline.select("closed", rank=rank)
        if not closed:
            return f"rank {rank}: ended without being torn down"
        if closed[-1].reason:
            return f"rank {rank}: {closed[-1].reason}"
        before, after = last.get((rank, "before")), last.get((rank, "after"))
        if before is None or after is None:
            return f"rank {rank}: its resources were not recorded"
        # A restart in the same process brings threads of its own; groups it must have dropped.
        counted = _COUNTED if after.attempt == before.attempt else _COUNTED[:1]
        more = [
            f"{getattr(after, kind) - getattr(before, kind)} {kind}"
            for kind in counted
            if getattr(after, kind) > getattr(before, kind)
        ]
        if more:
            return f"rank {rank}: {', '.join(more)} more than before the fault"
    return ""


def honest_events(evidence: Evidence) -> str:
    """It claims what did not happen: no fault fired, nothing failed, or the counts disagree."""
    timeline = evidence.timeline
    for fault in evidence.run.spec.schedule.faults:
        record = verdicts.evidence(timeline, fault, run=evidence.run.name)
        if not record.fired:
            return f"{record.planned} did not fire: {record.evidence}"
    claimed = timeline.select("recovered")
    failed = timeline.select("failure")
    if any(not failed or event.t < failed[0].t for event in claimed):
        return f"rank {claimed[0].rank} recovered before anything had failed"
    commits = sorted((each.rank or 0, each.update or 0) for each in timeline.select("commit"))
    digested = sorted((each.rank, each.update) for each in evidence.digests)
    if evidence.finished and commits != digested:
        return f"{len(commits)} commits are recorded, and {len(digested)} states"
    stale = [each for each in metrics.references(timeline) if each.left]
    if evidence.finished and stale:
        return f"rank {stale[0].rank}: {stale[0].left} references still name the retired group"
    return ""


CHECKS: dict[str, Callable[[Evidence], str]] = {
    check.__name__: check
    for check in (
        outcome,
        weights,
        moments,
        steps,
        rng,
        cursor,
        frontier,
        trained_on,
        bounded_time,
        left_behind,
        honest_events,
    )
}


def run_checks(evidence: Evidence) -> list[Finding]:
    """Apply every check, in order."""
    return [Finding(check=name, fault=check(evidence)) for name, check in CHECKS.items()]
