"""How far a state is from its reference's: digests, what is kept of them, and numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import drift
from harness.records import Digests, Drift, read_lines
from tests.unit import logs
from tests.unit.logs import Log

if TYPE_CHECKING:
    from pathlib import Path


class TestCompare:
    """Digests against the reference's."""

    def compare(self, own: list[Digests], *, reference: Log | None = None, **changes: Any) -> Drift:
        reference_digests = logs.digests(reference or logs.uninterrupted())
        return drift.compare(own, reference_digests, frontier=5, world_size=4, **changes)

    @pytest.mark.parametrize("make", [logs.uninterrupted, logs.repaired, logs.restarted])
    def test_equal_everywhere_is_bitwise(self, make: Any) -> None:
        """Every update of every rank has the reference's root."""
        found = self.compare(logs.digests(make()))

        assert Drift(
            level="bitwise", equal=True, ranks_equal=4, ranks=4, max_abs=0.0, l2=0.0
        ) == found  # fmt: skip

    def test_one_rank_at_the_frontier(self) -> None:
        """One rank whose last root differs makes the run differ, and its tensors are named."""
        own = [*logs.digests(logs.uninterrupted()), logs.digest(5, 2, weights="v")]
        found = self.compare(own)

        assert ("differs", False, 3, 5) == (
            found.level,
            found.equal,
            found.ranks_equal,
            found.first_update,
        )
        assert ["rank 2: weights/a"] == found.tensors

    def test_every_common_update_counts(self) -> None:
        """A state that went astray and came back is not bitwise equal."""
        own = [*logs.digests(logs.uninterrupted()), logs.digest(2, 1, weights="v")]
        found = self.compare(own)

        assert "differs" == found.level
        assert found.equal is False
        assert (4, 2) == (found.ranks_equal, found.first_update)

    def test_the_last_time_counts(self) -> None:
        """An update that was replayed is judged by what the replay gave."""
        own = logs.digests(logs.restarted())
        strayed = [logs.digest(3, rank, weights="v") for rank in logs.RANKS]

        assert "bitwise" == self.compare([*strayed, *own]).level
        assert "differs" == self.compare([*own, *strayed]).level

    @pytest.mark.parametrize("side", ["own", "reference"])
    def test_rank_missing_at_the_frontier_is_not_compared(self, side: str) -> None:
        """Without the last state of every rank of both runs there is no answer."""
        whole = logs.digests(logs.uninterrupted())
        part = [each for each in whole if (each.update, each.rank) != (5, 3)]
        own, reference = (part, whole) if side == "own" else (whole, part)

        assert Drift(level="not_compared", equal=None, ranks=4) == drift.compare(
            own, reference, frontier=5, world_size=4
        )

    def test_tensor_that_one_side_lacks(self) -> None:
        """A missing tensor is a difference and has a name."""
        record = logs.digest(5, 0, weights="v")
        record.tensors = {"moments/a": "m0.5", "extra": "1"}
        found = self.compare([*logs.digests(logs.uninterrupted()), record])

        assert ["rank 0: extra", "rank 0: weights/a"] == found.tensors

    def test_names_are_bounded(self) -> None:
        """Of very many tensors that differ 20 are named."""
        record = logs.digest(5, 0, weights="v")
        record.tensors = {f"t{number}": "x" for number in range(50)}
        found = self.compare([*logs.digests(logs.uninterrupted()), record])

        assert 20 == len(found.tensors)

    def test_numbers_only_where_states_differ(self) -> None:
        """Measured differences are reported where digests differ; equal digests mean 0."""
        own = logs.digests(logs.uninterrupted())
        strayed = [*own, logs.digest(5, 2, weights="v")]
        equal, differing = (
            self.compare(each, numbers=(0.25, 1.5)) for each in (own, strayed)
        )  # fmt: skip
        unmeasured = self.compare(strayed)

        assert (0.0, 0.0) == (equal.max_abs, equal.l2)
        assert (0.25, 1.5) == (differing.max_abs, differing.l2)
        assert (None, None) == (unmeasured.max_abs, unmeasured.l2)


