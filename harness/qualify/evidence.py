"""From the records of one trial: what the runtime asked its envelope, and what came of it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from accelpact import _envelope
from accelpact._envelope import DISCARD, L1, L2, Entry, Key, Trial
from harness import drift
from harness.qualify.trials import ALWAYS_L2, NO_RECOVERY, QUALIFIED
from harness.records import Digests, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from harness.qualify.trials import Policy
    from harness.records import RunSummary
    from harness.spec import Fault

NONE = "none"
"""Action of who has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one rank asked at a failure."""

    key: Key
    action: str
    admitted: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One trial: judged, and not yet put to its key."""

    fault: Fault
    policy: Policy
    summary: RunSummary
    asked: tuple[Asked, ...]
    digests: dict[str, str]
    expected: dict[str, str]


def asked(folder: Path) -> tuple[Asked, ...]:
    """Read from the runtime's record what its ranks asked, each question once.

    It asks with an envelope and without; only with one does the answer matter.
    """
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "admission":
                found.append(
                    Asked(
                        key=Key(**event["key"]),
                        action=event["action"],
                        admitted=event["reason"] is None,
                    )
                )
    return tuple(dict.fromkeys(found))


def final_roots(folder: Path, update: int) -> dict[str, str]:
    """Return rank -> digest of its state at `update`."""
    records = drift.final(read_lines(folder / "digests.jsonl", Digests))
    return {
        str(rank): record.root for (rank, at), record in sorted(records.items()) if at == update
    }


def entries(findings: Sequence[Finding]) -> tuple[tuple[Entry, ...], list[str]]:
    """Put trials to their keys; return the entries, and what has found none."""
    by_key: dict[Key, list[Trial]] = {}
    lost: list[str] = []
    for finding in findings:
        questions = _questions(finding, findings)
        if not questions:
            lost.append(
                f"{finding.summary.division}, {finding.fault.kind}@{finding.fault.phase}, "
                f"{finding.policy.name}: {finding.summary.verdict}, and the runtime was not asked "
                f"({finding.summary.reason})"
            )
        for key, action in questions:
            by_key.setdefault(key, []).append(_trial(finding, action))
    made = [
        Entry(key=key, actions=_envelope.proven(tuple(trials)), trials=tuple(trials))
        for key, trials in by_key.items()
    ]
    return tuple(made), lost


def _questions(finding: Finding, findings: Iterable[Finding]) -> list[tuple[Key, str]]:
    """Return the keys that a trial is evidence for, and of which action."""
    if finding.policy is ALWAYS_L2:
        return list(dict.fromkeys((each.key, L2) for each in finding.asked))
    if finding.policy is QUALIFIED:
        admitted = all(each.admitted for each in finding.asked)
        return list(
            dict.fromkeys((each.key, each.action if admitted else L2) for each in finding.asked)
        )
    if finding.asked:
        return list(dict.fromkeys((each.key, each.action) for each in finding.asked))
    # Without a runtime, or one that was not asked: it was struck as those were that were asked.
    alike = [
        each.key
        for other in findings
        if other.fault == finding.fault and other.summary.division == finding.summary.division
        for each in other.asked
    ]
    if finding.policy is NO_RECOVERY:
        return [(key, NONE) for key in alike[:1]]
    action = DISCARD if finding.fault.inside else L1
    return [(key, action) for key in dict.fromkeys(alike)]


def _trial(finding: Finding, action: str) -> Trial:
    summary = finding.summary
    return Trial(
        action=action,
        policy=finding.policy.name,
        fault=f"{finding.fault.kind}@{finding.fault.phase}",
        verdict=summary.verdict,
        reason=summary.reason,
        replayed_updates=summary.replayed_updates,
        discarded_updates=summary.discarded_updates,
        digests=finding.digests,
        expected=finding.expected,
    )


def is_as_promised(trial: Trial) -> bool:
    """Whether a trial went as its policy must: the others only find out what is so."""
    if trial.policy == NO_RECOVERY.name:
        return trial.verdict == "fail"
    if trial.policy in (ALWAYS_L2.name, QUALIFIED.name):
        return trial.proves(trial.action)
    return True


def asked_for_rebuild(found: Iterable[Asked]) -> bool:
    """Whether groups were rebuilt, and not reconfigured in place."""
    return any("rebuild" in each.key.profile for each in found)
