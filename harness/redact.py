"""Takes this machine's paths and name out of what a run printed.

Records are meant to be published; where a Python is installed and what its
machine is called are nobody's business and no evidence.
"""

from __future__ import annotations

import re
import site
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def _names() -> list[tuple[str, str]]:
    """Text to replace and its replacement, longest first so that no path eats another."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    names = {
        str(Path(__file__).resolve().parent.parent): "<project>",
        sys.prefix: "<env>",
        sys.base_prefix: "<python>",
        str(Path.home()): "<home>",
        str(Path.cwd()): "<cwd>",
        tempfile.gettempdir(): "<tmp>",
        **dict.fromkeys(packages, "<packages>"),
    }
    usable = [(name, token) for name, token in names.items() if len(name) > 3]
    return sorted(usable, key=lambda pair: -len(pair[0]))


def _host() -> re.Pattern[str]:
    """This machine's name as a word; as a whole JSON string it may be a field's name or value."""
    name = socket.gethostname()
    if len(name) <= 3:
        return re.compile(r"(?!)")
    name = re.escape(name)
    return re.compile(rf'(?<![\w-])(?:(?<!"){name}|{name}(?!"))(?![\w-])')


def redact(folder: Path, *, also: Mapping[str, str] | None = None) -> None:
    """Rewrite every text record in `folder` in place.

    Args:
        folder: its own path is replaced as well.
        also: further text to replace, and by what.
    """
    host = _host()
    given = {**(also or {}), str(folder.resolve()): "<run>", str(folder): "<run>"}
    # Longest first, so that no path eats another; as short a one as "/" is in all of them.
    usable = [(name, token) for name, token in given.items() if len(name) > 1]
    names = sorted([*usable, *_names()], key=lambda pair: -len(pair[0]))
    for path in sorted([*folder.glob("*.log"), *folder.glob("*.json"), *folder.glob("*.jsonl")]):
        text = path.read_text(errors="backslashreplace")
        cleaned = text
        for name, token in names:
            cleaned = cleaned.replace(name, token)
        cleaned = host.sub("<host>", cleaned)
        if cleaned != text:
            path.write_text(cleaned)
