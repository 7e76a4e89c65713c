"""What it takes to build a group again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from accelpact._communicator._backends import BACKENDS, FAMILIES
from accelpact._communicator._world import Entry, look_up
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a group has of one backend."""

    backend: str
    """Torch's name for it, a key of `BACKENDS`."""
    devices: tuple[torch.device, ...]
    """Types of the devices whose tensors it communicates."""
    prefix: str
    """Under which torch lets it use the store, less its slash."""
    details: Any
    """What only the backend knows, see `Backend.details`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What it takes to build a group again, read before it is torn down."""

    name: str
    purpose: str
    """`group_desc`, for logs."""
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    parts: tuple[Part, ...]
    """One, or one per type of device if those have different backends."""
    timeout: timedelta
    bound: torch.device | None
    """The device that the group was bound to when it was made."""
    entry: Entry
    """How it stands in torch.distributed's maps."""

    @property
    def backend(self) -> str:
        """Names of its backends, for people."""
        return "+".join(part.backend for part in self.parts)


def describe(group: ProcessGroup) -> Description:
    """Read everything that a replacement of `group` must repeat.

    Raises:
        Rejected: `reject_unsupported` if torch does not know the group, or it
            has a backend that is not served here.
    """
    entry = look_up(group)
    _require_known(entry)
    parts = tuple(_parts(group, entry))
    return Description(
        name=entry.name,
        purpose=group.group_desc,
        ranks=entry.ranks,
        parts=parts,
        timeout=group._get_backend(parts[0].devices[0]).options._timeout,
        bound=group.bound_device_id,
        entry=entry,
    )


def _require_known(entry: Entry) -> None:
    unknown = set(entry.kinds.values()) - BACKENDS.keys()
    if unknown:
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected groups of the backends {', '.join(BACKENDS)}; found {entry.config} for "
            f"group {entry.name}",
        )


def _parts(group: ProcessGroup, entry: Entry) -> Iterable[Part]:
    """Yield the parts: like torch, one for all devices if they have the same backend."""
    kinds = entry.kinds
    is_one = len(set(kinds.values())) == 1
    for prefix, kind in list(kinds.items())[: 1 if is_one else None]:
        devices = tuple(group._device_types) if is_one else (torch.device(prefix),)
        details = BACKENDS[kind].details(group._get_backend(devices[0]))
        yield Part(backend=kind, devices=devices, prefix=prefix, details=details)


def backend_objection(group: ProcessGroup, description: Description) -> str | None:
    """Return why the communicator of `group` cannot be built again here; None if it can.

    What callers have hung on the old object (completion hooks) would be lost, so that is one.
    """
    if group._has_hooks():
        return f"group {description.name} has completion hooks, which a replacement would lack"
    for part in description.parts:
        objection = BACKENDS[part.backend].objection(group, part.devices)
        if objection is not None:
            return objection
    return None


def require_served(groups: Iterable[ProcessGroup], *, deadline: float) -> None:
    """Refuse groups that no repair could replace, and settings under which none could begin.

    Args:
        groups: what may have to be replaced.
        deadline: seconds within which a step of a repair must happen.

    Raises:
        Rejected: `reject_unsupported`, with what was found and what is served, in one line.
    """
    backends: dict[str, list[Any]] = {}
    for group in groups:
        description = describe(group)
        for part in description.parts:
            family = BACKENDS[part.backend]
            found = [group._get_backend(device) for device in part.devices]
            backends.setdefault(family.names[0], []).extend(found)
            objection = family.is_asynchronous and family.objection(group, part.devices)
            if objection:
                raise Rejected(Reason.UNSUPPORTED, f"group {description.name}: {objection}")
    wrong = [
        each
        for family in FAMILIES
        if family.names[0] in backends
        for each in family.wrong_settings(backends[family.names[0]], deadline=deadline)
    ]
    if wrong:
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected settings under which a process survives a failed collective, before the "
            f"first group is made; found {'; '.join(wrong)}",
        )
