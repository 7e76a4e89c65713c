"""The envelope file: what is read back, what is refused, and what it admits."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelpact import Reason, Rejected, _admission, _envelope
from accelpact._envelope import DISCARD, L1, L2, EnvelopeError
from accelpact._events import EventLog
from accelpact._frameworks import compiled
from tests.unit import envelopes
from tests.unit.envelopes import STACK, entry, envelope, key, trial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def content(tmp_path: Path) -> dict[str, Any]:
    """What a good file holds."""
    envelope(entry(trial(), trial(L2, verdict="rejected"))).write(tmp_path / "good.json")
    found: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return found


def refusal(path: Path, value: Any = None) -> str:
    """What is said of a file that holds `value`."""
    if value is not None:
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(EnvelopeError) as caught:
        _envelope.read(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON document is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for name, each in inner:
        found.append((*path, name))
        if isinstance(each, dict | list):
            found += places(each, (*path, name))
    return found


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy of `value` in which `change` was applied to the container at `path`, and its key."""
    copy = json.loads(json.dumps(value))
    inside = copy
    for name in path[:-1]:
        inside = inside[name]
    change(inside, path[-1])
    return copy


class TestFile:
    """A file is what was written, or refused with one line."""

    def test_is_read_back(self, tmp_path: Path) -> None:
        """Everything, and the digest of the file."""
        written = dataclasses.replace(
            envelope(
                entry(trial(), trial(L2, verdict="rejected", reason="r", replayed_updates=2)),
                entry(trial(DISCARD, discarded_updates=1), phase="backward"),
            ),
            not_run=("what was not tried",),
            made={"seconds": "12"},
        )
        written.write(tmp_path / "envelope.json")
        found = _envelope.read(tmp_path / "envelope.json")

        assert written == dataclasses.replace(found, digest="")
        assert 64 == len(found.digest)
        assert ["envelope.json"] == [path.name for path in tmp_path.iterdir()]

    @pytest.mark.parametrize("value", ["", "{", "[]", "null", "{}", '"x"', "[" * 100_000, "\x00"])
    def test_damaged(self, tmp_path: Path, value: str) -> None:
        """No JSON, or another document."""
        assert refusal(tmp_path / "envelope.json", value)

    def test_not_text(self, tmp_path: Path) -> None:
        """Bytes that no encoding has."""
        (tmp_path / "envelope.json").write_bytes(b"\xff\xfe\xfa")

        assert refusal(tmp_path / "envelope.json").startswith("envelope: expected JSON")

    def test_torn(self, tmp_path: Path) -> None:
        """A file whose end is missing, wherever it was cut."""
        text = json.dumps(content(tmp_path))
        for end in range(0, len(text), 7):
            assert refusal(tmp_path / "envelope.json", text[:end] or " ")

    def test_not_a_file(self, tmp_path: Path) -> None:
        """What is not there, a folder, and a pipe that nobody writes to."""
        os.mkfifo(tmp_path / "pipe")

        assert "No such file" in refusal(tmp_path / "missing.json")
        assert "expected a file" in refusal(tmp_path)
        assert "expected a file" in refusal(tmp_path / "pipe")

    @pytest.mark.parametrize("version", [None, 0, 2, True, "1", 1.5])
    def test_other_schema(self, tmp_path: Path, version: object) -> None:
        """Another version is not guessed at."""
        value = {**content(tmp_path), "schema_version": version}

        assert refusal(tmp_path / "envelope.json", value).startswith("schema_version: expected 1")

    def test_every_missing_field(self, tmp_path: Path) -> None:
        """It is refused, unless its default proves nothing."""
        good = content(tmp_path)
        optional = {
            "made", "not_run", "reason", "replayed_updates", "discarded_updates", "0", "1",
        }  # fmt: skip
        for path in places(good):
            if path[-1] in optional or isinstance(path[-1], int):
                continue
            value = changed(good, path, lambda inside, name: inside.pop(name))
            assert refusal(tmp_path / "envelope.json", value)

    def test_every_field_of_another_type(self, tmp_path: Path) -> None:
        """A number where text, a list or an object should be."""
        good = content(tmp_path)
        for path in places(good):
            wrong = changed(good, path, lambda inside, name: inside.__setitem__(name, 1.5))
            assert refusal(tmp_path / "envelope.json", wrong), path

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_anything_else(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Whatever stands in place of anything: read or refused, never another error."""
        folder = tmp_path_factory.mktemp("envelope")
        good = content(folder)
        path = data.draw(st.sampled_from(places(good)))
        value = data.draw(JSON)
        wrong = changed(good, path, lambda inside, name: inside.__setitem__(name, value))
        (folder / "envelope.json").write_text(json.dumps(wrong))
        try:
            found = _envelope.read(folder / "envelope.json")
        except EnvelopeError:
            return
        for each in found.entries:
            assert set(each.actions) <= set(_envelope.proven(each.trials))

    def test_one_key_twice(self, tmp_path: Path) -> None:
        """Two entries for one key could contradict each other."""
        good = content(tmp_path)
        good["entries"] *= 2

        assert refusal(tmp_path / "envelope.json", good).startswith("entries: expected every key")

    def test_one_name_twice(self, tmp_path: Path) -> None:
        """JSON would take the last in silence."""
        text = json.dumps(content(tmp_path))
        wrong = text.replace('"actions": ', '"actions": [], "actions": ', 1)

        assert refusal(tmp_path / "envelope.json", wrong).startswith("actions: expected once")

    def test_unknown_phase(self, tmp_path: Path) -> None:
        """A phase that the runtime never asks for is a mistake."""
        good = content(tmp_path)
        good["entries"][0]["key"]["phase"] = "noon"

        assert "expected boundary, forward" in refusal(tmp_path / "envelope.json", good)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("verdict", "fail"), ("verdict", "rejected"), ("digests", {}), ("digests", {"0": "cc"})],
    )
    def test_action_that_its_trials_do_not_prove(
        self, tmp_path: Path, field: str, value: object
    ) -> None:
        """Nobody writes an action into the file whose trials say otherwise."""
        good = content(tmp_path)
        good["entries"][0]["trials"][0][field] = value

        assert "whose trials all passed" in refusal(tmp_path / "envelope.json", good)


class TestProven:
    """An action counts if it was tried and never went wrong."""

    def test_one_failure_outweighs(self) -> None:
        """However often it went well."""
        assert () == _envelope.proven((trial(), trial(), trial(verdict="fail")))

    def test_actions_are_apart(self) -> None:
        """What another action did says nothing."""
        assert (L2,) == _envelope.proven((trial(verdict="fail"), trial(L2, verdict="rejected")))

    def test_a_safe_refusal_is_no_repair(self) -> None:
        """It proves that handing over works, and no more."""
        assert () == _envelope.proven((trial(verdict="rejected"),))
        assert (L2,) == _envelope.proven((trial(L2, verdict="rejected"),))

    @pytest.mark.parametrize("verdict", ["fail", "invalid", "unknown", "not_run", ""])
    def test_nothing_else_passes(self, verdict: str) -> None:
        """Unknown is no proof."""
        for action in _envelope.ACTIONS:
            assert () == _envelope.proven((trial(action, verdict=verdict),))

    def test_without_digests(self) -> None:
        """A verdict that rests on nothing proves nothing."""
        assert () == _envelope.proven((trial(digests={}, expected={}),))


class TestObjection:
    def test_what_is_proven_is_admitted(self) -> None:
        assert envelope().objection(STACK, key(), L1) is None

    @pytest.mark.parametrize("name", STACK)
    def test_other_stack(self, name: str) -> None:
        """Torch, backend, its version, device or system: any of them makes another stack."""
        here = {**STACK, name: "other"}
        found = envelope().objection(here, key(platform=_envelope.title(here)), L1)

        assert found is not None
        assert f"expected {name.replace('_', ' ')} {STACK[name]}, as qualified" in found

    @pytest.mark.parametrize(
        "other",
        [key("backward"), key(profile="fsdp2, eager, rebuild"), key(objective="close")],
        ids=["phase", "profile", "objective"],
    )
    def test_unknown_key(self, other: _envelope.Key) -> None:
        found = envelope().objection(STACK, other, L1)

        assert found is not None
        assert found.startswith("no trial of ")

    def test_other_action(self) -> None:
        """Repairing was proven, taking back was not."""
        found = envelope().objection(STACK, key(), DISCARD)

        assert "discard is not proven for fsdp1, eager, rebuild, boundary: admitted L1" == found


class TestAdmission:
    """What one rank asks before it acts."""

    @pytest.fixture(autouse=True)
    def stack(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process without groups, which is on the stack of the envelopes here."""
        monkeypatch.delenv(_envelope.VARIABLE, raising=False)
        monkeypatch.setattr(_admission.dist, "get_backend", lambda: "gloo")
        monkeypatch.setattr(_envelope, "stack_of", lambda **_: dict(STACK))

    @staticmethod
    def admission(path: Path | None, events: Path | None = None) -> _admission.Admission:
        log = EventLog(str(events) if events else None, rank=0)
        model = nn.Linear(1, 1)
        return _admission.Admission(str(path) if path else None, model, frameworks=(), log=log)

    @staticmethod
    def bare(path: Path) -> Path:
        """A file that admits L1 for a model that nothing wraps."""
        envelope(entry(trial(), profile="none, eager, rebuild")).write(path)
        return path

    def test_without_an_envelope_nothing_is_refused(self) -> None:
        found = self.admission(None)

        assert not found.given
        assert found.ask("boundary", L1, ["rebuild"]) is None

    def test_matching_file(self, tmp_path: Path) -> None:
        found = self.admission(self.bare(tmp_path / "e.json"))

        assert found.ask("boundary", L1, ["rebuild"]) is None
        assert found.objection is None

    @pytest.mark.parametrize(
        ("phase", "action", "steps"),
        [
            ("boundary", L1, ["reconfigure"]),
            ("boundary", L1, ["rebuild", "reconfigure"]),
            ("backward", L1, ["rebuild"]),
            ("boundary", DISCARD, ["rebuild"]),
        ],
    )
    def test_anything_else(self, tmp_path: Path, phase: str, action: str, steps: list[str]) -> None:
        """Another way of replacement, two ways at once, another phase, another action."""
        objection = self.admission(self.bare(tmp_path / "e.json")).ask(phase, action, steps)

        assert objection is not None
        with pytest.raises(Rejected, match="handed over to a restart") as caught:
            _admission.demand_none(objection)
        assert Reason.UNQUALIFIED is caught.value.reason

    def test_damaged_file_admits_nothing(self, tmp_path: Path) -> None:
        """It is said when something fails, and not before."""
        (tmp_path / "e.json").write_text("{")
        found = self.admission(tmp_path / "e.json")

        assert found.given
        assert "expected JSON" in str(found.ask("boundary", L1, ["rebuild"]))

    def test_environment_names_it_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(_envelope.VARIABLE, str(tmp_path / "missing.json"))

        assert "No such file" in str(self.admission(None).objection)

    @pytest.mark.parametrize("own", ["file", "damaged", "none"])
    def test_ranks_that_have_read_different_files(self, tmp_path: Path, own: str) -> None:
        """Nothing is admitted on any of them, those without a file among them."""
        if own == "damaged":
            (tmp_path / "e.json").write_text("{")
        elif own == "file":
            self.bare(tmp_path / "e.json")
        found = self.admission(None if own == "none" else tmp_path / "e.json")
        found.agree([found.digest, "another"])

        assert found.given
        assert "found 2 different" in str(found.ask("boundary", L1, ["rebuild"]))

    def test_is_recorded(self, tmp_path: Path) -> None:
        """With the whole key, what was asked, and the objection; also without an envelope."""
        self.admission(self.bare(tmp_path / "e.json"), tmp_path).ask("boundary", L1, ["rebuild"])
        self.admission(None, tmp_path).ask("forward", DISCARD, ["rebuild"])
        lines = (tmp_path / "rank0.jsonl").read_text().splitlines()
        first, second = map(json.loads, lines)

        assert dataclasses.asdict(key(profile="none, eager, rebuild")) == first["key"]
        assert ("admission", "L1", None) == (first["event"], first["action"], first["reason"])
        assert ("forward", "discard") == (second["key"]["phase"], second["action"])


class TestProfile:
    def test_compiled_model_that_is_handed_over_bare(self) -> None:
        """The script compiles the model and attaches the module inside, or a part of it."""
        model, other = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
        assert not compiled.is_compiled(model)
        made = torch.compile(model, backend="eager")

        assert compiled.is_compiled(made)
        assert compiled.is_compiled(model)
        assert not compiled.is_compiled(other)

    def test_compiled_part(self) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model[1].compile(backend="eager")

        assert compiled.is_compiled(model)

    def test_stack_names_the_device(self) -> None:
        found = _envelope.stack_of(backend="gloo", device="cpu")

        assert set(envelopes.STACK) == set(found)
        assert found["device"].startswith("cpu ")
        assert str(torch.__version__) == found["torch"] == found["backend_version"]
