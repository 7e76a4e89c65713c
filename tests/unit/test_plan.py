"""Who takes part in a comparison, and which runs it plans."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import pytest

import strategies
from harness import plan
from harness.records import write_json
from harness.spec import RunSpec, Schedule, Spec, SpecError
from strategies import Platform
from tests.unit import logs

CPU = Platform(device="cpu", backend="gloo")


def without_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `package` look as if it were not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return "1.0" if name in ("torchft", "nvidia-resiliency-ext") else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def with_entry_points(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Make other packages offer contenders."""
    real, group = importlib.metadata.entry_points, "accelpact.strategies"
    found = [EntryPoint(name=name, value=value, group=group) for name, value in points]

    def entry_points(**wanted: str) -> Any:
        return found if wanted == {"group": group} else real(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


class TestContenders:
    """Who takes part."""

    @pytest.mark.parametrize(
        ("package", "names"),
        [("torchft", {"torchft_pg", "torchft_manager"}), ("nvidia-resiliency-ext", {"nvrx"})],
    )
    def test_missing_package(
        self, monkeypatch: pytest.MonkeyPatch, package: str, names: set[str]
    ) -> None:
        """A contender whose package is missing says so, and the rest is planned."""
        before, unable_before = plan.availability(plan.contenders(()), CPU)
        without_package(monkeypatch, package)
        able, unable = plan.availability(plan.contenders(()), CPU)
        planned = plan.block_runs(Spec(), able, block=0, backend="gloo")
        reasons = {entry.label: answer.reason for entry, answer in unable}

        assert {f"package {package} is not installed"} == {reasons.pop(name) for name in names}
        assert {entry.label: answer.reason for entry, answer in unable_before} == reasons
        assert {entry.label for entry in before} - names == {
            run.strategy for run in planned if run.faulted
        }

    def test_all_by_default(self) -> None:
        """Without names everybody takes part; the reference is no contender."""
        own = ["cold", "nvrx", "torchft_pg", "torchft_manager"]
        own += ["c10d_reconfigure", "accelpact", "comm_only"]

        assert own == [entry.label for entry in plan.contenders(())]

    def test_as_given(self) -> None:
        """Named contenders take part in the order of their names' mention."""
        found = plan.contenders(("accelpact", "reference", "cold"))

        assert ["accelpact", "cold"] == [entry.label for entry in found]

    def test_unknown(self) -> None:
        """An unknown name is refused with the nearest one."""
        with pytest.raises(SpecError, match=r"^strategies: .*did you mean 'accelpact'\?$"):
            plan.contenders(("cold", "acelpact"))

    def test_twice(self) -> None:
        """A contender cannot be set against itself by mistake."""
        with pytest.raises(SpecError, match="strategies: expected each once; found cold, cold"):
            plan.contenders(("cold", "cold"))

    def test_of_another_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An entry point adds a contender after our own, and it is found by its name."""
        with_entry_points(monkeypatch, ("dummy", "tests.unit.logs:Dummy"))
        able, unable = plan.availability(plan.contenders(("cold", "dummy")), CPU)

        assert "dummy" == strategies.names()[-1]
        assert "gives up" == strategies.find("dummy").summary
        assert ["cold"] == [entry.label for entry in able]
        assert "package a-package-that-nobody-has is not installed" == unable[0][1].reason

    def test_our_own_names_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another package cannot replace one of our contenders."""
        with_entry_points(monkeypatch, ("cold", "tests.unit.logs:Dummy"))

        assert 1 == strategies.names().count("cold")
        assert "cold" == strategies.find("cold").name

    def test_find_unknown(self) -> None:
        """What nobody offers is a KeyError."""
        with pytest.raises(KeyError, match="nobody"):
            strategies.find("nobody")

    @pytest.mark.parametrize("name", ["cold", "nvrx", "torchft_pg", "accelpact", "comm_only"])
    def test_unknown_variant(self, name: str) -> None:
        """A variant that was never tried is refused with those that were."""
        with pytest.raises(ValueError, match=f"variant: {name} has .*found 'best'"):
            strategies.find(name)(variant="best")

    def test_variants(self) -> None:
        """For tuning a contender appears once per variant, each under a name of its own."""
        entries = plan.variants("cold")

        assert list(strategies.find("cold").variants) == [each.strategy.variant for each in entries]
        assert ["cold-0", "cold-1", "cold-2"] == [each.label for each in entries]


class TestBlock:
    """Which runs a block consists of, and in which order."""

    @staticmethod
    def runs(*, seed: int = 1, block: int = 0, **changes: Any) -> list[RunSpec]:
        entries = plan.contenders(("cold", "accelpact", "comm_only"))
        return plan.block_runs(Spec(seed=seed, **changes), entries, block=block, backend="gloo")

    def test_consists_of(self) -> None:
        """Two references, and every contender with the fault and without."""
        found = self.runs(block=2)

        assert {
            "2-reference": (False, False, "pass"),
            "2-reference-control": (False, True, "pass"),
            "2-cold": (True, False, "pass"),
            "2-cold-fault-free": (False, False, "pass"),
            "2-accelpact": (True, False, "pass"),
            "2-accelpact-fault-free": (False, False, "pass"),
            "2-comm_only": (True, False, "fail"),
            "2-comm_only-fault-free": (False, False, "pass"),
        } == {run.name: (run.faulted, run.control, run.expected) for run in found}
        assert list(range(8)) == [run.order for run in found]
        assert {2} == {run.block for run in found}

    def test_same_seed_same_order(self) -> None:
        """Order depends on seed and block alone."""
        assert self.runs() == self.runs()

    def test_shuffled_between_blocks_and_seeds(self) -> None:
        """No contender always runs first, or always after the same other."""
        orders = {
            tuple(run.name.partition("-")[2] for run in self.runs(seed=seed, block=block))
            for seed in (1, 2)
            for block in range(4)
        }

        assert 8 == len(orders)

    def test_without_faults(self) -> None:
        """A schedule without faults has fault-free runs alone."""
        schedule = Schedule(updates=4, checkpoint_at=2, faults=())

        assert not any(run.faulted for run in self.runs(schedule=schedule))

    def test_variants_skip_fault_free_runs(self) -> None:
        """Tuning runs every variant with the fault alone."""
        found = plan.block_runs(Spec(), plan.variants("cold"), block=0, backend="gloo")

        assert {"0-reference", "0-reference-control", "0-cold-0", "0-cold-1", "0-cold-2"} == {
            run.name for run in found
        }

    def test_settings_follow_the_timeouts(self) -> None:
        """What a run records is what its contender asked for."""
        (cold,) = [run for run in self.runs() if run.name == "0-cold"]

        assert 1 == cold.settings["max_restarts"]
        assert 3.0 == cold.settings["group_timeout"]

    def test_run_json_round_trip(self, tmp_path: Path) -> None:
        """Ranks read exactly what was planned."""
        planned = self.runs()[0]
        write_json(tmp_path / "run.json", planned)
        found = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunSpec)
        settings = {**found.settings, "notes": tuple(found.settings["notes"])}

        assert planned == logs.planned(found, settings=settings)

    def test_division(self) -> None:
        """Runs are compared only if workload, wrapper, mesh, backend, device and dtype agree."""
        run = logs.run_spec()

        assert "tiny/fsdp1/2x2/gloo-cpu/float32" == run.division
        assert "tiny/fsdp1/2x2/gloo-cpu/float32+ac" == (
            logs.planned(run, spec=Spec(activation_checkpointing=True)).division
        )
