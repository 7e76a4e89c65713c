"""`torchrun ... -m accelpact [options] train.py [its arguments]`: a script, protected unchanged."""

from __future__ import annotations

import argparse
import dataclasses
import os
import runpy
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelpact._events import DIRECTORY_VARIABLE
from accelpact._settings import REPLACEMENTS, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION = """
Runs a training script that knows nothing of this runtime, and keeps its state through failures of
its collectives between two updates. Models wrapped in FSDP, fully_shard or DistributedDataParallel
are found by their optimizer, when that steps for the first time.
"""
_EXAMPLE = "example: torchrun --nproc-per-node 4 -m accelpact train.py --epochs 3"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that `arguments` name under the settings that stand before it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    try:
        Settings(**given)
    except ValueError as error:
        parser.error(str(error))
    if options.events is not None:
        os.environ[DIRECTORY_VARIABLE] = options.events
    if not options.module and not Path(options.script).is_file():
        parser.error(f"script: expected a Python file; found no file {options.script}")
    from accelpact._script import protect

    protect(given)
    if options.module:
        sys.argv = [options.script, *options.arguments]
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        _run_file(options.script, options.arguments)


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m accelpact", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    add = parser.add_argument
    add(
        "--replacement",
        choices=REPLACEMENTS,
        default=defaults.replacement,
        help="how a group is replaced (default %(default)s)",
    )
    for name, text in (
        ("deadline", "seconds within which each step of a repair must happen"),
        ("patience", "seconds for which a rank that is late is waited for"),
        ("silence", "seconds after which a rank without a heartbeat counts as silent"),
    ):
        default = getattr(defaults, name)
        add(f"--{name}", type=float, default=default, help=f"{text} (default %(default)s)")
    add(
        "--no-audit",
        dest="audit",
        action="store_false",
        help="do without the proof that nothing names a retired group",
    )
    add(
        "--envelope",
        metavar="FILE",
        help="do only what this envelope file holds proven (as ACCELPACT_ENVELOPE)",
    )
    add("--events", metavar="DIR", help=f"write the runtime's record (as {DIRECTORY_VARIABLE})")
    add("-m", dest="module", action="store_true", help="the script is a module's name")
    add("script", help="the training script")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _run_file(path: str, arguments: Sequence[str]) -> None:
    """Run the file at `path` as Python itself would.

    Its module stays `__main__` until the process ends, for whatever runs at exit.
    """
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    code = compile(Path(path).read_bytes(), path, "exec")
    namespace: dict[str, Any] = vars(main_module)
    namespace["__builtins__"] = __builtins__
    exec(code, namespace)  # noqa: S102  the user's own script


if __name__ == "__main__":
    main()
