"""What it takes to build a group again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from accelpact._communicator._backends import BACKENDS
from accelpact._communicator._world import Entry, look_up
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What it takes to build a group again, read before it is torn down."""

    name: str
    purpose: str
    """`group_desc`, for logs."""
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    backend: str
    """`gloo` or `nccl`."""
    devices: tuple[torch.device, ...]
    timeout: timedelta
    bound: torch.device | None
    """The device that the group was bound to when it was made."""
    entry: Entry
    """How it stands in torch.distributed's maps."""


def describe(group: ProcessGroup) -> Description:
    """Read everything that a replacement of `group` must repeat.

    Raises:
        Rejected: `reject_unsupported` if torch does not know the group, or it
            has a backend that has no communicator class here.
    """
    entry = look_up(group)
    kinds = {part.rpartition(":")[2] for part in entry.config.split(",")}
    if len(kinds) != 1 or not kinds <= BACKENDS.keys():
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected a group of one backend, {' or '.join(BACKENDS)}; found {entry.config}",
        )
    devices = tuple(group._device_types)
    return Description(
        name=entry.name,
        purpose=group.group_desc,
        ranks=entry.ranks,
        backend=kinds.pop(),
        devices=devices,
        timeout=group._get_backend(devices[0]).options._timeout,
        bound=group.bound_device_id,
        entry=entry,
    )


def backend_objection(group: ProcessGroup, description: Description) -> str | None:
    """Return why the communicator of `group` cannot be built again here; None if it can.

    What callers have hung on the old object (completion hooks) would be lost, so that is one.
    """
    if group._has_hooks():
        return f"group {description.name} has completion hooks, which a replacement would lack"
    return BACKENDS[description.backend].objection(group, description.devices)
