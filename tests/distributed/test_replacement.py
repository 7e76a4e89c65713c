"""Both ways to replace a group, on real Gloo ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from accelpact import _communicator, _replacement
from tests.distributed import ranks
from tests.distributed.replacing import (
    CAN_RECONFIGURE,
    Blocked,
    Job,
    both,
    needs_reconfigure,
    refused,
    standing,
    total,
)

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


class TestReplace:
    @both
    def test_members_only(self, step: str) -> None:
        """A group of ranks 1 and 3 is replaced by these alone; all groups are as they were."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            odd, pair, same = job.groups((1, 3), (2, 3), (1, 3))
            found: dict[str, Any] = {}
            if rank.number in (1, 3):
                before = standing(odd)
                new = job.replace(step, odd)
                found = {
                    "unchanged": before == standing(new),
                    "same object": new is odd,
                    "sum": total(new),
                    "twin": total(same),
                }
            else:
                job.meet("bystanders", 2)
            if rank.number in (2, 3):
                found["pair"] = total(pair)
            return found | {"world": total(), "groups": _communicator.num_registered_groups()}

        found = ranks.values(ranks.run(one))

        member = {"unchanged": True, "same object": step == "reconfigure", "sum": 4, "twin": 4}
        everyone = {"world": 6, "groups": 3}
        assert everyone | {"groups": 1} == found[0]
        assert member | everyone == found[1]
        assert everyone | {"pair": 5, "groups": 2} == found[2]
        assert member | everyone | {"pair": 5, "groups": 4} == found[3] | {"groups": 4}

    @both
    def test_default_group(self, step: str) -> None:
        """The default group is replaced, all others stay, and everything made with it works."""

        def one(rank: Rank) -> list[Any]:
            job = Job(rank)
            (pair,) = job.groups((0, 1))
            world = dist.group.WORLD
            assert world is not None
            before = standing(world)
            new = job.replace(step, world)
            found: list[Any] = [
                before == standing(new),
                (new is dist.group.WORLD, c10d._get_default_group() is new),
                (dist.get_rank(), dist.get_world_size()),
            ]
            job.forget()
            dist.barrier()
            (later,) = job.groups((0, 1, 2, 3))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            found += [total(), total(later), mesh.get_group("shard").size()]
            found.append(total(mesh.get_group("replicate")))
            if rank.number < 2:
                found.append(total(pair))
            dist.destroy_process_group()
            return [*found, dist.is_initialized(), _communicator.num_registered_groups()]

        found = ranks.values(ranks.run(one))

        for number, each in enumerate(found):
            assert [True, (True, True), (number, 4), 6, 6, 2] == each[:6]
            assert [(2, 4)[number % 2], *([1] if number < 2 else []), False, 0] == each[6:]

    @both
    def test_one_after_the_other(self, step: str) -> None:
        """Groups that a replacement made can be replaced again, in either way."""

        def one(rank: Rank) -> list[float]:
            job = Job(rank)
            (group,) = job.groups((0, 1, 2, 3))
            for each in ("rebuild", step, "rebuild", step, step):
                group = job.replace(each, group)
                job.meet(f"replaced {job.generation}")
                job.forget()
                job.meet(f"forgotten {job.generation}")
            return [total(group), total()]

        assert [[6, 6]] * 4 == ranks.values(ranks.run(one))

    def test_auto(self) -> None:
        """What needs no rebinding is preferred where torch can do it."""

        def one(rank: Rank) -> str:
            Job(rank)
            world = dist.group.WORLD
            assert world is not None
            return _replacement.choose("auto", world, _communicator.describe(world)).name

        expected = "reconfigure" if CAN_RECONFIGURE else "rebuild"
        assert [expected] == ranks.values(ranks.run(one, world_size=1))

    @both
    @pytest.mark.parametrize("seconds", [1.0, 600.0])
    def test_timeout(self, step: str, seconds: float) -> None:
        """The timeout of the script's collectives is neither lengthened nor shortened."""

        def one(rank: Rank) -> tuple[float, float]:
            job = Job(rank)
            (group,) = job.groups((0, 1), timeout=seconds)
            group = job.replace(step, group, deadline=5)
            timeout = _communicator.describe(group).timeout.total_seconds()
            waited = 0.0
            if rank.number == 0:
                blocked = Blocked(group)
                with contextlib.suppress(AssertionError):
                    waited = blocked.released_after(2.5)
            job.meet("waited", 2)
            return timeout, waited

        found = ranks.values(ranks.run(one, world_size=2))

        assert [seconds, seconds] == [timeout for timeout, _ in found]
        if seconds == 1.0:
            assert 0.5 < found[0][1] < 2
        else:
            assert found[0][1] == 0


