"""Lines that a contender needs in a training script, counted in its example.

`examples/integration/train_plain.py` is the script, and `train_NAME.py` the same with contender
NAME in it. What differs stands between `# integration: begin` and `# integration: end`: lines that
are added, and those that replace one of the plain script. Blank lines and comments do not count.
"""

from __future__ import annotations

from pathlib import Path

_BEGIN, _END = "# integration: begin", "# integration: end"


def folder() -> Path:
    """Return the folder of the examples, in a checkout or beside the installed package."""
    here = Path(__file__).parent
    installed = here / "examples"
    return installed if installed.is_dir() else here.parent / "examples" / "integration"


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


def integration_lines(name: str) -> int | None:
    """Count the lines marked in the example of contender `name`; None if it has none."""
    example = folder() / f"train_{name}.py"
    return count_lines(example.read_text()) if example.is_file() else None
