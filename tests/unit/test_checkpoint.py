"""Checkpoints are complete or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import checkpoint
from harness.checkpoint import CheckpointError, Manifest
from harness.records import write_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """A checkpoint with two files and the manifest that belongs to them."""
    folder = tmp_path / "update-000004"
    folder.mkdir()
    files = {"__0_0.distcp": b"first rank's", "__1_0.distcp": b"second rank's part"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    write_json(folder / "manifest.json", Manifest(update=4, files=sizes, roots=["ab", "cd"]))
    return folder


class TestVerify:
    """Before anything is loaded."""

    def test_complete(self, complete: Path) -> None:
        """A whole checkpoint gives its manifest."""
        found = checkpoint.verify(complete)

        assert (4, ["ab", "cd"]) == (found.update, found.roots)

    @staticmethod
    def refusal(folder: Path) -> str:
        with pytest.raises(CheckpointError) as refused:
            checkpoint.verify(folder)
        text = str(refused.value)

        assert text.startswith("checkpoint update-000004: expected ")
        assert "not loaded" in text
        assert 1 == len(text.splitlines())
        return text

    def test_missing_manifest(self, complete: Path) -> None:
        """Without its manifest nobody knows what a checkpoint consists of."""
        (complete / "manifest.json").unlink()

        assert "a complete checkpoint with manifest.json" in self.refusal(complete)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b'{"update": 4, "files": {"__0_0.dis',
            b'{"update": 4}',
            b'{"update": "four", "files": {}, "roots": []}',
            b"\xff\xfe",
        ],
    )
    def test_damaged_manifest(self, complete: Path, content: bytes) -> None:
        """A manifest that is cut off or holds something else is refused like a missing one."""
        (complete / "manifest.json").write_bytes(content)

        assert "a complete checkpoint with manifest.json" in self.refusal(complete)

    @pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp"])
    def test_missing_file(self, complete: Path, name: str) -> None:
        """The file that is missing is named."""
        (complete / name).unlink()
        text = self.refusal(complete)

        assert f"expected {name} of " in text
        assert "it is missing" in text

    @pytest.mark.parametrize("size", [0, 17])
    def test_truncated_file(self, complete: Path, size: int) -> None:
        """One byte less is too little, and both sizes are said."""
        path = complete / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:size])

        assert f"expected __1_0.distcp of 18 bytes; found {size};" in self.refusal(complete)

    def test_file_that_grew(self, complete: Path) -> None:
        """A file that is longer than it was is not what was saved either."""
        path = complete / "__0_0.distcp"
        path.write_bytes(path.read_bytes() + b"+")

        assert "expected __0_0.distcp of 12 bytes; found 13;" in self.refusal(complete)


class TestLatest:
    """Which checkpoint a restart loads."""

    def test_newest(self, tmp_path: Path) -> None:
        """The highest update wins, in whichever order they were made."""
        for update in (10, 4, 8):
            (tmp_path / f"update-{update:06d}").mkdir()

        assert tmp_path / "update-000010" == checkpoint.latest(tmp_path)

    def test_ignores_what_is_not_complete(self, tmp_path: Path) -> None:
        """A checkpoint that is still being written is none, however new."""
        (tmp_path / "update-000004").mkdir()
        (tmp_path / "update-000008.partial").mkdir()

        assert tmp_path / "update-000004" == checkpoint.latest(tmp_path)

    def test_none(self, tmp_path: Path) -> None:
        """An empty folder, one with a partial checkpoint alone and no folder at all give None."""
        partial = tmp_path / "some" / "update-000008.partial"
        partial.mkdir(parents=True)

        assert checkpoint.latest(tmp_path) is None
        assert checkpoint.latest(partial.parent) is None
        assert checkpoint.latest(tmp_path / "nowhere") is None
