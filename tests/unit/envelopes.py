"""Envelopes made by hand, for tests that need one."""

from __future__ import annotations

from typing import Any

from accelpact._envelope import Entry, Envelope, Key, Trial, proven, title

STACK = {
    "torch": "2.14.1",
    "backend": "gloo",
    "backend_version": "2.14.1",
    "device": "cpu x86_64",
    "system": "Linux",
}
ROOTS = {"0": "aa", "1": "bb"}


def key(phase: str = "boundary", **changes: str) -> Key:
    fields = {"platform": title(STACK), "profile": "fsdp1, eager, rebuild", "phase": phase}
    return Key(**{**fields, **changes})


def trial(action: str = "L1", **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "action": action,
        "policy": "always L1",
        "fault": "absent@boundary",
        "verdict": "pass",
        "digests": ROOTS,
        "expected": ROOTS,
    }
    return Trial(**{**fields, **changes})


def entry(*trials: Trial, phase: str = "boundary", **changes: str) -> Entry:
    return Entry(key=key(phase, **changes), actions=proven(trials), trials=trials)


def envelope(*entries: Entry, stack: dict[str, str] | None = None) -> Envelope:
    return Envelope(stack=stack or STACK, entries=entries or (entry(trial()),))
