"""The runtime on 2x2 real ranks: a repair changes nothing but the communicator, or all end."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch.distributed as dist

import accelpact
from accelpact import _communicator
from tests.distributed import ranks, trainee

if TYPE_CHECKING:
    from accelpact import Pact
    from harness.job import TrainingJob
    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

UPDATES = 4
COLUMNS = ((0, 2), (1, 3))
"""Members of the replicate groups, by shard."""
DEADLINE_S = 3.0
"""Of the runtime, where a repair is to fail."""
PHASES = ["guard", "admit", "retire", "rebuild", "rebind", "validate", "release"]


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, Any]]:
    """What every rank says of a run without a fault."""
    return ranks.values(ranks.run(trainee.train, UPDATES))


@pytest.fixture(scope="module")
def one_column() -> list[dict[str, Any]]:
    """The same with rank 3 absent after update 2."""
    return ranks.values(ranks.run(trainee.train, UPDATES, {2: 3}))


@pytest.fixture(scope="module")
def all_columns() -> list[dict[str, Any]]:
    """The same with one column failing after another."""
    return ranks.values(ranks.run(trainee.train, UPDATES, {1: 3, 2: 0}))


class TestRepairOfOneColumn:
    """A member stays away from an all-reduce at a boundary; its peer times out."""

    def test_every_rank_goes_on_bitwise(
        self, uninterrupted: list[dict[str, Any]], one_column: list[dict[str, Any]]
    ) -> None:
        """After every update each rank has the state of an uninterrupted run."""
        assert roots(uninterrupted) == roots(one_column)
        assert [UPDATES] * 4 == [len(each) for each in roots(one_column)]

    def test_only_its_members_repair(self, one_column: list[dict[str, Any]]) -> None:
        """The other column is not disturbed, and takes part with its control threads alone."""
        assert [0, 1, 0, 1] == [len(each["repairs"]) for each in one_column]
        assert [1, 1, 1, 1] == [each["generation"] for each in one_column]

    @pytest.mark.parametrize("member", COLUMNS[1])
    def test_every_cached_reference_is_rebound(
        self, one_column: list[dict[str, Any]], member: int
    ) -> None:
        """One `_inter_node_pg` per FSDP unit, and as many in the states of the comm hooks."""
        (repair,) = one_column[member]["repairs"]
        endings = ("._inter_node_pg", "._inter_node_state.process_group")
        counts = [sum(label.endswith(end) for label in repair["holders"]) for end in endings]

        assert [trainee.NUM_UNITS, trainee.NUM_UNITS] == counts
        assert 2 * trainee.NUM_UNITS == len(set(repair["holders"]))
        assert 2 * trainee.NUM_UNITS == repair["naming_it"]

    @pytest.mark.parametrize("member", COLUMNS[1])
    def test_replacement_has_the_old_name(
        self, one_column: list[dict[str, Any]], member: int
    ) -> None:
        """Whoever looks the group up by its name finds the replacement."""
        (repair,) = one_column[member]["repairs"]

        assert one_column[member]["name"] == repair["name"]
        assert repair["resolved"]

    @pytest.mark.parametrize("member", COLUMNS[1])
    def test_members_agree_on_what_was_done(
        self, one_column: list[dict[str, Any]], member: int
    ) -> None:
        """Frontier, generation, members and phases are the same on each of them."""
        (repair,) = one_column[member]["repairs"]

        assert (2, 1) == (repair["frontier"], repair["generation"])
        assert COLUMNS[1] == repair["ranks"]
        assert PHASES == repair["phases"]


class TestRepairOfAllColumns:
    """One column fails, and after the next update the other one does."""

    def test_every_rank_goes_on_bitwise(
        self, uninterrupted: list[dict[str, Any]], all_columns: list[dict[str, Any]]
    ) -> None:
        """Both groups are replaced, and nothing else has changed."""
        assert roots(uninterrupted) == roots(all_columns)

    def test_generations_count_repairs_of_any_group(
        self, all_columns: list[dict[str, Any]]
    ) -> None:
        """The second repair is generation 2, also for those who did no first one."""
        found = [[repair["generation"] for repair in each["repairs"]] for each in all_columns]

        assert [[2], [1], [2], [1]] == found
        assert [2, 2, 2, 2] == [each["generation"] for each in all_columns]


class TestColumnsThatFailTogether:
    """Both columns fail at one boundary, with members that learn of it at different times."""

    def test_are_repaired_one_after_the_other(self, uninterrupted: list[dict[str, Any]]) -> None:
        """Members of a group agree on its generation, and every rank goes on bitwise."""
        found = ranks.values(ranks.run(_repair_together, {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.0}))
        generations = [each["generation"] for each in found]

        assert roots(uninterrupted)[0][-1] == found[0]["root"]
        assert [each[-1] for each in roots(uninterrupted)] == [each["root"] for each in found]
        assert [1, 2] == sorted({generations[0], generations[1]})
        assert generations[:2] == generations[2:]


def _repair_together(rank: Rank, late: dict[int, float]) -> dict[str, Any]:
    """Train, with a repair of every replicate group after update 2, each rank `late` by so much."""
    job = trainee.make(rank)
    pact = trainee.protect(rank, job)
    done = None
    while job.frontier < UPDATES:
        trainee.update(job, pact)
        if job.frontier == 2:
            time.sleep(late[rank.number])
            done = trainee.repair(job, pact)
    dist.barrier()
    pact.close()
    assert done is not None
    return {"root": job.digest().root, "generation": done.generation}


class TestRepairOfAShardGroup:
    """The other dimension of the mesh."""

    def test_every_reference_is_found_and_training_goes_on_bitwise(
        self, uninterrupted: list[dict[str, Any]]
    ) -> None:
        """Modules, flat parameters and the shared execution order name the replacement."""
        found = ranks.values(ranks.run(_repair_shards))
        units = ["process_group", "_handle.process_group"] * trainee.NUM_UNITS

        assert [each[-1] for each in roots(uninterrupted)] == [root for root, _ in found]
        for _, holders in found[:2]:
            attributes = [re.sub(r"^(root|blocks\.\d+)\.", "", label) for label in holders]
            assert sorted([*units, "_exec_order_data.process_group"]) == sorted(attributes)


def _repair_shards(rank: Rank) -> tuple[str, list[str]]:
    job, pact = _protected(rank)
    holders: tuple[str, ...] = ()
    if rank.number in (0, 1):
        done = pact.repair(job.groups.shard)
        job.groups.shard, holders = done.group, done.holders
    while job.frontier < UPDATES:
        trainee.update(job, pact)
    pact.close()
    return job.digest().root, list(holders)


class TestCommunicatorAlone:
    """The group is replaced, and no framework rebinds what it cached."""

    def test_probe_passes_and_next_synchronized_backward_fails(self) -> None:
        """The stale references are what fails, and the index names every one of them."""
        found = ranks.run(_replace_only)

        for member in COLUMNS[1]:
            rebound, left, error = found[member].reports
            assert 0 == rebound
            assert 2 * trainee.NUM_UNITS == len(left)
            assert error
        assert [1, 1, 1, 1] == [result.status for result in found], found


def _replace_only(rank: Rank) -> None:
    job = trainee.make(rank)
    pact = trainee.protect(rank, job, frameworks=())
    loss = trainee.update(job, pact)
    old = job.groups.replicate
    if not trainee.reduce_loss(rank, job, loss, absent=3):
        done = trainee.repair(job, pact)
        index = accelpact.ReferenceIndex(job.model, accelpact.FRAMEWORKS)
        rank.report(len(done.holders))
        rank.report([reference.label for reference in index.holders(old)])
    try:
        trainee.update(job, pact)
    except Exception as error:
        rank.report(f"{type(error).__name__}: {error}")
        raise


class TestRefusal:
    """Whatever is not a committed boundary on all ranks ends all of them, soon."""

    @pytest.mark.parametrize("kind", ["gradient", "no_sync", "stepped"])
    def test_uncommitted_boundary_is_refused(self, kind: str) -> None:
        """A gradient, an accumulation under way, or a step that nobody committed."""
        started = time.monotonic()
        found = ranks.run(_repair_uncommitted, kind)

        assert_all_refused(found, accelpact.Reason.UNCOMMITTED_BOUNDARY)
        assert time.monotonic() - started < 30

    @pytest.mark.parametrize("liar", [1, 2], ids=["bystander", "member"])
    def test_other_frontier_is_refused(self, liar: int) -> None:
        """One rank has committed an update more than the others, it says."""
        found = ranks.run(_repair_elsewhere, liar)

        assert_all_refused(found, accelpact.Reason.FRONTIER_MISMATCH)

    @pytest.mark.parametrize("phase", ["admit", "rebuild", "validate", "release"])
    def test_death_during_repair_ends_the_peers(self, phase: str) -> None:
        """A member dies between notice and release; nobody waits longer than the deadline."""
        found = ranks.run(_die_in_repair, phase)
        took = [time_ for result in found for time_ in result.reports if isinstance(time_, float)]

        assert [_DEATH, *[accelpact.EXIT_STATUS] * 3] == [result.status for result in found], found
        assert all(seconds < 2 * DEADLINE_S + trainee.GROUP_TIMEOUT_S for seconds in took)

    def test_rank_that_never_answers_is_refused(self) -> None:
        """A bystander's control thread is gone; the members do not wait for it forever."""
        found = ranks.run(_repair_without_an_answer)

        assert 0 == found[1].status
        for member in COLUMNS[0]:
            assert accelpact.EXIT_STATUS == found[member].status
            assert found[member].reports


