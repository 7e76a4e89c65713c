"""A workload of the user's own: `FILE.py:FUNCTION`, loaded by its path on every rank."""

from __future__ import annotations

import difflib
import hashlib
import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.spec import Own, SpecError
from harness.workload.training import Given, Training

FUNCTION = "build"
"""What is called if only a file is named."""


def parse(text: str) -> Own | None:
    """Return what `FILE.py:FUNCTION` or `FILE.py` names; None if `text` is neither.

    Raises:
        SpecError: there is no such file, or it cannot be read.
    """
    file, _, function = text.rpartition(":") if ":" in text else (text, "", FUNCTION)
    if not file.endswith(".py") or not function.isidentifier():
        if ":" in text or text.endswith(".py") or "/" in text:
            raise SpecError(
                "workload: expected a built-in one, or FILE.py:FUNCTION, for example "
                f"mine.py:{FUNCTION}; found {text!r}"
            )
        return None
    path = Path(file)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "nothing"
        raise SpecError(f"workload: expected a Python file; found {what} at {file}")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"workload: expected to read {file}; found {error.strerror}; check its permissions"
        ) from None
    return Own(
        path=str(path.resolve()), function=function, sha256=hashlib.sha256(source).hexdigest()
    )


def short_name(own: Own) -> str:
    """`FILE.py:FUNCTION` without the folder."""
    return f"{Path(own.path).name}:{own.function}"


def load(own: Own) -> Callable[[Given], Training]:
    """Import the file, once per process, and return the function that builds the workload.

    The file's folder comes first where modules are looked for, as Python does with a script's.

    Raises:
        SpecError: the file has changed, cannot be imported or has no such function.
    """
    module = _import(own)
    build = getattr(module, own.function, None)
    if not callable(build):
        offered = [name for name, each in vars(module).items() if callable(each)]
        near = difflib.get_close_matches(own.function, offered, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(
            f"workload: expected a function {own.function}(given) in {Path(own.path).name}; "
            f"found none{hint}"
        )

    def make(given: Given) -> Training:
        try:
            found = build(given)
        except SpecError:
            raise
        except Exception as error:
            raise failed(f"{own.function} in {Path(own.path).name}", own, error) from error
        if not isinstance(found, Training):
            raise SpecError(
                f"workload: expected {short_name(own)} to return a harness.workload.Training; "
                f"found {type(found).__name__}"
            )
        return found

    return make


def beside(own: Own) -> dict[str, str]:
    """SHA-256 of every module from the file's folder that it has imported, by relative path."""
    folder = Path(own.path).parent
    not_users = ("harness", "strategies", "accelpact")
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or name.split(".")[0] in not_users:
            continue
        path = Path(file)
        inside = path.is_relative_to(folder) and not path.is_relative_to(sys.prefix)
        if inside and file != own.path and path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def failed(what: str, own: Own, error: BaseException) -> SpecError:
    """Say in one line what was raised, and in which line of the user's file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == own.path
    ]
    if isinstance(error, SyntaxError) and error.filename == own.path:
        lines = [error.lineno]
    where = f" in line {lines[-1]}" if lines else ""
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return SpecError(
        f"workload: expected {what} to succeed; found {type(error).__name__}{where}: {message}"
    )


class _Recorded(importlib.abc.SourceLoader):
    """Loads exactly the text whose digest is recorded, and leaves no compiled file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002  importlib's own signature
        return self._path

    def get_data(self, path: Any) -> bytes:  # noqa: ARG002  as above
        return self._source


def _import(own: Own) -> ModuleType:
    path = Path(own.path)
    name = f"_workload_{own.sha256[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    source = path.read_bytes()
    if hashlib.sha256(source).hexdigest() != own.sha256:
        raise SpecError(
            f"workload: expected {path.name} as it was when the comparison began; found it "
            "changed; start again"
        )
    loader = _Recorded(own.path, source)
    spec = importlib.util.spec_from_loader(name, loader, origin=own.path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failed(f"importing {path.name}", own, error) from error
    return module
