"""Retiring a group and building its replacement."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accelpact._communicator import _interrupt
from accelpact._communicator._backends import BACKENDS, probe_device
from accelpact._communicator._world import put_in, take_out
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from accelpact._communicator._describe import Description


def retire(group: ProcessGroup, description: Description, *, deadline: float) -> None:
    """Unregister `group` and stop its communicator; its name becomes free.

    The object itself lives on in whatever still refers to it: see `Reaper`.

    Args:
        group: the group to retire.
        description: what `describe` said of it.
        deadline: seconds within which the communicator must have stopped.
    """
    BACKENDS[description.backend].stop(group, deadline=deadline)
    take_out(group, description.entry)


def rebuild(
    description: Description, *, store: Store, rank: int, deadline: float | None = None
) -> ProcessGroup:
    """Build and register the replacement; every member calls this with the same `store`.

    Args:
        description: what `describe` said of the retired group.
        store: a store prefix that no earlier attempt has used.
        rank: this rank's global rank.
        deadline: seconds within which all members must connect, if less than the group's timeout.
    """
    group = connect(description, store=store, rank=rank, deadline=deadline)
    group._set_group_name(description.name)
    group._set_group_desc(description.purpose)
    if description.bound is not None:
        group.bound_device_id = description.bound
    entry = description.entry
    if not entry.is_default:
        entry = dataclasses.replace(entry, store=store)
    # New groups go on to meet in the store of the default group, which all ranks have in common
    # and which is nobody else's: a rank that waits in it for the others keeps its client busy.
    put_in(group, entry)
    return group


def connect(
    description: Description, *, store: Store, rank: int, deadline: float | None = None
) -> ProcessGroup:
    """Build a group that torch.distributed does not know of (no name, no registration)."""
    ranks = description.ranks
    kind = BACKENDS[description.backend]
    group = dist.ProcessGroup(store, ranks.index(rank), len(ranks))
    group._set_default_backend(kind.type())
    timeout = description.timeout
    backend = kind.create(
        dist.PrefixStore(f"{description.entry.part}/", store),
        name=description.name,
        ranks=ranks,
        position=ranks.index(rank),
        timeout=timeout,
        deadline=timeout if deadline is None else timedelta(seconds=deadline),
    )
    for device in description.devices:
        group._register_backend(device, kind.type(), backend)
    _interrupt.prepare(group)  # the keys of a generation are deleted some time
    return group


def rehearse(description: Description, *, store: Store, rank: int) -> ProcessGroup:
    """Build and probe a group of this rank alone, so that a repair is not the first to do so.

    Returns:
        The group, for the caller to drop where that may take its time.
    """
    alone = dataclasses.replace(description, ranks=(rank,))
    group = connect(alone, store=dist.PrefixStore(f"rehearsal/{rank}/", store), rank=rank)
    probe(group, alone)
    return group


def probe(group: ProcessGroup, description: Description, *, deadline: float | None = None) -> None:
    """Check with an integer all-reduce that `group` computes the right sum.

    Args:
        group: the group to try.
        description: what `describe` said of its predecessor.
        deadline: seconds for it, if less than the group's timeout.

    Raises:
        Rejected: `reject_probe_failed` with expected and found sum.
    """
    size = len(description.ranks)
    device = probe_device(description.devices)
    value = torch.tensor([group.rank() + 1], dtype=torch.int64, device=device)
    options = dist.AllreduceOptions()
    if deadline is not None:
        options.timeout = min(description.timeout, timedelta(seconds=deadline))
    group.allreduce([value], options).wait()
    expected, found = size * (size + 1) // 2, int(value.item())
    if found != expected:
        raise Rejected(
            Reason.PROBE_FAILED,
            f"expected the members' sum {expected}; found {found} on group {description.name}",
        )
