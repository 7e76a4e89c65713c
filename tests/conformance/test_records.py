"""What the contenders' runs record: what a recovery costs, and what shows that there was one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import metrics, plan, verdicts
from harness.records import Digests, read_lines
from tests.conformance.conftest import AT_BOUNDARY, CHECKPOINT_AT, INSIDE, TIMEOUTS, UPDATES

if TYPE_CHECKING:
    from harness.timeline import Timeline
    from tests.conformance.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

NUM_RANKS = 4
IN_PLACE = ["torchft_pg", "c10d_reconfigure"]
"""Repair a group between updates, and refuse inside one."""
RESTORING = ["cold", "nvrx", "rerun"]
"""Go back to the checkpoint for every fault."""
RECOVERING = [*IN_PLACE, "accelpact", "torchft_manager", *RESTORING]
AGES = sum(fault.frontier - CHECKPOINT_AT for fault in (AT_BOUNDARY, INSIDE))
"""Of the checkpoint, at both faults."""


def timeline(runs: Runs, name: str) -> Timeline:
    return runs.evidence(name).timeline


@pytest.fixture
def fsdp1(runs: Runs) -> Runs:
    """The runs, if FSDP1's places are what can be named."""
    if runs.wrapper != "fsdp1":
        pytest.skip(f"names places of fsdp1; ran {runs.wrapper}")
    return runs


@pytest.fixture(scope="module")
def digests(runs: Runs) -> list[Digests]:
    """Every rank's state after every update of the reference."""
    folder = runs.folder(plan.REFERENCE, faulted=False)
    return read_lines(folder / "digests.jsonl", Digests)


class TestReference:
    """What makes equality with it proof of anything."""

    def test_ranks_have_states_of_their_own(self, digests: list[Digests]) -> None:
        """No two ranks have the same root."""
        last = [record for record in digests if record.update == UPDATES]

        assert NUM_RANKS == len({record.root for record in last})
        assert NUM_RANKS == len({(record.tensors or {})["rng/cpu"] for record in last})

    def test_every_update_changes_the_state(self, digests: list[Digests]) -> None:
        """A rank's roots all differ."""
        assert UPDATES == len({record.root for record in digests if record.rank == 0})


class TestWork:
    """Updates that are done twice, and updates that are thrown away."""

    @pytest.mark.parametrize("name", IN_PLACE)
    def test_in_place_repeats_nothing(self, runs: Runs, name: str) -> None:
        """A failure between updates costs no work."""
        assert (0, 0) == work(timeline(runs, name))

    def test_the_update_that_was_struck_is_discarded(self, runs: Runs) -> None:
        """And nothing else: the failure between updates costs no work."""
        assert (0, 1) == work(timeline(runs, "accelpact"))

    def test_a_vote_discards_the_next_update_too(self, runs: Runs) -> None:
        """A failure between updates is counted against the update that follows."""
        found = timeline(runs, "torchft_manager")

        assert (0, 2) == work(found)
        assert metrics.shares(found)["discarded"] > 0

    @pytest.mark.parametrize("name", RESTORING)
    def test_restoring_replays_the_checkpoints_age(self, runs: Runs, name: str) -> None:
        """Once per fault."""
        assert (AGES, 0) == work(timeline(runs, name))


def work(found: Timeline) -> tuple[int, int]:
    """Return updates replayed, and updates discarded."""
    return metrics.replayed_updates(found), len(found.select("discard", rank=0))


class TestTimes:
    @pytest.mark.parametrize("name", [*RECOVERING, "comm_only"])
    def test_detection_is_the_wait_for_an_absent_rank(self, runs: Runs, name: str) -> None:
        """There is evidence that a rank stayed away, and its peer waited out the timeout."""
        found = timeline(runs, name)
        fault = found.fault
        assert fault is not None
        assert found.last_notice is not None

        assert "rank 3 stayed away" in verdicts.evidence(found, AT_BOUNDARY, run=name).evidence
        assert TIMEOUTS.group - 0.5 < found.last_notice - fault.t < 20

    @pytest.mark.parametrize("name", RECOVERING)
    def test_wall_time_is_accounted_for(self, runs: Runs, name: str) -> None:
        """The shares of the wall time add up to 1."""
        assert pytest.approx(1.0) == sum(metrics.shares(timeline(runs, name)).values())

    def test_every_phase_is_recorded(self, runs: Runs) -> None:
        """Those of a repair, and of an update that is taken back."""
        phases = {"guard", "admit", "retire", "rebuild", "rebind", "validate", "release", "discard"}

        assert phases <= recorded_phases(timeline(runs, "accelpact"))


def recorded_phases(found: Timeline) -> set[str | None]:
    return {event.phase for event in found.select("phase")}


class TestReferences:
    """Places that name the group which was replaced."""

    def test_every_one_is_rebound(self, fsdp1: Runs) -> None:
        """L + 1 modules name the group twice each; none is left."""
        found = metrics.references(timeline(fsdp1, "accelpact"))

        assert {(10, 0)} == {(each.rebound, each.left) for each in found}
        assert [1, 3] == sorted(each.rank for each in found)

    def test_those_left_are_named(self, fsdp1: Runs) -> None:
        """Where only the communicator is replaced."""
        found = metrics.references(timeline(fsdp1, "comm_only"))

        assert {(0, 10)} == {(each.rebound, each.left) for each in found}
        assert "root._inter_node_pg" in found[0].holders

    def test_those_left_fail_in_the_next_backward(self, fsdp1: Runs) -> None:
        """The probe has passed, and the next update dies in its all-reduce."""
        found, folder = timeline(fsdp1, "comm_only"), fsdp1.folder("comm_only")
        # One of the two members may be ended by the launcher before it has said why.
        logs = [(folder / f"rank{rank}.log").read_text() for rank in (1, 3)]

        assert AT_BOUNDARY.update == found.committed
        assert any("_reduce_grad" in log for log in logs)
        assert "validate" in recorded_phases(found)
