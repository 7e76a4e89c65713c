"""Getting a thread out of a Gloo collective of a group that is going to be replaced."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact import _communicator
from tests.distributed import ranks
from tests.distributed.replacing import (
    Blocked,
    Job,
    both,
    total,
)

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


class TestInterrupt:
    @both
    @pytest.mark.parametrize("which", ["world", "group"])
    def test_released_at_once(self, step: str, which: str) -> None:
        """Threads blocked in a collective raise at once; the group works when it is replaced."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            group, other = job.groups((0, 1, 2, 3), (0, 1, 2, 3))
            group = dist.group.WORLD if which == "world" else group
            found: dict[str, Any] = {"released": [], "took": []}
            for _ in range(3):
                if rank.number != 3:
                    blocked = Blocked(group)
                    job.meet(f"blocked {job.generation}", 3)
                    if rank.number != 1:  # which is released by itself, not by a peer's interrupt
                        job.meet(f"first {job.generation}", 3)
                    begin = time.monotonic()
                    assert _communicator.interrupt_by_name(group.group_name)
                    found["took"].append(time.monotonic() - begin)
                    found["released"].append(blocked.released_after(5))
                    if rank.number == 1:
                        job.meet(f"first {job.generation}", 3)
                    begin = time.monotonic()
                    with pytest.raises(RuntimeError):
                        group.allreduce([torch.ones(1)]).wait()
                    found["took"].append(time.monotonic() - begin)
                job.meet(f"interrupted {job.generation}")
                group = job.replace(step, group)
                job.meet(f"replaced {job.generation}")
                if rank.number == 0:
                    job.forget()
                job.meet(f"forgotten {job.generation}")
            return found | {"sums": (total(group), total(other)), "rank": dist.get_rank()}

        found = ranks.values(ranks.run(one))

        assert [(6, 6)] * 4 == [each["sums"] for each in found]
        assert [0, 1, 2, 3] == [each["rank"] for each in found]
        assert max(seconds for each in found for seconds in each["released"] + each["took"]) < 0.5

    def test_nothing_to_release(self) -> None:
        """A name that no group has is no error."""

        def one(rank: Rank) -> bool:
            Job(rank)
            return _communicator.interrupt_by_name("no such group")

        assert [False] == ranks.values(ranks.run(one, world_size=1))

    def test_shared_device(self) -> None:
        """Groups that share a device cannot be told apart, so neither is interrupted."""

        def one(rank: Rank) -> list[Any]:
            job = Job(rank)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
            options._timeout = timedelta(seconds=20)
            sharing = []
            for number in range(2):
                store = job.scope(number)
                kind = dist.ProcessGroup.BackendType.GLOO
                group = dist.ProcessGroup(store, rank.number, 2)
                part = dist.PrefixStore("cpu/", store)
                backend = dist.ProcessGroupGloo(part, rank.number, 2, options)
                group._register_backend(torch.device("cpu"), kind, backend)
                c10d._world.pg_map[group] = ("gloo", store)
                sharing.append(group)
            value = torch.ones(1)
            found = [*map(_communicator.interrupt, sharing)]
            sharing[0].allreduce([value]).wait()
            job.meet("summed", 2)
            for group in sharing:
                del c10d._world.pg_map[group]
            return [*found, value.item(), _communicator.interrupt(sharing[0])]

        assert [[False, False, 2, True]] * 2 == ranks.values(ranks.run(one, world_size=2))


class TestRetired:
    @pytest.mark.parametrize("which", ["world", "group"])
    def test_fails_at_once(self, which: str) -> None:
        """Whatever still calls a retired group, or its backend, raises on every member."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            old, other = job.groups((0, 1, 2, 3), (0, 1, 2, 3))
            old = dist.group.WORLD if which == "world" else old
            assert 6 == total(old)
            job.meet("summed")
            new = job.replace("rebuild", old)
            backend = old._get_backend(torch.device("cpu"))
            took = []
            for call in (old.allreduce, backend.allreduce, old.broadcast, backend.broadcast):
                begin = time.monotonic()
                with pytest.raises(RuntimeError, match="gloo"):
                    call([torch.ones(1)]).wait()
                took.append(time.monotonic() - begin)
            job.meet("failed")
            return {"took": took, "sums": (total(new), total(other))}

        found = ranks.values(ranks.run(one))

        assert [(6, 6)] * 4 == [each["sums"] for each in found]
        assert max(seconds for each in found for seconds in each["took"]) < 0.5