_DEATH = 9


def _repair_uncommitted(rank: Rank, kind: str) -> None:
    job, pact = _protected(rank, deadline=DEADLINE_S)
    if kind == "stepped":
        if rank.number in COLUMNS[0]:
            job.optimizer.step()
    else:
        trainee.accumulate(job, synchronized=kind == "gradient")
        dist.barrier()
    _expect_refusal(rank, job, pact)


def _repair_elsewhere(rank: Rank, liar: int) -> None:
    job, pact = _protected(rank, deadline=DEADLINE_S)
    if rank.number == liar:
        pact.commit(job.frontier + 1)
    dist.barrier()
    _expect_refusal(rank, job, pact)


def _die_in_repair(rank: Rank, phase: str) -> None:
    job, pact = _protected(rank, deadline=DEADLINE_S)

    def die(*_: object, **__: object) -> NoReturn:
        os._exit(_DEATH)

    if rank.number == 0:
        owner, name = {
            "admit": (pact.control, "admit"),
            "rebuild": (_communicator, "rebuild"),
            "validate": (_communicator, "probe"),
            "release": (pact.control, "release"),
        }[phase]
        setattr(owner, name, die)
    _expect_refusal(rank, job, pact)


def _repair_without_an_answer(rank: Rank) -> None:
    job, pact = _protected(rank, deadline=DEADLINE_S)
    if rank.number == 1:
        pact.close()
        dist.barrier()
        return
    dist.barrier()
    _expect_refusal(rank, job, pact)


