"""What a run is worth, from its records alone. Unknown is a verdict."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from harness.records import FaultRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.records import Drift, Event, Ledger, Verdict
    from harness.spec import Fault, RunSpec
    from harness.timeline import Timeline


_PARTS = {"forward": "forward pass", "backward": "backward pass", "step": "optimizer's step"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict and, unless it is a plain pass, its reason."""

    verdict: Verdict
    reason: str = ""


def evidence(timeline: Timeline, fault: Fault, *, run: str) -> FaultRecord:
    """Decide whether `fault` fired: a rank stayed away, and a peer's collective failed for it."""
    absent = timeline.select("fault", update=fault.frontier)
    if fault.kind == "kill":
        return _killed(timeline, fault, absent, run=run)
    if fault.kind == "error":
        return _erred(timeline, fault, absent, run=run)
    failed = [
        event
        for event in timeline.select("failure", update=fault.update)
        if absent and event.t >= absent[0].t and event.rank != absent[0].rank
    ]
    if not absent:
        text = "no rank stayed away"
    elif not failed:
        text = f"rank {absent[0].rank} stayed away, and no peer's collective failed"
    else:
        text = (
            f"rank {absent[0].rank} stayed away {_where(fault)}; rank "
            f"{failed[0].rank} failed after {failed[0].t - absent[0].t:.2f} s: {failed[0].error}"
        )
    return FaultRecord(run=run, planned=str(fault), fired=bool(failed), evidence=text)


def _killed(timeline: Timeline, fault: Fault, struck: Sequence[Event], *, run: str) -> FaultRecord:
    """Decide whether a rank was killed: it says so, and that life of it says nothing more."""
    if not struck:
        return FaultRecord(run=run, planned=str(fault), fired=False, evidence="no rank was killed")
    rank, attempt, moment = struck[0].rank, struck[0].attempt, struck[0].t
    own = [each for each in timeline.events if (each.rank, each.attempt) == (rank, attempt)]
    silent = not any(each.t > moment for each in own)
    what = "and is silent from then on" if silent else "and went on all the same"
    text = f"rank {rank} was killed {_where(fault)}, {what}"
    return FaultRecord(run=run, planned=str(fault), fired=silent, evidence=text)


def _erred(timeline: Timeline, fault: Fault, struck: Sequence[Event], *, run: str) -> FaultRecord:
    """Decide whether an error was raised on a rank: it says so, and then that its update failed."""
    failed = [
        event
        for event in timeline.select("failure", update=fault.update)
        if struck and event.rank == struck[0].rank and event.t >= struck[0].t
    ]
    text = "no rank failed by itself"
    if failed:
        text = f"rank {failed[0].rank} failed {_where(fault)}: {failed[0].error}"
    return FaultRecord(run=run, planned=str(fault), fired=bool(failed), evidence=text)


def _where(fault: Fault) -> str:
    if fault.inside:
        return f"in the {_PARTS[fault.phase]} of update {fault.update}"
    return f"after update {fault.update}"


def judge(  # noqa: PLR0911  one return per verdict, in order of precedence
    run: RunSpec,
    timeline: Timeline,
    *,
    drift: Drift,
    ledger: Ledger,
    faults: Sequence[FaultRecord],
    reference_deterministic: bool | None,
) -> Judgement:
    """Give the verdict on one run.

    Args:
        run: what was asked.
        timeline: what happened.
        drift: against the reference of the block; for a reference, against the other one.
        ledger: of the committed history.
        faults: evidence for every planned fault of this run.
        reference_deterministic: whether the control pair of the block is bitwise
            equal; None if there is no complete pair.
    """
    silent = [fault.planned for fault in faults if not fault.fired]
    if silent:
        return Judgement(verdict="invalid", reason=f"the fault did not fire: {', '.join(silent)}")
    finished = len({event.rank for event in timeline.select("finish")}) == timeline.world_size
    if not finished:
        return _judge_unfinished(timeline)
    if ledger.missing or ledger.duplicated:
        return Judgement(
            verdict="fail",
            reason=f"data ledger: {ledger.missing} samples missing, {ledger.duplicated} duplicated",
        )
    if drift.equal is None or reference_deterministic is None:
        return Judgement(verdict="unknown", reason="no complete pair of references in this block")
    if run.strategy != "reference" and not reference_deterministic:
        return Judgement(verdict="invalid", reason="the reference is not deterministic")
    if not drift.equal:
        return Judgement(
            verdict="fail",
            reason=f"state differs from the reference from update {drift.first_update} on; "
            f"{drift.ranks_equal} of {drift.ranks} ranks equal at the frontier",
        )
    refusals = timeline.select("reject")
    if refusals:
        return Judgement(verdict="rejected", reason=refusals[0].reason or "")
    if not run.launcher_recovers and _went_back(timeline):
        return Judgement(
            verdict="rejected",
            reason="the launcher started every rank again, from the checkpoint",
        )
    return Judgement(verdict="pass")


def _went_back(timeline: Timeline) -> bool:
    """Whether a launcher started a rank again that no peer then gave the present state."""
    lives = {(each.rank, each.attempt) for each in timeline.select("process") if each.attempt}
    healed = {(each.rank, each.attempt) for each in timeline.select("healed")}
    last = {rank: max(attempt for who, attempt in lives if who == rank) for rank, _ in lives}
    return any(life not in healed for life in last.items())


def _judge_unfinished(timeline: Timeline) -> Judgement:
    """Failed if it said so, or if its launcher gave up a rank that was killed; else unknown."""
    refused = timeline.select("reject")
    if refused:
        return Judgement(verdict="fail", reason=refused[0].reason or "refused, and not restarted")
    boundary = timeline.fault.update if timeline.fault else None
    failed = [event for event in timeline.select("failure") if event.update != boundary]
    failed = failed or timeline.select("failure")
    if failed:
        where = f" in update {failed[0].update}" if failed[0].update is not None else ""
        return Judgement(
            verdict="fail", reason=f"rank {failed[0].rank} failed{where}: {failed[0].error}"
        )
    killed = [event for event in timeline.select("fault") if event.role == "killed"]
    ends = [event.code for event in timeline.select("end") if event.code]
    if killed and ends:
        return Judgement(
            verdict="fail",
            reason=f"rank {killed[0].rank} was killed, and the launcher ended the job with "
            f"status {ends[-1]}",
        )
    return Judgement(verdict="unknown", reason="the run ended without a record of its outcome")