class TestRefusal:
    @both
    def test_missing_member(self, step: str) -> None:
        """A member that does not come is named when the deadline has passed."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            (group,) = job.groups((0, 1, 2, 3), timeout=600)
            found: dict[str, Any] = {}
            if rank.number != 2:
                with refused(found):
                    job.replace(step, group, deadline=1)
            job.meet("refused")
            return found

        found = ranks.values(ranks.run(one))

        del found[2]
        for each in found:
            assert "reject_deadline" == each["reason"]
            assert "ranks [2] did not come" in each["detail"]
            assert 0.9 < each["seconds"] < 2

    @both
    def test_member_that_stops_midway(self, step: str) -> None:
        """A member that comes and does not connect is waited for until the deadline."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            (group,) = job.groups((0, 1), timeout=600)
            found: dict[str, Any] = {}
            if rank.number == 0:
                with refused(found):
                    job.replace(step, group, deadline=1)
            else:
                handle = c10d._get_reconfigure_handle(group) if step == "reconfigure" else ""
                _replacement._exchange(
                    step,
                    handle,
                    _communicator.describe(group),
                    store=job.scope(1),
                    rank=1,
                    end=time.monotonic() + 5,
                )
            job.meet("refused", 2)
            return found

        found = ranks.values(ranks.run(one, world_size=2))[0]

        assert "reject_deadline" == found["reason"]
        assert "to connect within 1 s" in found["detail"]
        assert 0.9 < found["seconds"] < 3

    @both
    def test_used_prefix(self, step: str) -> None:
        """A second attempt over the same store prefix is refused before anything connects."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            (group,) = job.groups((0, 1))
            group = job.replace(step, group)
            job.generation = 0
            found: dict[str, Any] = {}
            with refused(found):
                job.replace(step, group)
            return found

        for found in ranks.values(ranks.run(one, world_size=2)):
            assert "reject_unsupported" == found["reason"]
            assert "prefix that no attempt has used" in found["detail"]

    @needs_reconfigure
    def test_members_of_two_minds(self) -> None:
        """Members that would replace in different ways are refused, and each way is named."""

        def one(rank: Rank) -> dict[str, Any]:
            job = Job(rank)
            (group,) = job.groups((0, 1))
            found: dict[str, Any] = {}
            with refused(found):
                job.replace(("rebuild", "reconfigure")[rank.number], group)
            return found

        for found in ranks.values(ranks.run(one, world_size=2)):
            assert "reject_unsupported" == found["reason"]
            assert "{0: 'rebuild', 1: 'reconfigure'}" in found["detail"]

    @pytest.mark.skipif(CAN_RECONFIGURE, reason="torch can reconfigure")
    def test_older_torch(self) -> None:
        """Torch that cannot reconfigure is named in the refusal."""

        def one(rank: Rank) -> dict[str, Any]:
            Job(rank)
            world = dist.group.WORLD
            assert world is not None
            found: dict[str, Any] = {}
            with refused(found):
                _replacement.choose("reconfigure", world, _communicator.describe(world))
            return found

        (found,) = ranks.values(ranks.run(one, world_size=1))

        assert "reject_unsupported" == found["reason"]
        assert f"torch {torch.__version__} cannot reconfigure" in found["detail"]

    def test_several_backends(self) -> None:
        """A group with a backend per device is refused in both ways, with each reason."""

        def one(rank: Rank) -> tuple[dict[str, Any], list[str | None]]:
            from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it

            Job(rank)
            world = dist.group.WORLD
            group = dist.new_group([0], backend="cpu:gloo,cuda:fake")
            assert world is not None
            found: dict[str, Any] = {}
            with refused(found):
                _communicator.describe(group)
            description = _communicator.describe(world)
            steps = (_replacement.Rebuild(), _replacement.Reconfigure())
            return found, [step.objection(group, description) for step in steps]

        ((found, objections),) = ranks.values(ranks.run(one, world_size=1))

        assert "reject_unsupported" == found["reason"]
        assert "found cpu:gloo,cuda:fake" in found["detail"]
        assert objections[0] == "the group has a backend object per device"
        assert ("multiple backends" if CAN_RECONFIGURE else "cannot reconfigure") in objections[1]

    def test_backend_for_all_devices(self) -> None:
        """A group that names the same backend for every device is one of that backend."""

        def one(rank: Rank) -> tuple[str, str, float]:
            job = Job(rank)
            group = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
            before = dist.get_backend(group)
            group = job.replace("rebuild", group)
            return before, dist.get_backend(group), total(group)

        for before, after, value in ranks.values(ranks.run(one, world_size=2)):
            assert before == after
            assert 1 == value

    def test_nccl_without_device(self) -> None:
        """A group of NCCL is refused where there is no device."""
        if torch.cuda.is_available():
            pytest.skip("there is a device")

        def one(rank: Rank) -> str | None:
            Job(rank)
            world = dist.group.WORLD
            assert world is not None
            description = _communicator.describe(world)
            parts = tuple(dataclasses.replace(each, backend="nccl") for each in description.parts)
            description = dataclasses.replace(description, parts=parts)
            return _replacement.Rebuild().objection(world, description)

        (objection,) = ranks.values(ranks.run(one, world_size=1))
        assert objection == "NCCL needs a CUDA device, and none is available"

    def test_unknown_setting(self) -> None:
        """A setting that names no way is refused."""

        def one(rank: Rank) -> dict[str, Any]:
            Job(rank)
            world = dist.group.WORLD
            assert world is not None
            found: dict[str, Any] = {}
            with refused(found):
                _replacement.choose("restart", world, _communicator.describe(world))
            return found

        (found,) = ranks.values(ranks.run(one, world_size=1))
        assert "there is no such way" in found["detail"]


class TestUuid:
    def test_fresh(self) -> None:
        """Another group, generation or attempt has another number, which all members agree on."""

        def one(rank: Rank) -> list[int]:
            job = Job(rank)
            first, second = job.groups((0, 1), (0, 1))
            found = []
            for group, generation, scope in (
                (first, 1, 1),
                (second, 1, 2),
                (first, 2, 3),
                (first, 1, 4),
            ):
                description = _communicator.describe(group)
                entries = _replacement._exchange(
                    "reconfigure",
                    "the same handle",
                    description,
                    store=job.scope(scope),
                    rank=rank.number,
                    end=time.monotonic() + 5,
                )
                found.append(_replacement._fresh_uuid(description, generation, entries))
            return found

        mine, theirs = ranks.values(ranks.run(one, world_size=2))

        assert mine == theirs
        assert 4 == len(set(mine))
        assert all(0 < each < 2**63 for each in mine)


class TestResources:
    @both
    @pytest.mark.parametrize("which", ["world", "group"])
    def test_ten_and_a_hundred(self, step: str, which: str) -> None:
        """Threads, descriptors, registered groups, store keys and memory stay what they were."""

        def one(rank: Rank) -> list[dict[str, int]]:
            job = Job(rank)
            (group,) = job.groups((0, 1))
            group = dist.group.WORLD if which == "world" else group
            found = []
            for count in (2, 10, 100):  # the first pay what only first ones pay
                while job.generation < count:
                    group = job.replace(step, group)
                    job.reaper.release()
                    job.meet(f"replaced {job.generation}", 2)
                    if rank.number == 0:
                        job.forget()
                        job.store.delete_key(f"meet/replaced {job.generation - 1}")
                job.reaper.join()
                job.meet(f"measure {count}", 2)
                found.append(used(job))
                job.meet(f"measured {count}", 2)
            return found

        for first, ten, hundred in ranks.values(ranks.run(one, world_size=2)):
            for each in (ten, hundred):
                assert first["threads"] == each["threads"]
                assert first["descriptors"] == each["descriptors"]
                assert first["groups"] == each["groups"]
                assert first["keys"] == each["keys"]
                assert each["rss"] - first["rss"] < 8 * 2**20


def used(job: Job) -> dict[str, int]:
    """Count what this process has."""
    return {
        "threads": ranks.num_threads(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "groups": _communicator.num_registered_groups(),
        "keys": sum(not key.startswith("meet/") for key in job.store.list_keys()),
        "rss": psutil.Process().memory_info().rss,
    }
