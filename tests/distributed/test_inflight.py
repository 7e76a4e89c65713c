"""A collective fails inside an update: it is taken back everywhere and executed again, bitwise."""

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelpact import EXIT_STATUS, _communicator
from tests.distributed import inflight, ranks, scripts, wrappers
from tests.distributed.inflight import Strike

if TYPE_CHECKING:
    from tests.distributed.inflight import Training
    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
STRIKES = [
    Strike(update=number + 2, kind=kind, place=place, rank=number % 4)
    for number, (kind, place) in enumerate(itertools.product(inflight.NAMES, PLACES.values()))
]
"""One per update from the second on: every kind of collective at every place, on every rank."""
UPDATES = len(STRIKES) + 2

JOBS = {
    "fsdp1-iterator": ("fsdp1-groups", "iterator", "rebuild"),
    "fsdp1-decorated": ("fsdp1-mesh-flat", "decorated", "auto"),
    "fsdp2-iterator": ("fsdp2", "iterator", "auto"),
    "fsdp2-decorated": ("fsdp2", "decorated", "rebuild"),
    "fsdp2-in-place": ("fsdp2", "decorated", "reconfigure"),
}
IN_PLACE = pytest.mark.skipif(
    not hasattr(c10d, "_reconfigure"), reason="torch < 2.14 cannot reconfigure a group in place"
)
LOST_S = 3.0
"""Timeout of the model's groups: Gloo sometimes loses the failure of a send that was cut."""
GIVEN_UP_S = 5.0
"""Deadline and patience of the runtime where it is to refuse."""


def _connect(rank: Rank) -> None:
    c10d.default_pg_timeout = timedelta(seconds=LOST_S)  # type: ignore[misc]  of a mesh's groups
    wrappers.connect(rank, LOST_S)


def _job(rank: Rank, name: str, events: str) -> dict[str, Any]:
    _connect(rank)
    kind, form, replacement = JOBS[name]
    build, _ = wrappers.WRAPPERS[kind]
    expected = inflight.plain(rank, build, UPDATES)
    found = inflight.protected(
        rank,
        build,
        UPDATES,
        form=form,
        strikes=STRIKES,
        events=events,
        replacement=replacement,
    )
    return {"expected": expected, **found}


Job = tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=IN_PLACE if replacement == "reconfigure" else ())
        for name, (_, _, replacement) in JOBS.items()
    ],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What every rank says of a job, and its runtime's events."""
    folder = tmp_path_factory.mktemp("events")
    found = ranks.values(ranks.run(_job, request.param, str(folder), deadline=60))
    return found, [scripts.events(folder, number) for number in range(4)]


class TestEveryCollective:
    def test_every_rank_has_the_uninterrupted_state(self, job: Job) -> None:
        """After every update: weights, moments, random states, loader and frontier."""
        for each in job[0]:
            assert each["expected"] == each["roots"]

    def test_every_strike_fired(self, job: Job) -> None:
        """On its rank, in its update; and the first, middle and last of a kind are different."""
        planned = [[s.update for s in STRIKES if s.rank == rank] for rank in range(4)]

        assert planned == [each["struck"] for each in job[0]]
        assert all(count >= len(PLACES) for count in job[0][0]["usual"].values())

    def test_one_attempt_is_thrown_away_per_fault(self, job: Job) -> None:
        """No rank executes an update more often than once more."""
        # Fewer where a peer's failure is heard of before a rank has begun the update.
        assert all(UPDATES < each["attempts"] <= UPDATES + len(STRIKES) for each in job[0])
        assert [len(STRIKES)] * 4 == [each["generation"] for each in job[0]]

    def test_it_is_recorded(self, job: Job) -> None:
        """Which update, what it had cost, which phases it took to take it back."""
        phases = {"admit", "discard", "release"}
        for events in job[1]:
            discards = [event for event in events if event["event"] == "discard"]
            assert [strike.update for strike in STRIKES] == [each["update"] for each in discards]
            assert all(each["lost_s"] > 0 for each in discards)
            assert all(phases <= set(each["phases_ms"]) for each in discards)
            assert all([0, 1, 2, 3] == each["ranks"] for each in discards)

    def test_phase_is_where_it_struck(self, job: Job) -> None:
        """A reduction fails in backward; the first all-gather of an update in forward."""
        phases = [each["phase"] for each in job[1][0] if each["event"] == "discard"]
        kinds = [(strike.kind, strike.place) for strike in STRIKES]

        assert "forward" == phases[kinds.index(("all-gather", 0.0))]
        assert {"backward"} == {
            phase
            for phase, (kind, _) in zip(phases, kinds, strict=True)
            if kind == "reduce-scatter"
        }


def _one_sided(rank: Rank, kind: str) -> dict[str, Any]:
    """Strike one rank only: its peers complete the collective and go on."""
    _connect(rank)
    build, _ = wrappers.WRAPPERS[kind]
    strikes = [
        Strike(update=2, kind="all-gather", place=0.5, rank=1, completes=True),
        Strike(update=3, kind="reduce-scatter", place=0.5, rank=2, completes=True),
    ]
    expected = inflight.plain(rank, build, 4)
    found = inflight.protected(rank, build, 4, form="iterator", strikes=strikes)
    return {"expected": expected, **found}


