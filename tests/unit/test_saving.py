"""When a checkpoint is saved, in which mode, and what torch must have for it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import staging as of_torch

from harness import staging
from harness.spec import Saving, SpecError


def modes(saving: Saving, *, updates: int, first: int) -> list[str | None]:
    return [saving.mode_after(update, first=first) for update in range(1, updates + 1)]


class TestSaving:
    def test_once_by_default(self) -> None:
        """One checkpoint, synchronous, as the schedule says."""
        assert [None, "sync", None, None] == modes(Saving(), updates=4, first=2)

    def test_every(self) -> None:
        """From the schedule's update on, every so many updates."""
        found = modes(Saving(every=2), updates=7, first=3)

        assert [None, None, "sync", None, "sync", None, "sync"] == found

    def test_in_turn(self) -> None:
        """A mode keeps its turn for as many saves as are asked for, then the next one has it."""
        saving = Saving(modes=("sync", "async-thread"), every=1, in_turn=2)
        turn = ["sync", "sync", "async-thread", "async-thread"]

        assert [*turn, *turn] == modes(saving, updates=8, first=1)

    def test_turns_count_saves(self) -> None:
        """And not the updates between them."""
        saving = Saving(modes=("sync", "none"), every=3)

        assert ["sync", None, None, "none", None, None, "sync"] == modes(saving, updates=7, first=1)


class TestCheck:
    def test_what_torch_lacks_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the mode that needs it is refused."""
        monkeypatch.delattr(of_torch, "DefaultStager")
        staging.check(["sync", "async-thread", "async-process"])

        with pytest.raises(SpecError, match=r"async-cached needs .*staging.DefaultStager; found"):
            staging.check(["sync", "async-cached"])


class TestBufferedStager:
    def test_copies_into_the_same_memory(self) -> None:
        """Whatever storage the next state has."""
        stager = staging.BufferedStager(pinned=False)
        first = stager.stage({"model": {"a": torch.ones(3)}, "lr": 0.5})
        place = first["model"]["a"].data_ptr()
        source = torch.full((3,), 2.0)
        second = stager.stage({"model": {"a": source}, "lr": 0.25})
        source.zero_()

        assert place == second["model"]["a"].data_ptr()
        assert ([2.0, 2.0, 2.0], 0.25) == (second["model"]["a"].tolist(), second["lr"])
        assert second["model"]["a"].is_shared()

    @pytest.mark.parametrize(
        "state",
        [
            {"model": {"b": torch.ones(3)}},
            {"model": {"a": torch.ones(4)}},
            {"model": {"a": torch.ones(3, dtype=torch.float64)}},
            {"model": torch.ones(3)},
        ],
    )
    def test_another_form_gets_other_buffers(self, state: dict[str, object]) -> None:
        """Nothing of the state before is left in it."""
        stager = staging.BufferedStager(pinned=False)
        stager.stage({"model": {"a": torch.zeros(3)}})
        found = stager.stage(state)

        assert str(state) == str(found)
