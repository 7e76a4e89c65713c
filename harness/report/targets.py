"""The speed targets, and whether these records meet them."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from harness.report._format import quotient, table
from harness.report.tables import floor_ratio
from harness.stats import interval

if TYPE_CHECKING:
    from harness.report._view import View

MIN_BLOCKS = 5
SUBJECT = "accelpact"

NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A bound on the recovery of a rival over that of `SUBJECT`."""

    rival: str
    at_least: float


TARGETS = (
    Target(rival="torchft_pg", at_least=0.8),
    Target(rival="nvrx", at_least=30.0),
    Target(rival="cold", at_least=300.0),
)
FLOOR_AT_MOST = 1.5


def targets(view: View) -> str:
    """One row a target: bound, measured, met or not, or why it was not measured."""
    rows = [_recovery(view, target) for target in TARGETS]
    rows.append(_floor(view))
    headers = [
        "measure",
        "target, ratio",
        "median, ratio",
        "low",
        "high",
        "low to high is",
        "n blocks",
        "result",
    ]
    return table(headers, rows)


def _recovery(view: View, target: Target) -> list[object]:
    found = view.ratio("recovery_s", target.rival, SUBJECT)
    head = [f"recovery, {target.rival} / {SUBJECT}", f"at least {target.at_least:g}"]
    if found is None:
        return [*head, *[None] * 4, 0, f"{NOT_MEASURED}: {_why(view, target.rival)}"]
    return [
        *head,
        quotient(found.median),
        quotient(found.low),
        quotient(found.high),
        found.method,
        found.n,
        _result(met=found.median >= target.at_least, n=found.n),
    ]


def _floor(view: View) -> list[object]:
    values = [value for run in view.faulted(SUBJECT) if (value := floor_ratio(run)) is not None]
    head = [f"repair / floor, {SUBJECT}", f"at most {FLOOR_AT_MOST:g}"]
    if not values:
        if not view.faulted(SUBJECT):
            return [*head, *[None] * 4, 0, f"{NOT_MEASURED}: {SUBJECT} did not run with a fault"]
        return [*head, *[None] * 4, 0, f"{NOT_MEASURED}: repair or floor was not recorded"]
    found = interval(values)
    met = statistics.median(values) <= FLOOR_AT_MOST
    return [
        *head,
        quotient(found.median),
        quotient(found.low),
        quotient(found.high),
        found.method,
        found.n,
        _result(met=met, n=found.n),
    ]


def _result(*, met: bool, n: int) -> str:
    if n < MIN_BLOCKS:
        side = "inside" if met else "outside"
        return f"{NOT_MEASURED}: {n} of at least {MIN_BLOCKS} blocks; {side} the target so far"
    return "met" if met else "not met"


def _why(view: View, rival: str) -> str:
    """Name the contender, or the record, that is missing."""
    for name in (SUBJECT, rival):
        if not view.faulted(name):
            return f"{name} did not run with a fault"
        if name not in view.recovered():
            return f"{name} did not recover in every block"
    return "detection or resume was not recorded in a common block"
