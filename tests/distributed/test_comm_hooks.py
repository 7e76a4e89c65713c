"""DDP's communication hooks: the group that one uses is replaced, or that is refused.

The Reducer keeps hook and state in C++, one pair for good.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import accelpact
from accelpact import Rejected, _communicator
from tests.distributed import ranks, wrappers

if TYPE_CHECKING:
    from accelpact import Pact
    from accelpact._audit import Finding
    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

CAN_RECONFIGURE = hasattr(c10d, "_reconfigure")
DIM = 8
UPDATES = 3
REPAIR_AFTER = 2

# -- the hooks ---------------------------------------------------------------------------


def _mean(tensor: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor]:
    """Average by the group object itself, which nothing redirects."""
    work = group.allreduce([tensor.div_(group.size())])
    return work.get_future().then(lambda future: future.value()[0])


class Owner:
    """A state of the script's own, whose method is a hook too."""

    def __init__(self, group: Any) -> None:
        self.anything = group

    # DDP compares annotations, which are text in this file.
    def average(self, _, bucket):  # noqa: ANN001, ANN201
        return _mean(bucket.buffer(), self.anything)


def _default_group(model: DistributedDataParallel, _: Any) -> None:
    model.register_comm_hook(None, allreduce_hook)


def _power(group: Any) -> PowerSGDState:
    return PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)


