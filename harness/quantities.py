"""The break-even model as the command line has it: quantities with units in, lines out."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from harness.breakeven import DAY_S, BreakEven
from harness.spec import SpecError

UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY_S}
_NUMBER = r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
_OPTIONS = {
    "update_s": "update",
    "repair_s": "repair",
    "reject_s": "reject",
    "window_s": "window",
}


def seconds(option: str, text: str) -> float:
    """Read a time, for example `220s`.

    Raises:
        SpecError: it is not a number with a unit.
    """
    match = re.fullmatch(rf"{_NUMBER}({'|'.join(UNITS_S)})\s*", text)
    if match is None:
        raise SpecError(
            f"{option}: expected a number with a unit of {', '.join(UNITS_S)}, for example 220s; "
            f"found {text!r}"
        )
    return float(match[1]) * UNITS_S[match[2]]


def share(option: str, text: str) -> float:
    """Read a share, for example `0.2%` or `0.002`.

    Raises:
        SpecError: it is neither.
    """
    match = re.fullmatch(rf"{_NUMBER}(%?)\s*", text)
    if match is None:
        raise SpecError(f"{option}: expected a share, for example 0.2% or 0.002; found {text!r}")
    return float(match[1]) / (100 if match[2] else 1)


def make(
    *,
    overhead: str,
    age: float,
    update: str,
    repair: str,
    eligible: float = 0.0,
    other: float = 0.0,
    reject: str = "0s",
    window: str = "1d",
) -> BreakEven:
    """Read the options.

    Raises:
        SpecError: names the first that is wrong.
    """
    try:
        return BreakEven(
            overhead=share("overhead", overhead),
            age=age,
            update_s=seconds("update", update),
            repair_s=seconds("repair", repair),
            reject_s=seconds("reject", reject),
            eligible=eligible,
            other=other,
            window_s=seconds("window", window),
        )
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        field, _, rest = str(error).partition(":")
        raise SpecError(f"{_OPTIONS.get(field, field)}:{rest}") from None


def record(found: BreakEven) -> dict[str, Any]:
    """What was asked and what follows, as JSON has it: no number is infinite."""
    every = found.interval_s
    return {
        **dataclasses.asdict(found),
        "saving_s": found.saving_s,
        "guard_s": found.guard_s,
        "gross_s": found.gross_s,
        "rejected_s": found.rejected_s,
        "net_s": found.net_s,
        "needed": found.needed,
        "interval_s": None if every is None or math.isinf(every) else every,
    }


def rows(found: BreakEven) -> list[tuple[str, str]]:
    """Quantities and their values, as a person reads them."""
    return [
        ("saved by a repair (S)", f"{found.saving_s:.1f} s"),
        ("cost of the guard (h T0)", f"{found.guard_s:.1f} s per window"),
        ("cost of refusals (N_other C)", f"{found.rejected_s:.1f} s per window"),
        ("saved by repairs (N_eligible S)", f"{found.gross_s:.1f} s per window"),
        ("gained (dT)", f"{found.net_s:.1f} s per window"),
        ("breaks even at", verdict(found)),
    ]


def verdict(found: BreakEven) -> str:
    """How often a failure must be eligible for nothing to be lost."""
    every = found.interval_s
    if every is None:
        return "no number of eligible failures: a repair saves nothing"
    if math.isinf(every):
        return "no failure at all: it costs nothing"
    return f"one eligible failure in {duration(every)}"


def duration(value: float) -> str:
    """Write seconds in the largest unit that they are one of."""
    unit = next((name for name in ("d", "h", "min") if value >= UNITS_S[name]), "s")
    return f"{value / UNITS_S[unit]:.3g} {unit}"
