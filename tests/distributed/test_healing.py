"""A replica whose rank is killed is started again by its own launcher and healed by another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import strategies
from harness import compare, plan, summarize
from harness.conformance import Evidence
from harness.launching import Forks, torchrun
from harness.layout import RUNS
from harness.plan import Entry
from harness.progress import Progress
from harness.spec import Fault, Mesh, Schedule, Spec
from strategies import Platform, Timeouts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.launching import Launched
    from harness.records import RunSummary
    from harness.spec import RunSpec

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

NAME = "torchft_manager"
PLATFORM = Platform(device="cpu", backend="gloo")
UPDATES, CHECKPOINT_AT, FRONTIER = 5, 1, 3
AT_BOUNDARY = Fault(kind="kill", phase="boundary", update=FRONTIER)
INSIDE = Fault(kind="kill", phase="backward", update=FRONTIER + 1)
IN_STEP = Fault(kind="error", phase="step", update=FRONTIER + 1)
BOTH = (AT_BOUNDARY, Fault(kind="absent", phase="backward", update=FRONTIER + 2))
STRUCK = {
    "boundary": ("sync quorum", (AT_BOUNDARY,)),
    "backward": ("sync quorum", (INSIDE,)),
    "twice": ("sync quorum", BOTH),
    "step": ("sync quorum", (IN_STEP,)),
    "forgetful": ("sync quorum, own state not kept", (AT_BOUNDARY,)),
    "together": ("async quorum", (AT_BOUNDARY,)),
}
"""Name of a run -> variant, and what strikes rank 3."""
HEALED = ["boundary", "backward", "twice", "step"]
BY_TORCHRUN = "boundary"
"""Started as users start it; the others are forks."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the reference twice and the contender once per entry of `STRUCK`."""
    answer = strategies.find(NAME)().availability(PLATFORM)
    if not answer.available:
        pytest.skip(f"not_run: {answer.reason}")
    folder = tmp_path_factory.mktemp("healing")
    runs = planned()
    described = compare.describe(runs[0].spec, [], [], platform=PLATFORM, title="healing")
    with Forks() as forks:

        def launch(
            run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path
        ) -> Launched:
            chosen = torchrun if run.name == BY_TORCHRUN else forks
            return chosen(run, folder, environment, log)

        compare.record(
            described, [runs], platform=PLATFORM, folder=folder, progress=Progress(), launch=launch
        )
    return folder


def planned() -> list[RunSpec]:
    schedule = Schedule(updates=UPDATES, checkpoint_at=CHECKPOINT_AT, faults=(AT_BOUNDARY,))
    spec = Spec(schedule=schedule, mesh=Mesh(), wrapper="fsdp2", timeouts=Timeouts(group=2.0))
    runs: list[RunSpec] = []
    for name, (variant, faults) in STRUCK.items():
        own = dataclasses.replace(spec, schedule=dataclasses.replace(schedule, faults=faults))
        entry = Entry(strategy=strategies.find(NAME)(variant=variant), label=name)
        found = plan.block_runs(own, [entry], block=0, backend=PLATFORM.backend)
        runs += [dataclasses.replace(run, name=name) for run in found if run.faulted]
        references = [run for run in found if run.strategy == plan.REFERENCE]
    return sorted(references, key=lambda run: run.control) + runs


@pytest.fixture(scope="module")
def runs(records: Path) -> dict[str, RunSummary]:
    return {run.name: run for run in summarize.summarize(records).runs}


def evidence(records: Path, name: str) -> Evidence:
    return Evidence.read(records / RUNS / name, records / RUNS / "0-reference")


class TestHealing:
    @pytest.mark.parametrize("name", HEALED)
    def test_is_bitwise(self, runs: dict[str, RunSummary], name: str) -> None:
        """All four ranks reach the frontier with the reference's state; no sample is lost."""
        run = runs[name]

        assert ("pass", "pass", "") == (run.verdict, run.expected, run.reason)
        assert (UPDATES, 4) == (run.committed_updates, run.drift.ranks_equal)
        assert (0, 0) == (run.data_ledger.missing, run.data_ledger.duplicated)

    @pytest.mark.parametrize("name", HEALED)
    def test_only_the_dead_replica_is_started_again(self, records: Path, name: str) -> None:
        """Its launcher starts both of its ranks once more; the others live on."""
        timeline = evidence(records, name).timeline
        started = [(each.rank, each.attempt) for each in timeline.select("process")]

        assert [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)] == sorted(started)

    def test_voted_and_not_recorded(self, records: Path, runs: dict[str, RunSummary]) -> None:
        """A rank that ends after its vote has committed: its next life says so, samples and all."""
        timeline = evidence(records, "step").timeline
        late = timeline.select("commit", update=FRONTIER + 1, rank=3)
        usual = timeline.select("commit", update=FRONTIER, rank=3)[0]

        assert [1] == [each.attempt for each in late]
        assert len(usual.samples or []) == len(late[0].samples or [])
        assert (0, 0) == (runs["step"].replayed_updates, runs["step"].discarded_updates)

    def test_state_comes_from_a_peer(self, records: Path) -> None:
        """Both ranks get their own shard at the frontier, which no checkpoint has."""
        timeline = evidence(records, "boundary").timeline
        healed = timeline.select("healed")
        restored = timeline.select("restored")

        assert {2: FRONTIER, 3: FRONTIER} == {each.rank: each.update for each in healed}
        assert {2: CHECKPOINT_AT, 3: CHECKPOINT_AT} == {each.rank: each.update for each in restored}
        # Weights and two moments of a half of the model, in float32, and some step counts.
        assert all((each.bytes or 0) > 1_000_000 for each in healed)
        assert [None, None] == [each.reason for each in healed]

    def test_nothing_is_replayed(self, runs: dict[str, RunSummary]) -> None:
        """What was cut short is discarded; where nothing was, nothing is."""
        assert {"boundary": (0, 0), "backward": (0, 1), "twice": (0, 1)} == {
            name: (runs[name].replayed_updates, runs[name].discarded_updates)
            for name in ("boundary", "backward", "twice")
        }

    def test_way_back_is_measured(self, runs: dict[str, RunSummary]) -> None:
        """From the death to the next commit, with the phases of the launcher's restart."""
        run = runs["boundary"]

        assert 1.0 < (run.fault_to_next_update_s or 0) < 60
        assert {"restart", "import", "connect", "build", "restore", "heal"} <= run.phases_ms.keys()
        assert "replay" not in run.phases_ms

    def test_random_states_are_no_peers(self, records: Path, runs: dict[str, RunSummary]) -> None:
        """Who does not keep them goes on with those of the checkpoint, and the record says so."""
        found = evidence(records, "forgetful")
        own, reference = (
            {each.rank: (each.tensors or {})["rng/cpu"] for each in lines if each.update == UPDATES}
            for lines in (found.digests, found.reference)
        )

        assert "fail" == runs["forgetful"].verdict
        assert FRONTIER + 1 == runs["forgetful"].drift.first_update
        assert [2, 3] == [rank for rank in range(4) if own[rank] != reference[rank]]
        assert all(each.reason for each in found.timeline.select("healed"))

    def test_asynchronous_quorum_does_not_heal(self, runs: dict[str, RunSummary]) -> None:
        """All ranks start again from the checkpoint, which is no recovery of this contender."""
        run = runs["together"]

        assert ("rejected", 4) == (run.verdict, run.drift.ranks_equal)
        assert FRONTIER - CHECKPOINT_AT == run.replayed_updates