def _expect_refusal(rank: Rank, job: TrainingJob, pact: Pact) -> NoReturn:
    """Repair the first column, and end as a training script should; the others just wait."""
    started = time.monotonic()
    try:
        if rank.number in COLUMNS[0]:
            trainee.repair(job, pact)
        else:
            threading.Event().wait(ranks.DEADLINE_S)
    except accelpact.Rejected as rejection:
        rank.report(str(rejection))
        rank.report(time.monotonic() - started)
        os._exit(accelpact.EXIT_STATUS)
    raise AssertionError("the repair was not refused")


def assert_all_refused(found: list[Result], reason: accelpact.Reason) -> None:
    assert [accelpact.EXIT_STATUS] * 4 == [result.status for result in found], found
    for result in found:
        assert any(reason.value in str(report) for report in result.reports), result


def roots(found: list[dict[str, Any]]) -> list[list[str]]:
    return [each["roots"] for each in found]


def _protected(rank: Rank, **options: Any) -> tuple[TrainingJob, Pact]:
    """Make a job that all ranks know to be at the boundary after update 1."""
    job = trainee.make(rank)
    pact = trainee.protect(rank, job, **options)
    trainee.update(job, pact)
    # Not by a group: a rank that dies at once would fail it for those that have not left it yet.
    ranks.meet(rank.store(), "protected", rank.world_size)
    return job, pact
