"""Finding contenders, those that cannot be loaded included."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

import strategies
from harness import plan
from harness.spec import SpecError
from strategies import Platform

PLATFORM = Platform(device="cpu", backend="gloo")


class Broken:
    """An entry point whose package raises when it is imported."""

    name = "theirs"

    def load(self) -> Any:
        raise RuntimeError("no such library")


class TestBrokenPackage:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [Broken()])

    def test_is_listed_and_unavailable(self) -> None:
        """A contender that fails to load says why, and stops nobody."""
        answer = strategies.find("theirs")().availability(PLATFORM)

        assert "theirs" in strategies.names()
        assert not answer.available
        assert "its package failed to load: RuntimeError: no such library" == answer.reason

    def test_leaves_the_others_planned(self) -> None:
        """The rest of a comparison goes on without it."""
        able, unable = plan.availability(plan.contenders(["cold", "theirs"]), PLATFORM)

        assert ["cold"] == [entry.label for entry in able]
        assert ["theirs"] == [entry.label for entry, _ in unable]


class TestTuning:
    def test_reference_is_refused(self) -> None:
        """The reference has no settings to tune."""
        with pytest.raises(SpecError, match="strategy: expected a contender; found reference"):
            plan.variants("reference")

    def test_every_variant_is_tried(self) -> None:
        """Each variant becomes a contender of its own name."""
        entries = plan.variants("nvrx")

        assert len(entries) == len({entry.label for entry in entries})
        assert list(strategies.find("nvrx").variants) == [
            entry.strategy.variant for entry in entries
        ]
