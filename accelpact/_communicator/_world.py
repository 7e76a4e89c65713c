"""What torch.distributed keeps of a group in this process, and taking one out or putting it in.

Private names of `torch.distributed.distributed_c10d`, seen in torch 2.13.0 and 2.14.1; the maps are
the same since 2.8 [read in the source].
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """How a group stands in the maps of torch.distributed."""

    name: str
    backend: Any
    """As `get_backend` returns it."""
    store: Store
    """New groups meet in that of the default group."""
    config: str
    """Backend per device, as torch keeps it."""
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""
    tag: str
    places: tuple[tuple[str, int], ...]
    """Tag and position of every list of groups that has it. Groups of the same ranks are told apart
    by their position."""
    is_default: bool
    """Whether it is `dist.group.WORLD`."""

    @property
    def part(self) -> str:
        """Prefix, less its slash, under which torch lets the first backend use the store."""
        return self.config.partition(":")[0]

    @property
    def kinds(self) -> dict[str, str]:
        """Name of the backend per type of device, in torch's order."""
        pairs = (each.partition(":") for each in self.config.split(","))
        return {device: kind for device, _, kind in pairs}


def look_up(group: ProcessGroup) -> Entry:
    """Read how `group` stands.

    Raises:
        Rejected: `reject_unsupported` if torch does not know it.
    """
    world = c10d._world
    if group not in world.pg_map:
        raise Rejected(
            Reason.UNSUPPORTED,
            "expected a group registered with torch.distributed; found one that is not "
            "(already retired, or of another library)",
        )
    backend, store = world.pg_map[group]
    return Entry(
        name=world.pg_names[group],
        backend=backend,
        store=store,
        config=world.pg_backend_config[group],
        ranks=tuple(world.pg_group_ranks[group]),
        tag=world.pg_to_tag.get(group, ""),
        places=tuple(
            (tag, groups.index(group))
            for tag, groups in world.tags_to_pg.items()
            if group in groups
        ),
        is_default=group is world.default_pg,
    )


def take_out(group: ProcessGroup, entry: Entry) -> None:
    """Remove `group` from every map; its name becomes free.

    Not by `destroy_process_group`: with the default group it destroys all, and it shuts the
    backends down, which waits without a limit where a communicator has been aborted. The default
    group stays `dist.group.WORLD` until another is put in its place, since `dist.get_rank()` asks
    it.
    """
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        del table[group]
    for name in ("pg_coalesce_state", "pg_to_tag", "pg_flight_recorder_hooks"):
        getattr(world, name, {}).pop(group, None)  # the last one is of torch 2.15 [read]
    for tag, _ in entry.places:
        world.tags_to_pg[tag].remove(group)
    c10d._unregister_process_group(entry.name)


def put_in(group: ProcessGroup, entry: Entry) -> None:
    """Enter `group` in every map as `entry` says."""
    world = c10d._world
    world.pg_map[group] = (entry.backend, entry.store)
    world.pg_names[group] = entry.name
    world.pg_backend_config[group] = entry.config
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(entry.ranks)}
    for tag, position in entry.places:
        world.tags_to_pg.setdefault(tag, []).insert(position, group)
    world.pg_to_tag[group] = entry.tag
    c10d._register_process_group(entry.name, group)
    if entry.is_default:
        c10d._update_default_pg(group)


def registered() -> list[ProcessGroup]:
    """Return the groups that torch.distributed knows of in this process."""
    return list(c10d._world.pg_map)


def num_registered_groups() -> int:
    """Number of process groups that torch.distributed knows of in this process."""
    return len(c10d._world.pg_map)


def find(name: str) -> ProcessGroup:
    """Return the group of that name.

    Raises:
        Rejected: `reject_unsupported` if there is none in this process.
    """
    for group, each in c10d._world.pg_names.items():
        if each == name:
            return group
    raise Rejected(
        Reason.UNSUPPORTED,
        f"expected a group {name} registered with torch.distributed; "
        f"found {', '.join(c10d._world.pg_names.values()) or 'none'}",
    )
