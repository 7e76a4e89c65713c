"""The envelope: which recovery was proven on which stack, for which failure, and how.

It is an empirical contract, not an attribute of a device. What it does not hold is not admitted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
VARIABLE = "ACCELPACT_ENVELOPE"
"""Environment variable that names the file; unset, and without `attach(envelope=...)`, nothing is
looked up."""
L1, L2, DISCARD = "L1", "L2", "discard"
"""Repair in place; hand over to a restart; take the uncommitted update back and do it again."""
ACTIONS = (L1, L2, DISCARD)
STEP = "step"
PHASES = ("boundary", "forward", "backward", "update", STEP)
"""Between two updates; in a forward or backward pass; elsewhere in an update; in the optimizer's
step."""
OBJECTIVE = "bitwise"
"""The continuation equals the uninterrupted run bit for bit."""
PASSING = {L1: ("pass",), L2: ("pass", "rejected"), DISCARD: ("pass",)}
"""Action -> verdicts that prove it; who meant to act and refused has proven no more than L2."""
_STACK = ("torch", "backend", "backend_version", "device", "system")


class EnvelopeError(ValueError):
    """The file cannot be read or is not an envelope; one line that names what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """K = (p, r, phi, o) of the paper."""

    platform: str
    """The stack, as `title` writes it."""
    profile: str
    """What holds the state: wrapper, compiled or eager, and how its groups are replaced: in the way
    that is taken on this stack, and not the setting that leads to it."""
    phase: str
    """Where the failure struck."""
    objective: str = OBJECTIVE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was done once, and what came of it."""

    action: str
    policy: str
    fault: str
    verdict: str
    reason: str = ""
    replayed_updates: int = 0
    discarded_updates: int = 0
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Rank -> digest of its state at the last update."""
    expected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same of an uninterrupted run."""

    def proves(self, action: str) -> bool:
        """Whether it went well, bit for bit."""
        equal = bool(self.digests) and self.digests == self.expected
        return self.verdict in PASSING[action] and equal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Actions proven for one key, and all that was tried."""

    key: Key
    actions: tuple[str, ...]
    trials: tuple[Trial, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """The content of one file."""

    stack: Mapping[str, str]
    entries: tuple[Entry, ...]
    not_run: tuple[str, ...] = ()
    """Trials that were planned and did not take place, with the reason; they admit nothing."""
    made: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How and from what the trials were made; for people."""
    digest: str = ""
    """Of the file that it was read from."""

    def objection(self, stack: Mapping[str, str], key: Key, action: str) -> str | None:
        """Return why `action` is not admitted here, or None if it is."""
        for name in _STACK:
            if self.stack[name] != stack[name]:
                return (
                    f"expected {name.replace('_', ' ')} {self.stack[name]}, as qualified; "
                    f"found {stack[name]}"
                )
        entry = next((each for each in self.entries if each.key == key), None)
        if entry is None:
            return f"no trial of {key.profile}, {key.phase}, {key.objective} is in the envelope"
        if action not in entry.actions:
            admitted = ", ".join(entry.actions) or "nothing"
            return f"{action} is not proven for {key.profile}, {key.phase}: admitted {admitted}"
        return None

    def write(self, path: Path) -> None:
        """Write it as JSON, in one step."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "stack": dict(self.stack),
            "made": dict(self.made),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "not_run": list(self.not_run),
        }
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(path)


def proven(trials: tuple[Trial, ...]) -> tuple[str, ...]:
    """Return the actions that were tried and never went wrong."""
    return tuple(
        action
        for action in ACTIONS
        if (own := [each for each in trials if each.action == action])
        and all(each.proves(action) for each in own)
    )


