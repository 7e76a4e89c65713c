"""Phase 4: describe, retire and rebuild a process group under its old name.

Only the members of the group take part. Because the replacement has the old
name, everything that resolves groups by name (device meshes, DTensor,
functional collectives, compiled graphs) finds it without being told.

`new_group` cannot do this: called by a subset it leaves the ranks with
different group counters, and with `use_local_synchronization` a second
replacement meets the store keys of the first.

Private parts of `torch.distributed.distributed_c10d` as of torch 2.8 to 2.14.1.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


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
    config: str
    """Backend per device, as torch keeps it."""
    devices: tuple[torch.device, ...]
    timeout: timedelta
    tags: tuple[str, ...]


def describe(group: ProcessGroup) -> Description:
    """Read everything that a replacement of `group` must repeat.

    Raises:
        Rejected: `reject_unsupported` if torch does not know the group, or it
            has a backend that has no communicator class here.
    """
    world = c10d._world
    if group not in world.pg_map:
        raise Rejected(
            Reason.UNSUPPORTED,
            "expected a group registered with torch.distributed; found one that is not "
            "(already retired, or of another library)",
        )
    backend, _ = world.pg_map[group]
    if str(backend) not in _BACKENDS:
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected a group of backend {' or '.join(_BACKENDS)}; found {backend}",
        )
    devices = tuple(group._device_types)
    return Description(
        name=group.group_name,
        purpose=group.group_desc,
        ranks=tuple(dist.get_process_group_ranks(group)),
        backend=str(backend),
        config=world.pg_backend_config[group],
        devices=devices,
        timeout=group._get_backend(devices[0]).options._timeout,
        tags=tuple(tag for tag, groups in world.tags_to_pg.items() if group in groups),
    )


def retire(group: ProcessGroup, description: Description, *, deadline: float) -> None:
    """Unregister `group` and stop its communicator; its name becomes free.

    The object itself lives on in whatever still refers to it: see `Reaper`.

    Args:
        group: the group to retire.
        description: what `describe` said of it.
        deadline: seconds within which the communicator must have stopped.
    """
    _BACKENDS[description.backend].stop(group, deadline=deadline)
    dist.destroy_process_group(group)


def rebuild(description: Description, *, store: Store, rank: int) -> ProcessGroup:
    """Build and register the replacement; every member calls this with the same `store`.

    Args:
        description: what `describe` said of the retired group.
        store: a store prefix that no earlier attempt has used.
        rank: this rank's global rank.
    """
    group = connect(description, store=store, rank=rank)
    group._set_group_name(description.name)
    group._set_group_desc(description.purpose)
    _register(group, description, store)
    return group


def connect(description: Description, *, store: Store, rank: int) -> ProcessGroup:
    """Build a group that torch.distributed does not know of (no name, no registration)."""
    position, size = description.ranks.index(rank), len(description.ranks)
    kind = _BACKENDS[description.backend]
    group = dist.ProcessGroup(store, position, size)
    group._set_default_backend(kind.type())
    for prefix, devices in kind.parts(description.devices):
        part = dist.PrefixStore(prefix, store)
        backend = kind.create(part, position, size, description)
        for device in devices:
            group._register_backend(device, kind.type(), backend)
    return group


def _register(group: ProcessGroup, description: Description, store: Store) -> None:
    """Enter `group` in every map from which `destroy_process_group` removed its predecessor."""
    world = c10d._world
    world.pg_map[group] = (description.backend, store)
    world.pg_names[group] = description.name
    world.pg_backend_config[group] = description.config
    world.pg_group_ranks[group] = {
        rank: position for position, rank in enumerate(description.ranks)
    }
    for tag in description.tags:
        world.tags_to_pg.setdefault(tag, []).append(group)
    own_tag = next((tag for tag in description.tags if tag), "")
    world.pg_to_tag[group] = own_tag
    c10d._register_process_group(description.name, group)


def rehearse(description: Description, *, store: Store, rank: int) -> ProcessGroup:
    """Build and probe a group of this rank alone, so that a repair is not the first to do so.

    Returns:
        The group, for the caller to drop where that may take its time.
    """
    alone = dataclasses.replace(description, ranks=(rank,))
    group = connect(alone, store=dist.PrefixStore(f"rehearsal/{rank}/", store), rank=rank)
    probe(group, alone)
    return group


def probe(group: ProcessGroup, description: Description) -> None:
    """Check with an integer all-reduce that `group` computes the right sum.

    Raises:
        Rejected: `reject_probe_failed` with expected and found sum.
    """
    size = len(description.ranks)
    value = torch.tensor([group.rank() + 1], dtype=torch.int64, device=_probe_device(description))
    group.allreduce([value]).wait()
    expected, found = size * (size + 1) // 2, int(value.item())
    if found != expected:
        raise Rejected(
            Reason.PROBE_FAILED,
            f"expected the members' sum {expected}; found {found} on group {description.name}",
        )


def _probe_device(description: Description) -> torch.device:
    """The host's memory where the group serves it, since its devices may not exist here."""
    host = torch.device("cpu")
    return host if host in description.devices else torch.device("cuda")


