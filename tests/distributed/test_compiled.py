"""Compiled models on two ranks: a group is rebuilt, nothing is compiled again, training is bitwise.

The backend is `aot_eager`: all of the compiler but the code generator.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelpact
from accelpact import _communicator
from tests.distributed import ranks, wrappers

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelpact import Pact
    from accelpact._audit import Finding
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

DIM = 4
UPDATES = 3
REPAIR_AFTER = 2
"""Update. By then everything has been compiled."""
COUNTED = ("stats", "frames", "graph_break", "aot_autograd", "recompiles")
"""Of dynamo's counters."""


def compiling(what: Any) -> Any:
    """Compile a module or a function."""
    return torch.compile(what, backend="aot_eager")


class Layer(nn.Module):
    """What the compiler makes a graph of: it leaves torch's own modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def fsdp1(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        Layer(),
        process_group=_communicator.find(name),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2(name: str) -> nn.Module:
    torch.manual_seed(0)
    mesh = dist.DeviceMesh.from_group(_communicator.find(name), "cpu")
    return fully_shard(Layer(), mesh=mesh)


def ddp(name: str) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Layer(), process_group=_communicator.find(name))


KINDS = {"fsdp1": fsdp1, "fsdp2": fsdp2, "ddp": ddp}
WAYS = ("module", "method", "later", "driven")
"""`torch.compile(model)`, `model.compile()`, and `torch.compile(model)` after `attach(model)`, with
a runtime that the test drives; and `torch.compile(model)` with one that stands in for the functions
of torch.distributed."""


class Job:
    """Trains compiled models one after the other, over a group of both ranks."""

    def __init__(self, rank: Rank, **settings: Any) -> None:
        """Connect."""
        wrappers.connect(rank)
        self.rank = rank
        self.store = rank.store()
        self.meetings = itertools.count()
        self.prefixes = itertools.count()
        self.settings = settings
        self.name: str = dist.new_group([0, 1]).group_name
        self.findings: list[Finding] = []

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, drive: str = "manual"
    ) -> Pact:
        return accelpact.attach(
            model,
            optimizer,
            store=self.rank.store,
            prefix=f"pact{next(self.prefixes)}",
            drive=drive,
            replacement="rebuild",
            on_abort=self.rank.report,
            **self.settings,
        )

    def repair(self, pact: Pact) -> None:
        """Rebuild the group; the old one is cut off, so that whoever goes on using it fails."""
        ranks.meet(self.store, f"repair {next(self.meetings)}", 2)
        _communicator.interrupt(_communicator.find(self.name))
        pact.repair(_communicator.find(self.name))
        pact.audits.join()
        self.findings = list(pact.audits.findings)

    def train(self, kind: str, way: str, *, protected: bool) -> dict[str, Any]:
        """Return digests and the compiler's counts after every update."""
        torch._dynamo.reset()
        counters.clear()
        model = KINDS[kind](self.name)
        used = compiling(model) if way in ("module", "driven") else model
        if way == "method":
            model.compile(backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        drive = "auto" if way == "driven" else "manual"
        pact = self.attach(used, optimizer, drive) if protected else None
        if way == "later":
            used = compiling(model)
        torch.manual_seed(100 + dist.get_rank())
        roots, counts, entered = [], [], []
        for update in range(1, UPDATES + 1):
            loss = used(torch.randn(2, DIM)).square().mean()
            entered.append(pact is None or pact.boundary.entered)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = accelpact.application_state(model, optimizer, cursor=0, frontier=update)
            roots.append(accelpact.tree_digest(state).root)
            counts.append(compiled_so_far())
            if pact is not None:
                pact.commit(update)
                if update == REPAIR_AFTER:
                    self.repair(pact)
        if pact is not None:
            pact.close()
        return {"roots": roots, "counts": counts, "entered": entered}


def compiled_so_far() -> dict[str, dict[str, int]]:
    """Return what dynamo has counted: graphs, frames, graph breaks."""
    return {key: dict(copy.copy(counters[key])) for key in COUNTED}


def _train(rank: Rank, kind: str) -> dict[str, dict[str, Any]]:
    """Train without the runtime and with it, compiled in every way."""
    job, found = Job(rank), {}
    job.train(kind, "module", protected=False)  # some of torch's own frames count only once
    for way in WAYS:
        found[way] = {
            "bare": job.train(kind, way, protected=False),
            "repaired": job.train(kind, way, protected=True),
            "finding": job.findings[-1],
        }
    return found


@pytest.fixture(scope="module", params=sorted(KINDS))
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """What both ranks say of one wrapper."""
    return ranks.values(ranks.run(_train, request.param, world_size=2))


@pytest.mark.parametrize("way", WAYS)
class TestCompiledModel:
    """One wrapper, compiled in one way; its group is rebuilt after update 2."""

    def test_training_goes_on_bitwise(
        self, trained: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """After every update each rank has the state of an uninterrupted compiled run."""
        for found in trained:
            assert UPDATES == len(set(found[way]["bare"]["roots"]))
            assert found[way]["bare"]["roots"] == found[way]["repaired"]["roots"]

    def test_nothing_is_compiled_again(
        self, trained: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """Graphs, frames and graph breaks after the repair are those before it."""
        for found in trained:
            counts = found[way]["repaired"]["counts"]

            assert counts[0]["stats"]["unique_graphs"] > 0
            assert counts[REPAIR_AFTER - 1] == counts[-1]

    def test_the_runtime_adds_nothing_to_what_is_compiled(
        self, trained: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """Graphs, frames and graph breaks are those of a run without the runtime."""
        for found in trained:
            assert found[way]["bare"]["counts"] == found[way]["repaired"]["counts"]

    def test_every_forward_pass_is_noticed(
        self, trained: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """Also by compiled code that was there before."""
        for found in trained:
            assert [True] * UPDATES == found[way]["repaired"]["entered"]

    def test_nothing_names_the_old_group(
        self, trained: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """The group is gone, its threads and descriptors too."""
        for found in trained:
            finding = found[way]["finding"]

            assert ((), ()) == (finding.left, finding.redirected)
            assert (True, "released") == (finding.dead, finding.native)


def _train_without_adapter(rank: Rank) -> None:
    known = [each for each in accelpact.FRAMEWORKS if each.name != "compiled"]
    Job(rank, frameworks=known).train("fsdp1", "module", protected=True)
    dist.barrier()


class TestAblation:
    """The runtime does not know of the copies that compiling makes."""

    def test_is_caught_by_the_audit(self) -> None:
        """Every rank ends, and the reason has the copy's path."""
        found = ranks.run(_train_without_adapter, world_size=2)
        told = [str(report) for result in found for report in result.reports]

        assert [accelpact.EXIT_STATUS] * 2 == [result.status for result in found], found
        assert any("wrap_inline.<locals>.inner().process_group" in report for report in told), told
        assert any(accelpact.Reason.STALE_REFERENCE.value in report for report in told), told


def _functions(rank: Rank) -> dict[str, dict[str, Any]]:
    """Train with compiled functions that are given the group in every way, and rebuild it."""
    job, found = Job(rank), {}
    for way, make in FUNCTIONS.items():
        model = fsdp2(job.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = make(job.name)
        pact = job.attach(model, optimizer, "auto")
        sums, counts = [], []
        for update in range(1, UPDATES + 1):
            model(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            pact.commit(update)
            sums.append(total(torch.tensor([float(rank.number + 1)])).item())
            counts.append(compiled_so_far())
            if update == REPAIR_AFTER:
                job.repair(pact)
        pact.close()
        found[way] = {"sums": sums, "counts": counts, "finding": job.findings[-1]}
    return found


def _closed_over(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    group = _communicator.find(name)
    return compiling(lambda x: funcol.all_reduce(x * 2, "sum", group) + 1)


def _in_place(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    group = _communicator.find(name)

    def total(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    return compiling(total)


def _handed_over(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    total = compiling(lambda x, group: funcol.all_reduce(x * 2, "sum", group) + 1)
    return lambda x: total(x, _communicator.find(name))


def _by_mesh(_: str) -> Callable[[torch.Tensor], torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    return compiling(lambda x: funcol.all_reduce(x * 2, "sum", (mesh, 0)) + 1)


FUNCTIONS = {
    "closure": _closed_over,
    "c10d": _in_place,
    "argument": _handed_over,
    "mesh": _by_mesh,
}


@pytest.fixture(scope="module")
def functions() -> list[dict[str, dict[str, Any]]]:
    return ranks.values(ranks.run(_functions, world_size=2))


@pytest.mark.parametrize("way", sorted(FUNCTIONS))
class TestCompiledFunction:
    """A function of the script that computes with the group, which is rebuilt."""

    def test_computes_with_the_replacement(
        self, functions: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """The sum is right, and nothing is compiled again."""
        for found in functions:
            assert [7.0] * UPDATES == found[way]["sums"]
            assert found[way]["counts"][0] == found[way]["counts"][-1]

    def test_nothing_of_torch_names_the_old_group(
        self, functions: list[dict[str, dict[str, Any]]], way: str
    ) -> None:
        """What represented the group in the trace stands for the replacement."""
        for found in functions:
            finding = found[way]["finding"]

            assert () == finding.left
            assert way == "mesh" or finding.adopted


def _around(rank: Rank) -> list[bool]:
    """Call models in functions that are compiled as a whole."""
    job = Job(rank)
    seen = []
    for make in KINDS.values():
        model = make(job.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pact = job.attach(model, optimizer)
        call = compiling(lambda x, model=model: model(x).sum())
        for update in (1, 2):
            with torch.no_grad():
                call(torch.ones(2, DIM))
            seen.append(pact.boundary.entered)
            loss = call(torch.ones(2, DIM))
            seen.append(pact.boundary.entered)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pact.commit(update)
        pact.close()
    return seen


class TestFunctionAroundModel:
    """The script compiles a function that calls the model."""

    def test_forward_pass_is_noticed(self) -> None:
        """One that keeps a graph is, one without gradients is not."""
        for seen in ranks.values(ranks.run(_around, world_size=2)):
            assert [False, True] * 2 * len(KINDS) == seen
