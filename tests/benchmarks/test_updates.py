"""What the runtime costs where nothing fails: per update, and of a whole update."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import accelpact
from harness.stats import interval
from harness.workload import Given, Training, decoder
from harness.workload import hsdp as hsdp_workload
from harness.workload.data import Loader
from tests.benchmarks import hsdp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelpact import Pact
    from tests.benchmarks.conftest import AgainstFloor
    from tests.benchmarks.hsdp import Built

pytestmark = pytest.mark.benchmark

NUM_PAIRS = 400
NUM_WARM_UP = 10


def batches() -> tuple[Training, Loader]:
    """Return the job of rank 0, and its data."""
    given = Given(device=torch.device("cpu"), dtype=torch.float32, seed=1, rank=0, world_size=4)
    training = decoder.maker(hsdp.workload())(given)
    return training, Loader(
        training,
        rank=0,
        world_size=4,
        seed=1,
        device=torch.device("cpu"),
    )


@contextmanager
def attached(
    *, wrapper: str, drive: str, loader: Loader | None = None
) -> Iterator[tuple[Built, Pact]]:
    """Rank 0 of 2x2 with the runtime, whose collectives do nothing; its peers only beat.

    All ranks are real to the control plane: each peer is a process with the same model, the
    runtime attached, and nothing else to do.
    """

    def attach(built: Built, port: int) -> Pact:
        return accelpact.attach(
            built.model,
            built.optimizer,
            store=lambda: hsdp.client(port),
            prefix="benchmark",
            drive=drive,
            loader=loader,
            audit=False,
        )

    def serve(rank: int, line: int) -> None:
        port = int.from_bytes(os.read(line, 2), "little")
        with hsdp.without_peers(rank=rank, wrapper=wrapper) as built:
            pact = attach(built, port)
            os.read(line, 1)
            pact.close()

    with hsdp.forked(serve, ranks=range(1, 4)) as ends:
        # After the forks: no rank inherits the store's sockets or waits for its thread.
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for end in ends:
            os.write(end, server.port.to_bytes(2, "little"))
        with hsdp.without_peers(wrapper=wrapper) as built:
            pact = attach(built, server.port)
            yield built, pact
            pact.close()
        del server


def hooks(built: Built) -> list[dict[int, Callable[..., object]]]:
    """Return the hooks that an update passes, in their order (torch 2.13.0 and 2.14.1)."""
    return [
        built.model._forward_pre_hooks,
        built.optimizer._optimizer_step_pre_hooks,
        built.optimizer._optimizer_step_post_hooks,
    ]


def calls(places: list[dict[int, Callable[..., object]]], own: list[set[int]]) -> list[Any]:
    """Return the hooks that are not in `own`."""
    return [
        hook
        for place, known in zip(places, own, strict=True)
        for key, hook in place.items()
        if key not in known
    ]


@pytest.mark.parametrize("wrapper", hsdp.WRAPPERS)
def test_hooks(against_floor: AgainstFloor, benchmark: Any, wrapper: str) -> None:
    """All that the runtime does in an update of 33 modules, against as many empty hooks.

    Entering the forward pass, the fence before the optimizer's step, noting the gradients that it
    applied, the commit, the structural guard, and capturing random states, loader and frontier.
    """
    with attached(wrapper=wrapper, drive="auto", loader=batches()) as (built, pact):
        for parameter in built.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        pact.pause()
        own = [set(place) for place in hooks(built)]
        pact.resume()
        added = calls(hooks(built), own)

        def empty(*_: object) -> None:
            """Do nothing."""

        def update() -> None:
            for hook in added:
                hook(None, (), {})

        def nothing() -> None:
            for _ in added:
                empty(None, (), {})

        before = pact.frontier
        update()
        assert before + 1 == pact.frontier
        assert pact.boundary.declared
        assert before + 1 == pact.captured.frontier
        against_floor(
            update, nothing, description=f"a call of {len(added)} empty hooks", rounds=1000
        )
        benchmark.extra_info["per_update_us"] = benchmark.stats.stats.min * 1e6


@pytest.mark.timeout(900)
@pytest.mark.parametrize("drive", ["manual", "auto"])
def test_whole_updates(benchmark: Any, drive: str) -> None:
    """Whole updates with the runtime's work off and on, in pairs whose order alternates.

    The ratio of a pair is on / off; its median and the order-statistic interval of that say what
    the runtime adds to an update. `manual` is hooks and commits, `auto` also the functions that
    stand in for torch.distributed's.
    """
    training, loader = batches()
    with attached(wrapper=hsdp.FSDP1, drive=drive, loader=loader) as (built, pact):

        def timed(*, with_runtime: bool) -> float:
            """Seconds of one update; switching is not part of it."""
            if not with_runtime:
                pact.pause()
            start = time.perf_counter()
            hsdp_workload.train_update(built.model, built.optimizer, loader, training)
            if with_runtime and drive == "manual":
                pact.commit(pact.frontier + 1)
            seconds = time.perf_counter() - start
            if not with_runtime:
                pact.resume()
            return seconds

        pairs: list[tuple[float, float]] = []

        def pair() -> None:
            if len(pairs) % 2:
                off, on = timed(with_runtime=False), timed(with_runtime=True)
            else:
                on, off = timed(with_runtime=True), timed(with_runtime=False)
            pairs.append((on, off))

        benchmark.pedantic(pair, rounds=NUM_PAIRS + NUM_WARM_UP)
        committed = pact.frontier

    del pairs[:NUM_WARM_UP]
    found = interval([on / off for on, off in pairs])
    benchmark.extra_info.update(
        floor="the same update without the runtime's work",
        floor_s=min(off for _, off in pairs),
        ratio_to_floor=1 / found.median,
        on_over_off={
            "n": found.n,
            "median": found.median,
            "low": found.low,
            "high": found.high,
            "method": found.method,
        },
        pairs=[[on, off] for on, off in pairs],
    )
    assert NUM_PAIRS + NUM_WARM_UP == committed
