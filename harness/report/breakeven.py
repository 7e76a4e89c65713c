"""The break-even model (Eq. 4) on a comparison's own figures, or why it cannot be told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.breakeven import BreakEven
from harness.quantities import verdict
from harness.report._format import number, quotient, table
from harness.report._view import median, timed
from harness.stats import REFERENCE

if TYPE_CHECKING:
    from harness.report._view import View

SUBJECT = "accelpact"


def breakeven(view: View) -> str:
    """How often a failure must strike for the runtime to pay, with the interval of its cost."""
    overhead = view.overhead(SUBJECT)
    measured = _measured(view)
    if overhead is None or measured is None:
        return f"Cannot be told: {_missing(view)}."
    age, update_s, repair_s = measured
    rows = []
    for name, ratio in (
        ("median", overhead.ratio),
        ("low", overhead.low),
        ("high", overhead.high),
    ):
        found = BreakEven(overhead=ratio - 1, age=age, update_s=update_s, repair_s=repair_s)
        rows.append([name, quotient(ratio), number(found.guard_s), verdict(found)])
    headers = [
        "fault-free update, it / reference", "ratio", "cost of the guard, s per day",
        "breaks even at",
    ]  # fmt: skip
    text = (
        f"A restart would execute A = {age} updates of {number(update_s)} s again; a repair takes "
        f"{number(1000 * repair_s, digits=3)} ms: S = {number(age * update_s - repair_s)} s."
    )
    return f"{text} {_reading(overhead.n, overhead.low)}\n\n{table(headers, rows, words=1)}"


def _reading(pairs: int, low: float) -> str:
    if pairs == 1:
        return "Whether that pays cannot be told: one pair has no spread."
    if low <= 1:
        return "Whether that pays cannot be told: the interval of the guard's cost includes none."
    return "The guard costs time at both ends of its interval."


def _measured(view: View) -> tuple[int, float, float] | None:
    """A in updates, t_update and T_repair in seconds; None if one of them is missing."""
    runs = timed(view.faulted(SUBJECT))
    repair_ms = median(run.repair_ms for run in runs)
    update_s = median(
        run.update_s for run in view.runs if run.strategy == REFERENCE and not run.faulted
    )
    age = _age(view)
    if repair_ms is None or update_s is None or age is None:
        return None
    return age, update_s, repair_ms / 1000


def _age(view: View) -> int | None:
    """Updates between the checkpoint and the first fault at a boundary."""
    schedule = view.summary.spec.get("schedule")
    if not isinstance(schedule, dict):
        return None
    faults = [
        each for each in schedule.get("faults", []) if isinstance(each, dict)
        and each.get("phase") == "boundary"
    ]  # fmt: skip
    if not faults or "checkpoint_at" not in schedule:
        return None
    age = int(faults[0]["update"]) - int(schedule["checkpoint_at"])
    saving = view.summary.spec.get("saving")
    every = saving.get("every") if isinstance(saving, dict) else None
    return age % int(every) if every else age


def _missing(view: View) -> str:
    if not view.faulted(SUBJECT):
        return f"{SUBJECT} did not run with a fault"
    if view.overhead(SUBJECT) is None:
        return f"{SUBJECT} did not run without a fault beside a reference"
    return "time of an update, time of a repair or age of the checkpoint was not recorded"
