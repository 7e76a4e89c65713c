"""The command line: `accelpact`, or `python -m harness`."""

from __future__ import annotations

import os
import signal
import warnings
from typing import NoReturn

from harness.commands import comparing, reading, trying  # noqa: F401  they add theirs
from harness.commands._app import app


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch says so where NVRx brought pynvml along, and an error is to be one line.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    signal.signal(signal.SIGTERM, _terminated)
    app()


def _terminated(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    """Leave like Ctrl-C does, so that every child is ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
