"""Places in the data order against a committed history."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def ledger(samples: Iterable[int], expected: int) -> tuple[int, int]:
    """Count what a committed history of `expected` samples lacks and has too much of.

    Args:
        samples: places in the data order, from all ranks, in any order.
        expected: number of samples of the history; its places are 0 to expected - 1.

    Returns:
        (missing, duplicated). Duplicated counts every service after the first
        and every place outside the history, so that always
        len(samples) == expected - missing + duplicated.
    """
    served = list(samples)
    distinct = {place for place in served if 0 <= place < expected}
    return expected - len(distinct), len(served) - len(distinct)
