"""Does the guard pay for itself? The paper's break-even model (Eq. 4)."""

from __future__ import annotations

import dataclasses
import math

DAY_S = 86_400.0
_NOT_NEGATIVE = ("age", "update_s", "repair_s", "reject_s", "eligible", "other")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """dT = N_eligible * S - N_other * C - h * T0, in seconds of training per window."""

    overhead: float
    """h: time that the guard adds to an update, as a share of it; negative if it saves time."""
    age: float
    """A = F - C: updates that a restart would execute again."""
    update_s: float
    """t_update: seconds of an update."""
    repair_s: float
    """T_repair: seconds of a repair."""
    reject_s: float = 0.0
    """C = T_detect + T_reject: seconds lost before a failure is left to a restart."""
    eligible: float = 0.0
    """N_eligible: failures per window that a repair can answer."""
    other: float = 0.0
    """N_other: failures per window that are refused."""
    window_s: float = DAY_S
    """T0: seconds of training that are looked at."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the field, what was expected and what was found.
        """
        for name in (*_NOT_NEGATIVE, "overhead", "window_s"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number; found {value!r}")
            if name in _NOT_NEGATIVE and value < 0:
                raise ValueError(f"{name}: expected 0 or more; found {value!r}")
        if not self.window_s > 0:
            raise ValueError(f"window_s: expected seconds above 0; found {self.window_s!r}")

    @property
    def saving_s(self) -> float:
        """S = A * t_update - T_repair, seconds that a repair saves over a restart's replay."""
        return self.age * self.update_s - self.repair_s

    @property
    def guard_s(self) -> float:
        """Seconds that the guard costs per window, h * T0."""
        return self.overhead * self.window_s

    @property
    def gross_s(self) -> float:
        """N_eligible * S, seconds that repairs save per window."""
        return self.eligible * self.saving_s

    @property
    def rejected_s(self) -> float:
        """N_other * C, seconds that refusals cost per window."""
        return self.other * self.reject_s

    @property
    def net_s(self) -> float:
        """Eq. 4's dT: seconds gained per window; negative if it costs more than it saves."""
        return self.gross_s - self.rejected_s - self.guard_s

    @property
    def needed(self) -> float | None:
        """Eligible failures per window at which nothing is gained or lost.

        0 if it costs nothing; None if no number of them is enough.
        """
        cost = self.rejected_s + self.guard_s
        if cost <= 0:
            return 0.0
        return cost / self.saving_s if self.saving_s > 0 else None

    @property
    def interval_s(self) -> float | None:
        """Seconds of training in which one eligible failure is enough.

        Infinite if it costs nothing; None if no number of failures is enough.
        """
        needed = self.needed
        if needed is None:
            return None
        return self.window_s / needed if needed else math.inf
