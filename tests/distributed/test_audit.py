"""The audit on real Gloo ranks: after a real replacement, what still names the old group."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from accelpact import _communicator, _native
from accelpact._audit import Audit, Finding, Holder
from accelpact._frameworks import Attribute, fsdp1
from tests.distributed import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelpact._frameworks import Reference
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_MODULES = 3
"""FSDP modules: two layers and the root."""
THREADS_PER_GROUP = 3
_NAMED_S = 0.2
"""A thread gives itself its name after it has started."""


class Job:
    """Replaces groups and audits what is left of them, one after the other."""

    def __init__(self, rank: Rank) -> None:
        """Connect."""
        self.rank = rank
        self.store = rank.store()
        self.generation = 0
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", rank.store()),
            rank=rank.number,
            world_size=rank.world_size,
            timeout=timedelta(seconds=20),
        )

    def replace(self, keep: list[Any], places: Iterable[Reference]) -> tuple[Audit, Any]:
        """Replace the group in `keep` and rebind `places`."""
        audit = Audit(keep[0], label=keep[0].group_name)
        description = _communicator.describe(keep[0])
        holders = [place for place in places if place.names(keep[0])]
        self.generation += 1
        # To retire a group breaks a member that is still connecting to it.
        meeting = f"{description.name}/{self.generation}"
        ranks.meet(self.store, meeting, len(description.ranks))
        _communicator.retire(keep[0], description, deadline=5)
        store = dist.PrefixStore(f"{description.name}/{self.generation}/", self.store)
        new = _communicator.rebuild(description, store=store, rank=self.rank.number)
        for holder in holders:
            holder.point_at(new)
        return audit, new

    def audit(
        self,
        keep: list[Any],
        places: Iterable[Reference],
        adopt: Callable[[Holder], Reference | None] = lambda _: None,
    ) -> Finding:
        """Replace the group in `keep` by the new one, and audit in a thread, as the runtime does.

        Groups are kept in lists: any variable here would be found.
        """
        audit, new = self.replace(keep, places)
        findings: list[Finding] = []
        thread = threading.Thread(target=lambda: findings.append(audit.run(adopt, new, keep=keep)))
        thread.start()
        thread.join()
        keep.append(new)
        return findings[0]


class Layer(torch.nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(inputs))


def my_group(members: list[list[int]]) -> list[Any]:
    """Make groups; return a list with the one of this rank."""
    made = [dist.new_group(each) for each in members]
    return [each for each in made if each is not dist.GroupMember.NON_GROUP_MEMBER]


def hybrid() -> tuple[FullyShardedDataParallel, list[Any], list[Any]]:
    """A model under FSDP1 HYBRID_SHARD, and lists with its replicate and its shard group."""
    shard, replicate = my_group([[0, 1], [2, 3]]), my_group([[0, 2], [1, 3]])
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(Layer(), Layer()),
        process_group=(shard[0], replicate[0]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    step(model)
    gc.collect()  # as `attach` does, for the cycles of FSDP's constructor
    return model, replicate, shard


def step(model: torch.nn.Module) -> None:
    """Do one update's forward and backward pass."""
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()


def fsdp(rank: Rank) -> dict[str, Finding]:
    """Replace the replicate group again and again, with another holder each time."""
    job = Job(rank)
    model, keep, shard = hybrid()
    places = list(fsdp1.references(model))
    found: dict[str, Finding] = {}

    def collect() -> None:
        step(model)
        dist.barrier()

    found["clean"] = job.audit(keep, places)
    collect()
    found["shard"] = job.audit(shard, places)
    collect()
    found["variable"] = with_variable(job, keep, places)
    collect()
    vars(model)["method"] = keep[0].allreduce
    found["method"] = job.audit(keep, places)
    del vars(model)["method"]
    collect()
    omitted = [p for p in places if not (p.owner is model and p.key == "_inter_node_pg")]
    found["omitted"] = job.audit(keep, omitted)
    vars(model)["_inter_node_pg"] = keep[0]
    collect()
    found["adopted"] = job.audit(keep, omitted, adopt)
    collect()
    found["last"] = job.audit(keep, places)
    collect()
    return found


def with_variable(job: Job, keep: list[Any], places: list[Attribute]) -> Finding:
    """Keep the old group in a variable of a function that runs on."""
    replicate = keep[0]
    finding = job.audit(keep, places)
    del replicate
    return finding


