"""Finds contenders by name without importing the packages behind them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies._base import Strategy

_OWN = {
    "reference": "strategies.reference:Reference",
    "cold": "strategies.cold:Cold",
    "nvrx": "strategies.nvrx:Nvrx",
    "torchft_pg": "strategies.torchft_pg:TorchftProcessGroup",
    "accelpact": "strategies.accelpact:AccelPact",
    "comm_only": "strategies.comm_only:CommunicatorOnly",
}
ENTRY_POINTS = "accelpact.strategies"


def names() -> list[str]:
    """Names of all contenders: our own first, then those of other packages."""
    others = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return [*_OWN, *sorted(point.name for point in others if point.name not in _OWN)]


def find(name: str) -> type[Strategy]:
    """Return the class of contender `name`.

    Raises:
        KeyError: there is none of that name.
    """
    target = _OWN.get(name)
    if target is None:
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            if point.name == name:
                loaded: type[Strategy] = point.load()
                return loaded
        raise KeyError(name)
    module, _, attribute = target.partition(":")
    found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return found
