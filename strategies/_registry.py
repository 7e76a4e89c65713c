"""Finds contenders by name without importing the packages behind them."""

from __future__ import annotations

import importlib
import importlib.metadata

from strategies._base import Availability, Platform, Strategy, root_cause

_OWN = {
    "reference": "strategies.reference:Reference",
    "cold": "strategies.cold:Cold",
    "cold_ft": "strategies.cold_ft:ColdFt",
    "nvrx": "strategies.nvrx:Nvrx",
    "torchft_pg": "strategies.torchft_pg:TorchftProcessGroup",
    "torchft_manager": "strategies.torchft_manager:TorchftManager",
    "c10d_reconfigure": "strategies.c10d_reconfigure:C10dReconfigure",
    "accelpact": "strategies.accelpact:AccelPact",
    "comm_only": "strategies.comm_only:CommunicatorOnly",
}
ENTRY_POINTS = "accelpact.strategies"


def names() -> list[str]:
    """Names of all contenders: our own first, then those of other packages."""
    others = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return [*_OWN, *sorted(point.name for point in others if point.name not in _OWN)]


def by_default() -> list[str]:
    """Names of those that take part where none is named."""
    return [name for name in names() if not find(name).on_request]


def _load(point: importlib.metadata.EntryPoint) -> type[Strategy]:
    """Import another package's contender; one that cannot be imported is unavailable, not fatal."""
    try:
        loaded: type[Strategy] = point.load()
    except Exception as error:  # noqa: BLE001  whatever it is, it is that package's
        return unavailable(point.name, f"its package failed to load: {root_cause(error)}")
    return loaded


def unavailable(contender: str, reason: str) -> type[Strategy]:
    """Make a contender that only says why it cannot run."""

    class Unavailable(Strategy):
        name = contender
        summary = "another package's contender"

        def availability(self, platform: Platform) -> Availability:
            return Availability(available=False, reason=reason)

    return Unavailable


def find(name: str) -> type[Strategy]:
    """Return the class of contender `name`.

    Raises:
        KeyError: there is none of that name.
    """
    target = _OWN.get(name)
    if target is None:
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            if point.name == name:
                return _load(point)
        raise KeyError(name)
    module, _, attribute = target.partition(":")
    found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return found