def _power_sgd(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(_power(group), powerSGD_hook)


def _compressed(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(_power(group), fp16_compress_wrapper(powerSGD_hook))


def _local_sgd(model: DistributedDataParallel, group: Any) -> None:
    state = PostLocalSGDState(process_group=None, subgroup=group, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook)


def _attribute(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(
        Owner(group), lambda state, bucket: _mean(bucket.buffer(), state.anything)
    )


def _entry(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(
        {"mine": group}, lambda state, bucket: _mean(bucket.buffer(), state["mine"])
    )


def _method(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(None, Owner(group).average)


def _variable(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(None, lambda _, bucket: _mean(bucket.buffer(), group))


def _default_argument(model: DistributedDataParallel, group: Any) -> None:
    def hook(_, bucket, by=group):  # noqa: ANN001, ANN202
        return _mean(bucket.buffer(), by)

    model.register_comm_hook(None, hook)


REBOUND = {
    "default group": _default_group,
    "PowerSGD": _power_sgd,
    "PowerSGD, wrapped": _compressed,
    "post-local SGD": _local_sgd,
    "attribute": _attribute,
    "entry": _entry,
    "method": _method,
    "variable": _variable,
    "default argument": _default_argument,
}


def _group_itself(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(group, allreduce_hook)


def _tuple(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook((group, 1), lambda state, bucket: _mean(bucket.buffer(), state[0]))


def _builtin(model: DistributedDataParallel, _: Any) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


KEPT = {"group itself": _group_itself, "tuple": _tuple, "builtin": _builtin}

# -- a job --------------------------------------------------------------------------------


class Job:
    """Trains DDP models with hooks, one after the other."""

    def __init__(self, rank: Rank, **settings: Any) -> None:
        """Connect, and make a group of both ranks besides the default one."""
        wrappers.connect(rank)
        self.rank = rank
        self.store = rank.store()
        self.settings = settings
        self.counts = itertools.count()
        self.pair: str = dist.new_group([0, 1]).group_name
        self.findings: list[Finding] = []

    def name(self, way: str) -> str:
        """Name of the group that the hook uses."""
        world = dist.group.WORLD
        assert world is not None
        return world.group_name if way == "default group" else self.pair

    def model(self, way: str) -> DistributedDataParallel:
        torch.manual_seed(0)
        group = _communicator.find(self.name(way))
        model = DistributedDataParallel(nn.Linear(DIM, DIM), process_group=group)
        {**REBOUND, **KEPT}[way](model, group)
        return model

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Pact:
        return accelpact.attach(
            model,
            optimizer,
            store=self.rank.store,
            prefix=f"pact{next(self.counts)}",
            drive="manual",
            on_abort=self.rank.report,
            **self.settings,
        )

    def repair(self, pact: Pact, name: str) -> None:
        """Replace the group; it is cut off first, so that whoever goes on using it fails."""
        ranks.meet(self.store, f"repair {next(self.counts)}", 2)
        _communicator.interrupt(_communicator.find(name))
        pact.repair(_communicator.find(name))
        pact.audits.join()
        self.findings += pact.audits.findings

    def train(self, way: str, *, protected: bool) -> list[str]:
        """Return the digest of the whole state after every update."""
        model = self.model(way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pact = self.attach(model, optimizer) if protected else None
        torch.manual_seed(100 + dist.get_rank())
        roots = []
        for update in range(1, UPDATES + 1):
            model(torch.randn(4, DIM)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = accelpact.application_state(model, optimizer, cursor=0, frontier=update)
            roots.append(accelpact.tree_digest(state).root)
            if pact is not None:
                pact.commit(update)
                if update == REPAIR_AFTER:
                    self.repair(pact, self.name(way))
        if pact is not None:
            pact.close()
        return roots


def _train(rank: Rank, ways: list[str], replacement: str) -> dict[str, Any]:
    job, found = Job(rank, replacement=replacement), {}
    for way in ways:
        job.findings = []
        bare, repaired = (job.train(way, protected=protected) for protected in (False, True))
        found[way] = {"bare": bare, "repaired": repaired, "findings": job.findings}
    return found


@pytest.fixture(scope="module")
def rebuilt() -> list[dict[str, Any]]:
    return ranks.values(ranks.run(_train, list(REBOUND), "rebuild", world_size=2))


@pytest.mark.parametrize("way", sorted(REBOUND))
class TestReboundHook:
    """The group of a hook is rebuilt after update 2."""

    def test_training_goes_on_bitwise(self, rebuilt: list[dict[str, Any]], way: str) -> None:
        """After every update each rank has the state of an uninterrupted run."""
        for found in rebuilt:
            assert UPDATES == len(set(found[way]["bare"]))
            assert found[way]["bare"] == found[way]["repaired"]

    def test_nothing_names_the_old_group(self, rebuilt: list[dict[str, Any]], way: str) -> None:
        """Python objects, threads and descriptors are gone."""
        for found in rebuilt:
            (finding,) = found[way]["findings"]

            assert ((), (), ()) == (finding.left, finding.redirected, finding.adopted)
            assert (True, "released") == (finding.dead, finding.native)


class TestHookThatKeepsItsGroup:
    """The Reducer has the group itself, which nobody can rebind."""

    @pytest.mark.skipif(not CAN_RECONFIGURE, reason="torch cannot reconfigure")
    def test_is_reconfigured_in_place(self) -> None:
        """Training goes on bitwise with the same object."""
        for found in ranks.values(ranks.run(_train, list(KEPT), "auto", world_size=2)):
            for way in KEPT:
                assert UPDATES == len(set(found[way]["bare"]))
                assert found[way]["bare"] == found[way]["repaired"]

    @pytest.mark.parametrize(
        "replacement",
        ["rebuild"] if CAN_RECONFIGURE else ["rebuild", "auto"],
    )
    def test_is_refused_at_attach_where_it_would_be_rebuilt(self, replacement: str) -> None:
        """In one line, with what to do instead."""
        for found in ranks.values(ranks.run(_attach, replacement, world_size=2)):
            assert list(KEPT) == list(found)
            for reason, detail in found.values():
                assert accelpact.Reason.UNSUPPORTED is reason
                assert "root._comm_hooks" in detail
                assert "register the hook with state None" in detail
                assert "\n" not in detail

    def test_that_comes_after_attach_is_refused_before_anything_is_torn_down(self) -> None:
        """Every rank ends, and says why."""
        found = ranks.run(_register_late, world_size=2)

        told = _all_ended(found)
        assert any("register the hook with state None" in report for report in told), told
        assert "torn down" not in told

    def test_is_caught_by_the_audit_without_the_adapter(self) -> None:
        """Every rank ends, and the reason has the hook's path."""
        told = _all_ended(ranks.run(_train_without_adapter, world_size=2))

        assert any("_comm_hooks" in report for report in told), told
        assert any(accelpact.Reason.STALE_REFERENCE.value in report for report in told), told


def _all_ended(found: list[Result]) -> list[str]:
    """Assert that every rank has ended as refused; return what they reported."""
    assert [accelpact.EXIT_STATUS] * 2 == [result.status for result in found], found
    return [str(report) for result in found for report in result.reports]


def _attach(rank: Rank, replacement: str) -> dict[str, tuple[accelpact.Reason, str]]:
    job, found = Job(rank, replacement=replacement), {}
    for way in KEPT:
        model = job.model(way)
        with pytest.raises(Rejected) as rejection:
            job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found[way] = (rejection.value.reason, rejection.value.detail)
    return found


def _register_late(rank: Rank) -> None:
    job = Job(rank, replacement="rebuild")
    group = _communicator.find(job.pair)
    model = DistributedDataParallel(nn.Linear(DIM, DIM), process_group=group)
    pact = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _group_itself(model, group)
    _communicator.retire = lambda *_, **__: rank.report("torn down")  # type: ignore[assignment]
    try:
        job.repair(pact, job.pair)
    except Rejected as rejection:
        rank.report(str(rejection))
        os._exit(accelpact.EXIT_STATUS)


def _train_without_adapter(rank: Rank) -> None:
    known = [each for each in accelpact.FRAMEWORKS if each.name != "ddp"]
    Job(rank, replacement="rebuild", frameworks=known).train("group itself", protected=True)
    dist.barrier()