def num_registered_groups() -> int:
    """Number of process groups that torch.distributed knows of in this process."""
    return len(c10d._world.pg_map)


class Reaper:
    """Drops the last references to retired groups away from the training thread.

    The destructor of a Gloo group joins its threads, which takes 15 to 20 ms, and with an
    operation in flight it blocks until that operation times out.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._held: list[ProcessGroup] = []
        self._thread: threading.Thread | None = None

    def take(self, group: ProcessGroup) -> None:
        """Keep `group` alive until `release`."""
        self._held.append(group)

    def release(self) -> None:
        """Let go of everything held, each once nobody else holds it, in a thread of its own."""
        held, self._held = self._held, []
        if held:
            self._thread = threading.Thread(
                target=_drop_last,
                args=(held, self._thread),
                name="accelpact-reaper",
                daemon=True,
            )
            self._thread.start()

    def join(self) -> None:
        """Wait a bounded time until everything released is gone."""
        if self._thread is not None:
            self._thread.join(2 * _REAPER_PATIENCE_S)


_REAPER_PATIENCE_S = 10.0
_REAPER_POLL_S = 0.005


def _drop_last(held: list[ProcessGroup], before: threading.Thread | None) -> None:
    """Empty `held`, waiting a bounded time for the frames that still name its groups.

    A thread that was started `before` is waited for, so that the last one's end is all's end.
    """
    if before is not None:
        before.join()
    end = time.monotonic() + _REAPER_PATIENCE_S
    while held:
        # One reference in the list and one as the argument of getrefcount.
        while sys.getrefcount(held[-1]) > 2 and time.monotonic() < end:
            time.sleep(_REAPER_POLL_S)
        held.pop()


class _Backend(abc.ABC):
    """What differs between the communicators of two backends."""

    @staticmethod
    @abc.abstractmethod
    def type() -> Any:
        """Return torch's enum value."""

    @staticmethod
    @abc.abstractmethod
    def parts(
        devices: tuple[torch.device, ...],
    ) -> list[tuple[str, tuple[torch.device, ...]]]:
        """Store prefix and devices of every backend object the group needs."""

    @staticmethod
    @abc.abstractmethod
    def create(store: Store, position: int, size: int, description: Description) -> Any:
        """Rendezvous over `store` and return the backend object."""

    @staticmethod
    @abc.abstractmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:
        """Make the communicator of a retired group stop, as far as the backend can."""


class _Gloo(_Backend):
    """`ProcessGroupGloo`: abort does nothing, sockets close with the last reference."""

    @staticmethod
    def type() -> Any:
        return dist.ProcessGroup.BackendType.GLOO

    @staticmethod
    def parts(
        devices: tuple[torch.device, ...],
    ) -> list[tuple[str, tuple[torch.device, ...]]]:
        return [("gloo/", devices)]

    @staticmethod
    def create(store: Store, position: int, size: int, description: Description) -> Any:
        backend = dist.ProcessGroupGloo(store, position, size, timeout=description.timeout)
        backend.options.global_ranks_in_group = list(description.ranks)
        backend.options.group_name = description.name
        return backend

    @staticmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:
        """Nothing to stop: the failed operation has already returned."""


class _Nccl(_Backend):
    """`ProcessGroupNCCL`, built directly.

    The usual helper may split the default communicator, which is collective
    over all ranks and would hang here.
    """

    @staticmethod
    def type() -> Any:
        return dist.ProcessGroup.BackendType.NCCL

    @staticmethod
    def parts(
        devices: tuple[torch.device, ...],
    ) -> list[tuple[str, tuple[torch.device, ...]]]:
        return [("nccl/", devices)]

    @staticmethod
    def create(store: Store, position: int, size: int, description: Description) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = description.timeout
        options.global_ranks_in_group = list(description.ranks)
        options.group_name = description.name
        backend = dist.ProcessGroupNCCL(store, position, size, options)
        backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return backend

    @staticmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:
        """Abort in a helper thread, since it may wait for the group's own timeout."""
        backend = group._get_backend(torch.device("cuda"))
        thread = threading.Thread(target=backend.abort, name="accelpact-abort", daemon=True)
        thread.start()
        thread.join(deadline)
        if thread.is_alive():
            raise Rejected(
                Reason.DEADLINE,
                f"expected the NCCL communicator to abort within {deadline:g} s; it did not",
            )
        torch.cuda.synchronize()


_BACKENDS: dict[str, type[_Backend]] = {"gloo": _Gloo, "nccl": _Nccl}
