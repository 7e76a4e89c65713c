"""The settings that were tried for every contender, and what each gave.

`strategies/tuning.json` is the record of `accelpact tune`; reports quote it with
the stack that it was measured on.
"""

from __future__ import annotations

import statistics
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

import strategies
from harness.records import Tried
from harness.stats import recovery_s

if TYPE_CHECKING:
    from harness.records import Summary

FILE = "tuning.json"


def tried(name: str) -> list[Tried]:
    """What was tried for contender `name`; empty if nothing was recorded."""
    path = resources.files(strategies).joinpath(FILE)
    if not path.is_file():
        return []
    found = msgspec.json.decode(path.read_bytes(), type=dict[str, list[Tried]])
    return found.get(name, [])


def from_summary(summary: Summary) -> dict[str, list[Tried]]:
    """Collect the variants of the faulted runs in `summary`, by contender."""
    packages = summary.environment.get("packages", {})
    source = f"torch {packages.get('torch')}, {summary.environment.get('processor')}, "
    source += f"{summary.environment.get('cores')} cores, {summary.spec.get('workload')}"
    found: dict[str, dict[str, list[Tried]]] = {}
    for run in summary.runs:
        if not run.faulted or run.verdict == "not_run":
            continue
        group = [
            other
            for other in summary.runs
            if other.faulted and (other.strategy, other.variant) == (run.strategy, run.variant)
        ]
        options = strategies.find(run.strategy).variants[run.variant]
        times = [value for other in group if (value := recovery_s(other)) is not None]
        updates = [other.update_s for other in group if other.update_s is not None]
        found.setdefault(run.strategy, {})[run.variant] = [
            Tried(
                variant=run.variant,
                options=msgspec.to_builtins(options),
                n=len(group),
                recovery_s=statistics.median(times) if times else None,
                update_s=statistics.median(updates) if updates else None,
                verdicts=sorted(other.verdict for other in group),
                source=source,
            )
        ]
    return {name: [row[0] for row in rows.values()] for name, rows in found.items()}
