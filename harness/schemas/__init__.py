"""The published JSON Schemas of the records, generated from `harness.records`."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import msgspec

from harness.records import SCHEMA_VERSION, Digests, Event, Resources, Summary

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "summary": (Summary, "summary.json of a comparison."),
    "events": (Event, "One line of events.jsonl of a run."),
    "digests": (Digests, "One line of digests.jsonl of a run."),
    "resources": (Resources, "One line of resources.jsonl of a run."),
}


def names() -> list[str]:
    """Names of the schemas: `summary`, `events`, `digests`, `resources`."""
    return list(_KINDS)


def file_name(name: str) -> str:
    """Name of the file that holds the schema `name`."""
    return f"{name}.schema.json"


def generate() -> dict[str, bytes]:
    """Return file name -> content of every schema, as generated from the types."""
    return {file_name(name): _encode(_schema(name)) for name in _KINDS}


def load(name: str) -> dict[str, Any]:
    """Read the published schema `name`.

    Raises:
        ValueError: there is no schema of that name.
    """
    if name not in _KINDS:
        raise ValueError(f"schema: expected one of {', '.join(_KINDS)}; found {name!r}")
    text = resources.files(__name__).joinpath(file_name(name)).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _schema(name: str) -> dict[str, Any]:
    kind, title = _KINDS[name]
    schema = msgspec.json.schema(kind)
    if kind is Summary:
        # Records of another version must not pass for this one.
        schema["$defs"]["Summary"]["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {"$schema": DIALECT, "title": f"{title} Schema version {SCHEMA_VERSION}.", **schema}


def _encode(schema: dict[str, Any]) -> bytes:
    return (json.dumps(schema, indent=1, sort_keys=True) + "\n").encode()
