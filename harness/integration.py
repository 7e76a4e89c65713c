"""Lines that a contender needs in a training script, counted in its own source.

A contender marks what a script would have to contain with `# integration: begin`
and `# integration: end`. Blank lines and comments do not count.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies import Strategy

_BEGIN, _END = "# integration: begin", "# integration: end"


def count_lines(source: str) -> int | None:
    """Count the lines between markers; None if there are no markers.

    Raises:
        ValueError: a marker without its counterpart.
    """
    inside, count, found = False, 0, False
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        if text in (_BEGIN, _END):
            if inside == (text == _BEGIN):
                raise ValueError(f"line {number}: expected the other marker; found {text!r}")
            inside, found = not inside, True
        elif inside and text and not text.startswith("#"):
            count += 1
    if inside:
        raise ValueError(f"expected {_END!r} before the end of the file")
    return count if found else None


def integration_lines(strategy: type[Strategy]) -> int | None:
    """Count the lines marked in the module that defines `strategy`."""
    module = inspect.getmodule(strategy)
    try:
        return count_lines(inspect.getsource(module)) if module is not None else None
    except OSError:
        return None