class TestPrune:
    """Digests per tensor are kept where they say something."""

    def test_keeps_the_frontier_and_what_differs(self, tmp_path: Path) -> None:
        """Equal roots before the frontier lose their tensors; no root is lost."""
        path = tmp_path / "digests.jsonl"
        reference = logs.digests(logs.uninterrupted())
        own = [
            logs.digest(3, 0, weights="v") if (each.update, each.rank) == (3, 0) else each
            for each in reference
        ]
        logs.write_lines(path, own)
        drift.prune(path, reference, frontier=5)
        kept = read_lines(path, Digests)

        assert [each.root for each in own] == [each.root for each in kept]
        assert {(3, 0), (5, 0), (5, 1), (5, 2), (5, 3)} == {
            (each.update, each.rank) for each in kept if each.tensors
        }
        assert "differs" == drift.compare(kept, reference, frontier=5, world_size=4).level

    def test_keeps_what_the_reference_lacks(self, tmp_path: Path) -> None:
        """Where there is nothing to compare with, nothing is dropped."""
        path = tmp_path / "digests.jsonl"
        logs.write_lines(path, [logs.digest(2, 0)])
        drift.prune(path, [], frontier=5)

        assert [logs.digest(2, 0)] == read_lines(path, Digests)


class TestNumbers:
    """Differences of final tensors, in numbers."""

    @staticmethod
    def save(folder: Path, states: list[dict[str, Any]]) -> Path:
        folder.mkdir()
        for rank, state in enumerate(states):
            drift.save_state(state, folder, rank=rank)
        return folder

    def test_by_hand(self, tmp_path: Path) -> None:
        """The largest difference of any rank, and the norm over all of them."""
        own = self.save(
            tmp_path / "own", [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0])}]
        )
        reference = self.save(
            tmp_path / "reference", [{"w": torch.tensor([1.0, 5.0])}, {"w": torch.tensor([1.0])}]
        )

        assert (4.0, 5.0) == drift.measure_numbers(own, reference, world_size=2)

    def test_whole_numbers_are_left_out(self, tmp_path: Path) -> None:
        """Step counts and random states have digests, not distances."""
        own, reference = (
            self.save(tmp_path / name, [{"w": torch.zeros(2), "n": torch.tensor([n]), "cursor": n}])
            for name, n in (("own", 1), ("reference", 9))
        )

        assert (0.0, 0.0) == drift.measure_numbers(own, reference, world_size=1)

    def test_not_a_number_does_not_pass_for_equal(self, tmp_path: Path) -> None:
        """A NaN in one tensor of one rank makes both figures NaN, whatever follows it."""
        states = [{"a": torch.ones(2), "b": torch.ones(2)} for _ in range(2)]
        reference = self.save(tmp_path / "reference", states)
        states[0]["a"] = torch.tensor([math.nan, 1.0])
        own = self.save(tmp_path / "own", states)
        found = drift.measure_numbers(own, reference, world_size=2)

        assert found is not None
        assert [True, True] == [math.isnan(figure) for figure in found]

    def test_none_without_every_rank(self, tmp_path: Path) -> None:
        """A rank that kept no tensors leaves nothing to say about the run."""
        own = self.save(tmp_path / "own", [{"w": torch.zeros(2)}])
        reference = self.save(tmp_path / "reference", [{"w": torch.zeros(2)}] * 2)

        assert drift.measure_numbers(own, reference, world_size=2) is None

    def test_none_for_other_shapes(self, tmp_path: Path) -> None:
        """Tensors of other shapes have no difference, not a broadcast one."""
        own = self.save(tmp_path / "own", [{"w": torch.zeros(2)}])
        reference = self.save(tmp_path / "reference", [{"w": torch.zeros(1)}])

        assert drift.measure_numbers(own, reference, world_size=1) is None

    def test_large_states_are_not_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beyond the limit a rank keeps nothing."""
        monkeypatch.setattr(drift, "STATE_LIMIT_BYTES", 7)
        own = self.save(tmp_path / "own", [{"w": torch.zeros(2)}])

        assert [] == list(own.iterdir())
