"""What every test with real processes is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """A test ends, and with it every process that it started."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]

    assert [] == left
