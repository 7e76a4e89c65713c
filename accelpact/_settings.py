"""What can be set, with its defaults."""

from __future__ import annotations

import dataclasses

REPLACEMENTS = ("auto", "rebuild", "reconfigure")
DRIVES = ("auto", "manual")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one job; equal on all ranks."""

    deadline: float = 30.0
    """Seconds within which each step of a repair must happen."""
    patience: float = 30.0
    """Seconds for which a rank that has not come to a repair yet is waited for."""
    silence: float = 2.0
    """Seconds after which a rank whose heartbeat is missing counts as silent; it beats four times
    as often."""
    replacement: str = "auto"
    """`rebuild` under the old name and rebind, `reconfigure` in place, or `auto`: the latter where
    torch and the group can, else the former."""
    drive: str = "auto"
    """`auto`: an optimizer step commits, and a boundary collective that fails is repaired and
    issued again. `manual`: the script calls `Pact.commit` and `Pact.repair`."""
    audit: bool = True
    """Whether a repair is followed by the proof that nothing names the retired group."""
    envelope: str | None = None
    """File of proven recoveries, which nothing else is then tried; by default what the environment
    variable `ACCELPACT_ENVELOPE` names. Without either, everything is tried."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the field, what was expected and what was found.
        """
        for name in ("deadline", "patience", "silence"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}: expected seconds above 0; found {value!r}")
        for name, allowed in (("replacement", REPLACEMENTS), ("drive", DRIVES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: expected {', '.join(allowed)}; found {getattr(self, name)!r}"
                )
