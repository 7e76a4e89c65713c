"""Real text as bytes: CPython's own documentation, or what `--data` names."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from harness.spec import SpecError

VOCAB_SIZE = 256
"""A token is a byte."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """UTF-8 text, held as bytes, cut into sequences that overlap by one byte."""

    name: str
    """Where the text is from; no folder of this machine."""
    data: bytes = dataclasses.field(repr=False)

    @classmethod
    def load(cls, path: str | None = None) -> Corpus:
        """Read a text file or a folder of them; None reads CPython's documentation.

        A folder's files are joined in the order of their relative paths, with a
        newline between; hidden files and folders are left out.

        Raises:
            SpecError: nothing there, nothing in it, not readable or not UTF-8.
        """
        if path is None:
            return _documentation()
        root = Path(path)
        if root.is_dir():
            texts = [_read(root / file, file) for file in _text_files(root)]
        elif root.exists():
            texts = [_read(root, root.name)]
        else:
            raise SpecError(
                f"data: expected a text file or a folder of them; found nothing at {path}; "
                "check the path, or leave --data out to use CPython's documentation"
            )
        data = b"\n".join(text for text in texts if text)
        if not data:
            found = "a folder without text" if root.is_dir() else "an empty file"
            raise SpecError(f"data: expected text; found {found}: {path}; name one with text")
        return cls(name=root.resolve().name, data=data)

    def num_sequences(self, seq_len: int) -> int:
        """Number of sequences of `seq_len` inputs, each with the byte that follows."""
        return max(0, (len(self.data) - 1) // seq_len)

    def record(self, seq_len: int) -> dict[str, Any]:
        """Return what identifies the data: name, sha256, bytes, sequences, seq_len."""
        return {
            "name": self.name,
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "bytes": len(self.data),
            "sequences": self.num_sequences(seq_len),
            "seq_len": seq_len,
        }

    def check(self, *, seq_len: int, microbatch: int, world_size: int) -> None:
        """Refuse a corpus that cannot give every rank one microbatch of its own.

        Raises:
            SpecError: says how many bytes are needed.
        """
        needed = world_size * microbatch * seq_len + 1
        if len(self.data) < needed:
            raise SpecError(
                f"data: expected at least {needed:,} bytes, one microbatch of {microbatch} x "
                f"{seq_len} bytes for each of {world_size} ranks and one more; found "
                f"{len(self.data):,} in {self.name}; use more text or a smaller workload"
            )


def _documentation() -> Corpus:
    """Serialise `pydoc_data.topics`, sorted by topic, so that equal texts give equal bytes."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise SpecError(
            "data: expected CPython's documentation (pydoc_data) in this Python; found none; "
            "pass --data with a text file or a folder of them"
        ) from None
    text = "".join(f"{topic}\n\n{topics[topic]}\n\n" for topic in sorted(topics))
    return Corpus(
        name=f"pydoc_data.topics of CPython {platform.python_version()}", data=text.encode()
    )


def _text_files(root: Path) -> list[str]:
    """Relative POSIX paths of the files under `root` that are not hidden, sorted."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _read(path: Path, shown: str) -> bytes:
    """Return the bytes of a regular file that is valid UTF-8; `shown` names it in errors."""
    if not path.is_file():
        # Reading a pipe or a device would block, or never end.
        raise SpecError(f"data: expected regular files; found {shown}, which is none; remove it")
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise SpecError(
            f"data: expected to read {shown}; found {error.strerror}; check its permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise SpecError(
            f"data: expected UTF-8 text; found an invalid byte at offset {error.start} of "
            f"{shown}; convert the file or leave it out"
        ) from None
    return data
