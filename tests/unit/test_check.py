"""Whether a folder still holds what its records give."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from harness import compare
from harness.records import (
    write_json,
)
from harness.spec import SpecError
from tests.unit.comparisons import RUNS, make

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with its report, not to be changed."""
    folder = make(tmp_path_factory.mktemp("comparison"))
    compare.finish(folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "copied")


class TestCheck:
    """A report is what its records give, byte for byte."""

    def test_unchanged(self, finished: Path) -> None:
        """Nothing differs after it was made."""
        assert [] == compare.check(finished)

    def test_rebuilt_byte_for_byte(self, finished: Path, copied: Path) -> None:
        """Made again from the records alone, every file has the same bytes."""
        for name in ("report.md", "summary.json", "SHA256SUMS"):
            (copied / name).unlink()
        shutil.rmtree(copied / "figures")
        compare.finish(copied)
        paths = [path.relative_to(finished) for path in finished.rglob("*") if path.is_file()]

        assert len(paths) > 7 * 5
        assert [] == [
            path for path in paths
            if (finished / path).read_bytes() != (copied / path).read_bytes()
        ]  # fmt: skip

    def test_checksums_are_of_every_record(self, finished: Path) -> None:
        """`sha256sum --check` would read them: two spaces, paths from the folder, sorted."""
        lines = (finished / "SHA256SUMS").read_text().splitlines()
        names = [line[66:] for line in lines]

        assert sorted(names) == names
        assert len(RUNS) * 6 + 2 == len(lines)
        assert {"comparison.json", "environment.json", "runs/0-cold/rank0.log"} <= set(names)
        for line in lines:
            digest, name = line[:64], line[66:]
            assert "  " == line[64:66]
            assert hashlib.sha256((finished / name).read_bytes()).hexdigest() == digest

    @pytest.mark.parametrize(
        "name",
        ["runs/0-cold/rank0.log", "runs/0-cold/resources.jsonl", "runs/0-reference/run.json"],
    )
    def test_tampered_record(self, copied: Path, name: str) -> None:
        """A record that was touched, in a way that changes no figure, is noticed."""
        path = copied / name
        path.write_bytes(path.read_bytes() + b"\n")

        assert ["SHA256SUMS"] == compare.check(copied)

    def test_tampered_event(self, copied: Path) -> None:
        """A record that was touched so that it changes a figure is noticed twice."""
        path = copied / "runs" / "0-cold" / "events.jsonl"
        text = path.read_text()
        assert '"t":1026.0' in text
        path.write_text(text.replace('"t":1026.0', '"t":1024.5'))

        assert ["SHA256SUMS", "summary.json"] == compare.check(copied)

    def test_tampered_report(self, copied: Path) -> None:
        """A word in the report is enough."""
        path = copied / "report.md"
        path.write_text(path.read_text().replace("cold", "warm", 1))

        assert ["report.md"] == compare.check(copied)

    def test_tampered_summary(self, copied: Path) -> None:
        """A figure in the summary that the records do not give is noticed."""
        path = copied / "summary.json"
        found = json.loads(path.read_bytes())
        found["runs"][2]["replayed_updates"] = 0
        write_json(path, found)

        assert "summary.json" in compare.check(copied)

    def test_record_added_or_removed(self, copied: Path) -> None:
        """A file too many among the records, and one too few."""
        extra = copied / "runs" / "0-cold" / "rank9.log"
        extra.touch()

        assert ["SHA256SUMS"] == compare.check(copied)
        extra.unlink()
        (copied / "runs" / "0-cold" / "rank0.log").unlink()
        assert ["SHA256SUMS"] == compare.check(copied)

    def test_checksums_missing(self, copied: Path) -> None:
        """Without checksums nobody knows whether records were touched."""
        (copied / "SHA256SUMS").unlink()

        assert ["SHA256SUMS"] == compare.check(copied)

    def test_summary_missing(self, copied: Path) -> None:
        """Without a summary there is nothing to check, and that is said by name."""
        (copied / "summary.json").unlink()

        with pytest.raises(SpecError, match=r"^folder: expected summary\.json"):
            compare.check(copied)
