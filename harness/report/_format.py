"""Numbers, spreads and tables as text. What is not known is a dash, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from harness.records import Overhead, Ratio
from harness.stats import ORDER_STATISTIC

DASH = "-"
NUMERIC = frozenset("0123456789-+")
"""What a number begins with."""


def number(value: float | None, *, digits: int = 4) -> str:
    """Write `value` with `digits` significant digits, without an exponent where readable."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size > 8:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - size, 0)}f}"


def fixed(value: float | None, *, decimals: int = 3) -> str:
    """Write `value` with a fixed number of decimals."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.{decimals}f}"


def quotient(value: float | None) -> str:
    """Write a ratio: three decimals near 1, fewer where they would say nothing."""
    if value is None or not math.isfinite(value):
        return DASH
    if abs(value) < 10:
        return number(value, digits=3) if abs(value) < 0.1 else f"{value:.3f}"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def count(value: int | None) -> str:
    """Write a whole number."""
    return DASH if value is None else str(value)


def spread(found: Ratio | Overhead) -> str:
    """Write what `low` and `high` are: an interval of the median, or the range."""
    edges = f"{quotient(found.low)} to {quotient(found.high)}"
    if found.n == 1:
        return "1 pair, no spread"
    pairs = f"{found.n} pairs"
    if found.method == ORDER_STATISTIC:
        return f"95 % interval {edges}, {pairs}"
    return f"{found.method} {edges}, {pairs}"


def short_ratio(found: Ratio | Overhead | None) -> str:
    """Write a ratio for a table cell: `1.197 (1.184 to 1.208)`."""
    if found is None:
        return DASH
    median = found.median if isinstance(found, Ratio) else found.ratio
    if found.n == 1:
        return quotient(median)
    return f"{quotient(median)} ({quotient(found.low)} to {quotient(found.high)})"


def series(values: Iterable[float | None], *, digits: int = 4) -> str:
    """Write several values in one cell."""
    return ", ".join(number(value, digits=digits) for value in values) or DASH


def plural(amount: int, noun: str) -> str:
    """Write `1 block`, `2 blocks`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def listing(items: Iterable[str], *, most: int | None = None) -> str:
    """Write `a, b and c`; beyond `most` items the rest is counted."""
    names = list(items)
    if most is not None and len(names) > most:
        return ", ".join(names[:most]) + f" and {len(names) - most} more"
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + f" and {names[-1]}"


def cell(text: object) -> str:
    """Make any text safe inside a cell of a markdown table."""
    if text is None or text == "":
        return DASH
    plain = " ".join(str(text).split())
    return plain.replace("|", "\\|").replace("<", "&lt;") or DASH


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, words: int | None = None
) -> str:
    """Write a GitHub table; columns of numbers are aligned to the right.

    The first `words` columns are taken for words and the others for numbers;
    by default a column is one of numbers if each of its cells begins like one.
    Without rows it says so, so that no section ends in an empty table.
    """
    body = [[cell(value) for value in row] for row in rows]
    if not body:
        return "Nothing was recorded."
    align = []
    for column in range(len(headers)):
        cells = [row[column] for row in body]
        numbers = all(text[0] in NUMERIC for text in cells) and set(cells) != {DASH}
        if words is not None:
            numbers = column >= words
        align.append("right" if numbers else "left")
    text: str = tabulate(
        body,
        headers=[cell(header) for header in headers],
        tablefmt="github",
        colalign=align,
        disable_numparse=True,
    )
    return text


def flatten(value: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, str]]:
    """List nested settings as dotted name and text, in the order of the records."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            rows += flatten(item, prefix=f"{name}.")
        else:
            rows.append((name, _plain(item)))
    return rows


def _plain(item: object) -> str:
    if item is None or (isinstance(item, (Mapping, list)) and not item):
        return DASH
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, float):
        return f"{item:g}"
    if isinstance(item, Mapping):
        return ", ".join(f"{key}={_plain(part)}" for key, part in item.items())
    if isinstance(item, list):
        return "; ".join(_plain(part) for part in item)
    return str(item)