def adopt(holder: Holder) -> Reference | None:
    """Know FSDP1's attribute."""
    if isinstance(holder.owner, FullyShardedDataParallel):
        return Attribute(holder.owner, str(holder.key), f"adopted {holder.key}")
    return None


def data_parallel(rank: Rank) -> dict[str, Finding]:
    """Replace DDP's group through its attribute alone, and as DDP itself does."""
    job = Job(rank)
    found = {}
    for way in ("attribute", "update"):
        keep = [dist.new_group([0, 1])]
        model = DistributedDataParallel(Layer(), process_group=keep[0])
        step(model)
        gc.collect()
        audit, new = job.replace(keep, [])
        if way == "attribute":
            model.process_group = new
        else:
            model._update_process_group(new)
        found[way] = audit.run(lambda _: None, new, keep=keep)
    return found


@pytest.fixture(scope="module")
def hybrids() -> list[dict[str, Finding]]:
    return ranks.values(ranks.run(fsdp))


@pytest.fixture(scope="module")
def data_parallels() -> list[dict[str, Finding]]:
    return ranks.values(ranks.run(data_parallel, world_size=2))


class TestHybridShards:
    """FSDP1 on 2x2 ranks."""

    @pytest.mark.parametrize("case", ["clean", "shard", "last"])
    def test_rebound_group_is_gone(self, hybrids: list[dict[str, Finding]], case: str) -> None:
        """No walk is needed: weak reference, threads and descriptors are proof."""
        for found in hybrids:
            finding = found[case]

            assert ((), (), ()) == (finding.adopted, finding.redirected, finding.left)
            assert (True, "released", False) == (finding.dead, finding.native, finding.walked)

    def test_variable_is_redirected(self, hybrids: list[dict[str, Finding]]) -> None:
        """By the name of the function and its own, and nothing else."""
        for found in hybrids:
            finding = found["variable"]

            assert ("frame with_variable() local 'replicate'",) == finding.redirected
            assert ((), ()) == (finding.adopted, finding.left)
            assert (False, "held by a variable", 0) == (
                finding.dead,
                finding.native,
                finding.unseen,
            )

    def test_reference_that_was_not_rebound_is_left(
        self, hybrids: list[dict[str, Finding]]
    ) -> None:
        """One of several, by its path."""
        for found in hybrids:
            finding = found["omitted"]

            assert ("FullyShardedDataParallel._inter_node_pg",) == finding.left
            assert ((), ()) == (finding.adopted, finding.redirected)

    def test_reference_that_a_framework_knows_is_adopted(
        self, hybrids: list[dict[str, Finding]]
    ) -> None:
        """It is rebound, and the group goes."""
        for found in hybrids:
            finding = found["adopted"]

            assert ("adopted _inter_node_pg",) == finding.adopted
            assert ((), ()) == (finding.left, finding.redirected)
            assert (True, "released") == (finding.dead, finding.native)

    def test_bound_method_is_left(self, hybrids: list[dict[str, Finding]]) -> None:
        """It reaches the backend past torch.distributed."""
        for found in hybrids:
            assert ("FullyShardedDataParallel.method (bound method allreduce)",) == found[
                "method"
            ].left


class TestDataParallel:
    """DDP on 2 ranks, whose C++ Reducer owns the group."""

    def test_attribute_alone_is_not_enough(self, data_parallels: list[dict[str, Finding]]) -> None:
        """Python is clean and the threads are there."""
        for found in data_parallels:
            finding = found["attribute"]
            (left,) = finding.left

            assert finding.dead
            assert "1 gloo_tcp_loop, 2 pt_gloo_runloop threads still run" in left
            assert "C++" in left

    def test_update_is_enough(self, data_parallels: list[dict[str, Finding]]) -> None:
        """DDP hands the replacement to its Reducer."""
        for found in data_parallels:
            finding = found["update"]

            assert ((), ()) == (finding.left, finding.redirected)
            assert (True, "released") == (finding.dead, finding.native)


class TestFootprint:
    """Threads and descriptors of a real group."""

    def test_is_what_the_group_adds(self) -> None:
        """As many threads end as the audit expects."""
        for before, added in ranks.values(ranks.run(_count, world_size=2)):
            assert THREADS_PER_GROUP == before == added


def _count(rank: Rank) -> tuple[int, int]:
    Job(rank)
    time.sleep(_NAMED_S)
    threads = _native.threads()
    group = dist.new_group([0, 1])
    time.sleep(_NAMED_S)
    expected = _native.Footprint(_native.backends(group)).threads
    return sum(expected.values()), len(_native.threads() - threads)