class TestOneSided:
    @pytest.mark.parametrize("kind", ["fsdp1-groups", "fsdp2"])
    def test_peers_that_went_on_come_back(self, kind: str) -> None:
        """They are in the same update still, however far: it is taken back on all."""
        found = ranks.values(ranks.run(_one_sided, kind, deadline=60))

        assert [each["expected"] for each in found] == [each["roots"] for each in found]
        assert [2] * 4 == [each["generation"] for each in found]
        assert [[], [2], [3], []] == [each["struck"] for each in found]

    def test_peer_that_has_committed_is_refused(self) -> None:
        """The last collective completes on a peer, which commits: nobody trains on."""
        results = ranks.run(_late_failure, deadline=60)

        assert [EXIT_STATUS] * 4 == [each.status for each in results]


def _late_failure(rank: Rank) -> NoReturn:
    """Rank 0 fails when it has all gradients, and its peers have committed the update."""
    _connect(rank)
    build, _ = wrappers.WRAPPERS["fsdp1-groups"]

    def prepare(training: Training) -> None:
        def before_step(update: int) -> None:
            if update == 2 and rank.number == 0:
                time.sleep(1)
                raise dist.DistBackendError("injected: failed after the last collective")

        training.before_step = before_step

    inflight.protected(
        rank,
        build,
        4,
        form="iterator",
        strikes=[],
        prepare=prepare,
        clips=False,
        deadline=GIVEN_UP_S,
        patience=GIVEN_UP_S,
    )
    raise AssertionError("trained on")


def _refused(rank: Rank, how: str, events: str) -> NoReturn:
    _connect(rank)
    build, _ = wrappers.WRAPPERS["fsdp2"]

    def prepare(training: Training) -> None:
        def in_step(*_: Any) -> None:
            raise dist.DistBackendError("injected: a collective of the optimizer failed")

        def dying(update: int) -> None:
            if update == 2:
                os._exit(1)

        if how == "step" and rank.number == 1:
            training.optimizer.register_step_pre_hook(in_step)
        if how == "death" and rank.number == 3:
            training.before_step = dying

    strikes = [Strike(update=2, kind="all-gather", place=0.5, rank=0, attempts=10)]
    inflight.protected(
        rank,
        build,
        4,
        form="iterator",
        strikes=strikes if how == "persistent" else [],
        events=events,
        prepare=prepare,
        deadline=GIVEN_UP_S,
        patience=GIVEN_UP_S,
    )
    raise AssertionError("trained on")


class TestRefused:
    """What cannot be taken back ends every rank with the status that says so."""

    def refused(self, how: str, folder: Path) -> tuple[list[Result], list[dict[str, Any]]]:
        results = ranks.run(_refused, how, str(folder), deadline=60)
        events = [event for rank in range(4) for event in scripts.events(folder, rank)]
        return results, [event for event in events if event["event"] in ("reject", "discard")]

    def test_a_failure_in_the_step(self, tmp_path: Path) -> None:
        """Weights may be half written."""
        results, events = self.refused("step", tmp_path)

        assert [EXIT_STATUS] * 4 == [each.status for each in results]
        # The first to look says why: the rank that stepped, or a peer that has committed already.
        reasons = ("while the optimizer stepped", "has committed update")
        assert any(reason in event["reason"] for event in events for reason in reasons)
        assert not [event for event in events if event["event"] == "discard"]

    def test_a_fault_that_stays(self, tmp_path: Path) -> None:
        """An update is not taken back for ever."""
        results, events = self.refused("persistent", tmp_path)

        assert [EXIT_STATUS] * 4 == [each.status for each in results]
        assert 3 * 4 == len([event for event in events if event["event"] == "discard"])
        assert any("has been taken back 3 times" in event.get("reason", "") for event in events)

    def test_a_death(self, tmp_path: Path) -> None:
        """Its peers end within the time that the runtime waits for a rank."""
        results, _ = self.refused("death", tmp_path)
        died = results[3].ended

        assert [EXIT_STATUS, EXIT_STATUS, EXIT_STATUS, 1] == [each.status for each in results]
        assert max(each.ended for each in results) - died < 2 * GIVEN_UP_S + 2 * LOST_S


def _data_parallel(rank: Rank) -> dict[str, Any]:
    """Train two independent pairs; the group of one is cut in the backward pass of an update."""
    _connect(rank)

    def build() -> wrappers.Wrapped:
        torch.manual_seed(0)
        model = nn.Sequential(*[inflight.Normalized() for _ in range(3)])
        group = inflight.pair(rank.number)
        return wrappers.Wrapped(
            DistributedDataParallel(model, process_group=group), lambda _: inflight.pair(0)
        )

    struck: list[int] = []

    def prepare(training: Training) -> None:
        def cut(_: torch.Tensor) -> None:
            if training.attempts == 2 and rank.number == 3 and not struck:
                struck.append(2)
                assert _communicator.interrupt(inflight.pair(rank.number))

        parameters = list(training.model.parameters())
        parameters[len(parameters) // 2].register_hook(cut)

    expected = inflight.plain(rank, build, 4)
    found = inflight.protected(
        rank, build, 4, form="iterator", strikes=[], prepare=prepare, replacement="rebuild"
    )
    return {**found, "expected": expected, "struck": struck}


class TestDataParallel:
    def test_the_column_alone_takes_it_back(self) -> None:
        """With running means and variances; the other pair is not disturbed."""
        found = ranks.values(ranks.run(_data_parallel, deadline=60))

        assert [each["expected"] for each in found] == [each["roots"] for each in found]
        assert [[], [], [], [2]] == [each["struck"] for each in found]
        assert [4, 5, 4, 5] == [each["attempts"] for each in found]
