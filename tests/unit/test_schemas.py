"""The published JSON Schemas of the records."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import msgspec
import pytest

from harness import schemas
from harness.records import Digests, Event, Resources
from tests.unit import summaries


def valid(name: str, value: Any) -> None:
    """Check `value`, as JSON, against the published schema `name`."""
    jsonschema.Draft202012Validator(schemas.load(name)).validate(
        json.loads(msgspec.json.encode(value))
    )


class TestFiles:
    """What is published is what the types say."""

    @pytest.mark.parametrize("name", list(schemas.generate()))
    def test_equals_the_generation(self, name: str) -> None:
        """`python -m harness.schemas` was run after the last change of the types."""
        there = resources.files(schemas).joinpath(name).read_bytes()

        assert schemas.generate()[name] == there

    @pytest.mark.parametrize("name", schemas.names())
    def test_is_a_json_schema(self, name: str) -> None:
        """Each file is a schema of the dialect it names."""
        jsonschema.Draft202012Validator.check_schema(schemas.load(name))

    def test_unknown_name_is_refused(self) -> None:
        """The error names what there is."""
        with pytest.raises(ValueError, match="expected one of summary, events"):
            schemas.load("sumary")


class TestSummary:
    """`summary.json`."""

    def test_sample_validates(self) -> None:
        """What the harness writes is what the schema allows."""
        valid("summary", summaries.comparison(blocks=1))

    def test_other_version_is_refused(self) -> None:
        """Records of a later version do not pass for this one."""
        with pytest.raises(jsonschema.ValidationError, match="1 was expected"):
            valid("summary", summaries.comparison(blocks=1, schema_version=2))

    def test_unknown_verdict_is_refused(self) -> None:
        """Verdicts are a closed list."""
        with pytest.raises(jsonschema.ValidationError, match="'fine' is not one of"):
            valid("summary", summaries.summary([summaries.run("cold", verdict="fine")]))


class TestLines:
    """Records that are one line each."""

    def test_samples_validate(self) -> None:
        """One of each kind."""
        valid("events", Event(t=1.5, event="commit", rank=0, update=3, tokens=2048))
        valid("digests", Digests(update=3, rank=0, attempt=0, root="ab", tensors={"w": "cd"}))
        valid(
            "resources",
            Resources(
                t=1.0,
                rank=0,
                attempt=0,
                at="after",
                threads=3,
                descriptors=9,
                rss_bytes=1,
                groups=3,
            ),
        )

    @pytest.mark.parametrize(
        "line",
        [
            {"t": 1.0, "event": "lunch"},
            {"event": "commit"},
            {"t": 1.0, "event": "commit", "upadte": 3},
        ],
    )
    def test_wrong_event_is_refused(self, line: dict[str, Any]) -> None:
        """An unknown event, a missing time and a misspelt field do not pass."""
        with pytest.raises(jsonschema.ValidationError):
            valid("events", line)