def read(path: str | Path) -> Envelope:
    """Read and check a file.

    Raises:
        EnvelopeError: it cannot be read, or something in it is not what it should be.
    """
    try:
        content = _content(Path(path))
        value = json.loads(content, object_pairs_hook=_once)
    except OSError as error:
        raise EnvelopeError(f"envelope: expected a readable file; {error.strerror}") from None
    except EnvelopeError:
        raise
    except (ValueError, RecursionError) as error:
        raise EnvelopeError(f"envelope: expected JSON; {error}") from None
    fields = _object("envelope", value)
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise EnvelopeError(f"schema_version: expected {SCHEMA_VERSION}; found {version!r}")
    stack = _object("stack", fields.get("stack"))
    entries = tuple(
        _entry(f"entries[{place}]", each)
        for place, each in enumerate(_list("entries", fields.get("entries")))
    )
    if len({entry.key for entry in entries}) != len(entries):
        raise EnvelopeError("entries: expected every key once; found one twice")
    not_run = _list("not_run", fields.get("not_run", []))
    return Envelope(
        stack={name: _text(f"stack.{name}", stack.get(name)) for name in _STACK},
        entries=entries,
        not_run=tuple(_text("not_run", each) for each in not_run),
        made=_texts("made", fields.get("made", {})),
        digest=hashlib.sha256(content).hexdigest(),
    )


def _content(path: Path) -> bytes:
    """Read a file, and nothing that could make its reader wait, as a pipe can."""
    if path.exists() and not path.is_file():
        raise EnvelopeError("envelope: expected a file; found something else")
    return path.read_bytes()


def _entry(place: str, value: object) -> Entry:
    fields = _object(place, value)
    key = _object(f"{place}.key", fields.get("key"))
    names = [field.name for field in dataclasses.fields(Key)]
    made = Key(**{name: _text(f"{place}.key.{name}", key.get(name)) for name in names})
    if made.phase not in PHASES:
        raise EnvelopeError(
            f"{place}.key.phase: expected {', '.join(PHASES)}; found {made.phase!r}"
        )
    trials = tuple(
        _trial(f"{place}.trials[{number}]", each)
        for number, each in enumerate(_list(f"{place}.trials", fields.get("trials")))
    )
    given = _list(f"{place}.actions", fields.get("actions"))
    actions = tuple(_text(f"{place}.actions", each) for each in given)
    unproven = [action for action in actions if action not in proven(trials)]
    if unproven:
        raise EnvelopeError(
            f"{place}.actions: expected actions whose trials all passed; found {unproven[0]!r}"
        )
    return Entry(key=made, actions=actions, trials=trials)


def _trial(place: str, value: object) -> Trial:
    fields = _object(place, value)
    names = ("action", "policy", "fault", "verdict")
    return Trial(
        **{name: _text(f"{place}.{name}", fields.get(name)) for name in names},
        reason=_text(f"{place}.reason", fields.get("reason", "")),
        replayed_updates=_count(f"{place}.replayed_updates", fields.get("replayed_updates", 0)),
        discarded_updates=_count(f"{place}.discarded_updates", fields.get("discarded_updates", 0)),
        digests=_texts(f"{place}.digests", fields.get("digests", {})),
        expected=_texts(f"{place}.expected", fields.get("expected", {})),
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of `pairs`; of two with one name, JSON would take the last in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvelopeError(f"{twice}: expected once in an object; found more")
    return found


def _count(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise EnvelopeError(f"{place}: expected a number of updates; found {value!r}")
    return value


def _texts(place: str, value: object) -> dict[str, str]:
    return {name: _text(place, each) for name, each in _object(place, value).items()}


def _object(place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvelopeError(f"{place}: expected an object; found {type(value).__name__}")
    return value


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise EnvelopeError(f"{place}: expected a list; found {type(value).__name__}")
    return value


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise EnvelopeError(f"{place}: expected text; found {type(value).__name__}")
    return value


def stack_of(*, backend: str, device: str) -> dict[str, str]:
    """Describe what this process runs on; `device` is `cpu` or `cuda`."""
    torch_version = str(torch.__version__)
    version = torch_version  # Gloo comes with torch and has no number of its own
    if "nccl" in backend:
        version = ".".join(map(str, torch.cuda.nccl.version()))
    named = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "torch": torch_version,
        "backend": backend,
        "backend_version": version,
        "device": f"{device} {named}",
        "system": platform.system(),
    }


def title(stack: Mapping[str, str]) -> str:
    """Write a stack in one line; the first part of a key."""
    return (
        f"torch {stack['torch']}, {stack['backend']} {stack['backend_version']}, "
        f"{stack['device']}, {stack['system']}"
    )


def profile_of(wrapper: str, *, compiled: bool, replacement: str) -> str:
    """Write a resource profile; the second part of a key."""
    return f"{wrapper}, {'compiled' if compiled else 'eager'}, {replacement}"
