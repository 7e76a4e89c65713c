"""What differs between the communicators of two backends, one file each."""

from __future__ import annotations

from accelpact._communicator._backends._base import Backend, Members, type_of
from accelpact._communicator._backends._gloo import Gloo
from accelpact._communicator._backends._nccl import Nccl
from accelpact._communicator._backends._nccl_settings import has_watchdog

__all__ = ["BACKENDS", "FAMILIES", "Backend", "Members", "has_watchdog", "type_of"]

FAMILIES: tuple[Backend, ...] = (Gloo(), Nccl())
BACKENDS: dict[str, Backend] = {name: family for family in FAMILIES for name in family.names}
"""By the name that torch has for it."""
