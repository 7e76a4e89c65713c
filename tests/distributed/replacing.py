"""Ranks that replace groups without any protocol around it."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact import Rejected, _communicator, _replacement
from tests.distributed import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup

    from tests.distributed.ranks import Rank

CAN_RECONFIGURE = hasattr(c10d, "_reconfigure")
needs_reconfigure = pytest.mark.skipif(not CAN_RECONFIGURE, reason="torch cannot reconfigure")
both = pytest.mark.parametrize(
    "step", ["rebuild", pytest.param("reconfigure", marks=needs_reconfigure)]
)


class Job:
    """A rank of a job of four, with groups."""

    def __init__(self, rank: Rank) -> None:
        """Connect the default group."""
        self.number = rank.number
        self.store = rank.store()
        self.generation = 0
        self.reaper = _communicator.Reaper()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", rank.store()),
            rank=rank.number,
            world_size=rank.world_size,
            timeout=timedelta(seconds=20),
        )
        self._connected("world")

    def groups(self, *members: Sequence[int], timeout: float = 20) -> list[Any]:
        """Make a group of each; all ranks call this."""
        limit = timedelta(seconds=timeout)
        made = [dist.new_group(list(each), timeout=limit) for each in members]
        self._connected(f"groups {dist.distributed_c10d._world.group_count}")
        return made

    def _connected(self, name: str) -> None:
        """Wait for all: to retire a group breaks a member that is still connecting to it."""
        self.meet(name, dist.get_world_size())

    def meet(self, name: str, num: int = 4) -> None:
        """Wait for `num` ranks, without any group."""
        ranks.meet(self.store, name, num)

    def scope(self, generation: int) -> dist.PrefixStore:
        return dist.PrefixStore(f"rendezvous/{generation}/", self.store)

    def replace(self, step: str, group: ProcessGroup, *, deadline: float = 15) -> ProcessGroup:
        """Replace `group` as a repair does."""
        self.generation += 1
        description = _communicator.describe(group)
        way = _replacement.choose(step, group, description)
        if way.retires:
            self.reaper.take(group)
        way.retire(group, description, deadline=deadline)
        new = way.build(
            group,
            description,
            store=self.scope(self.generation),
            rank=self.number,
            generation=self.generation,
            deadline=deadline,
        )
        _communicator.probe(new, description, deadline=deadline)
        return new

    def forget(self) -> None:
        """Delete the keys of the last generation, as the control plane does."""
        for key in self.store.list_keys():
            if key.startswith(f"rendezvous/{self.generation}/"):
                self.store.delete_key(key)


def total(group: ProcessGroup | None = None) -> float:
    """Return the sum of the members' global ranks, computed by `group`."""
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


def standing(group: ProcessGroup) -> dict[str, Any]:
    """Return what torch.distributed says of `group`."""
    world = c10d._world
    return {
        "name": group.group_name,
        "purpose": group.group_desc,
        "found": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
        "ranks": dist.get_process_group_ranks(group),
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "backend": dist.get_backend(group),
        "config": dist.get_backend_config(group),
        "timeout": _communicator.describe(group).timeout,
        "tag": world.pg_to_tag[group],
        "places": {
            tag: each.index(group) for tag, each in world.tags_to_pg.items() if group in each
        },
        "others": len(world.pg_map) - 1,
    }


@contextlib.contextmanager
def refused(found: dict[str, Any]) -> Iterator[None]:
    """Note in `found` how what follows is refused, and after how long."""
    begin = time.monotonic()
    with pytest.raises(Rejected) as rejection:
        yield
    found["reason"] = rejection.value.reason.value
    found["detail"] = rejection.value.detail
    found["seconds"] = time.monotonic() - begin


class Blocked:
    """A thread that waits in a collective."""

    def __init__(self, group: ProcessGroup) -> None:
        """Begin, and be well in it."""
        self.error: str | None = None
        self._group = group
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        time.sleep(0.2)

    def _wait(self) -> None:
        try:
            self._group.allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            self.error = str(error)
        finally:
            del self._group

    def released_after(self, seconds: float) -> float:
        """Return how long it takes until the collective raises, `seconds` at most."""
        begin = time.monotonic()
        self._thread.join(seconds)
        assert self.error is not None
        return time.monotonic() - begin
