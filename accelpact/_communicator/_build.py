"""Retiring a group and building its replacement."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accelpact._communicator import _interrupt
from accelpact._communicator._aside import await_idle_device, bounded
from accelpact._communicator._backends import BACKENDS, Members, type_of
from accelpact._communicator._cutting import families_of, interrupt
from accelpact._communicator._world import put_in, take_out
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup, Store

    from accelpact._communicator._describe import Description, Part


def stop(groups: Sequence[ProcessGroup], *, deadline: float) -> None:
    """Cut `groups` and wait until the device has let go of all of them.

    Args:
        groups: what is going to be replaced.
        deadline: seconds within which that must be done.

    Raises:
        Rejected: `reject_deadline`, if it is not.
    """
    end = time.monotonic() + deadline
    for group in groups:
        interrupt(group)  # all of them before the first is waited for
    for group in groups:
        for family in families_of(group):
            family.stop(group, end=end)
    await_idle_device(end)


def retire(group: ProcessGroup, description: Description, *, deadline: float) -> None:
    """Unregister `group` and stop its communicator; its name becomes free.

    The object itself lives on in whatever still refers to it: see `Reaper`.

    Args:
        group: the group to retire.
        description: what `describe` said of it.
        deadline: seconds within which the communicator must have stopped.
    """
    stop([group], deadline=deadline)
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
    group = dist.ProcessGroup(store, ranks.index(rank), len(ranks))
    # Of several backends, that of the device: torch lists the host first.
    group._set_default_backend(type_of(description.parts[-1].backend))
    if description.bound is not None:
        group.bound_device_id = description.bound  # it goes to backends as they are registered
    timeout = description.timeout
    end = time.monotonic() + (timeout.total_seconds() if deadline is None else deadline)
    for part in description.parts:
        members = Members(
            name=description.name,
            ranks=ranks,
            position=ranks.index(rank),
            timeout=timeout,
            deadline=timedelta(seconds=max(0.001, end - time.monotonic())),
            bound=description.bound,
        )
        prefix = dist.PrefixStore(f"{part.prefix}/", store)
        backend = BACKENDS[part.backend].create(prefix, members, part.details)
        for device in part.devices:
            group._register_backend(device, type_of(part.backend), backend)
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
    """Check with an integer all-reduce per backend that `group` computes the right sum.

    Args:
        group: the group to try.
        description: what `describe` said of its predecessor.
        deadline: seconds for each, if less than the group's timeout.

    Raises:
        Rejected: `reject_probe_failed` with expected and found sum; `reject_deadline`, if a device
            does not come to it.
    """
    timeout = description.timeout
    limit = timeout if deadline is None else min(timeout, timedelta(seconds=deadline))
    size = len(description.ranks)
    expected = size * (size + 1) // 2
    for part in description.parts:
        found = _sum_of_positions(group, part, limit)
        if found != expected:
            raise Rejected(
                Reason.PROBE_FAILED,
                f"expected the members' sum {expected}; found {found} on group {description.name}",
            )


def _sum_of_positions(group: ProcessGroup, part: Part, limit: timedelta) -> int:
    """Return the sum of the members' positions, from 1."""
    options = dist.AllreduceOptions()
    options.timeout = limit

    def compute() -> int:
        value = torch.tensor([group.rank() + 1], dtype=torch.int64, device=_probe_device(part))
        group.allreduce([value], options).wait()
        return int(value.item())

    if not BACKENDS[part.backend].is_asynchronous:
        return compute()  # a thread more would cost more than the collective
    return bounded(compute, limit.total_seconds(), purpose="the probe of the new group to end")


def _probe_device(part: Part) -> torch.device:
    """The host's memory where a backend serves it, since its other devices may not exist here."""
    host = torch.device("cpu")
    return host if host in part.devices else torch.device("cuda")
