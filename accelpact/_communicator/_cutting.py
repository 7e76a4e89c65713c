"""Getting threads of this process out of a collective, whichever backend it is of."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from accelpact._communicator._backends import BACKENDS
from accelpact._communicator._world import find
from accelpact._errors import Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accelpact._communicator._backends import Backend

_families: weakref.WeakKeyDictionary[ProcessGroup, tuple[Backend, ...]] = (
    weakref.WeakKeyDictionary()
)
"""Asked at every update, and always the same."""


def interrupt(group: ProcessGroup) -> bool:
    """Make collectives of `group` end that block a thread of this process, or the device.

    All later collectives of `group` fail too, here and, sooner or later, on its other members:
    call it only for a group that is going to be replaced, and not once that has begun. It returns
    at once.

    Returns:
        Whether it could, for every backend of the group.
    """
    cut = {family.cut(group) for family in families_of(group)}
    return cut == {True}


def interrupt_by_name(name: str) -> bool:
    """Interrupt the group of that name; False if there is none."""
    try:
        return interrupt(find(name))
    except Rejected:
        return False


def is_asynchronous(group: ProcessGroup) -> bool:
    """Whether collectives of `group` may only have been issued when their calls return."""
    return any(family.is_asynchronous for family in families_of(group))


def failure(group: ProcessGroup) -> str | None:
    """Return why results of `group` cannot be trusted, where no exception says so."""
    for family in families_of(group):
        found = family.failure(group)
        if found is not None:
            return found
    return None


def families_of(group: ProcessGroup) -> tuple[Backend, ...]:
    """Return the backends of `group` that are served here, each once."""
    known = _families.get(group)
    if known is None:
        found: list[Backend] = []
        for device in group._device_types:
            try:
                family = BACKENDS.get(group._get_backend(device).name())
            except RuntimeError:  # declared for this device and never made
                continue
            if family is not None and family not in found:
                found.append(family)
        known = _families[group] = tuple(found)
    return known
