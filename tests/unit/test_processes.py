"""A process that another has spawned does not outlive it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from pathlib import Path

PARENT = """
import multiprocessing
import time

from harness.processes import end_with_parent

if __name__ == "__mp_main__":
    end_with_parent()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""
GONE_S = 10.0


def runs(pid: int) -> bool:
    """Whether that process has not ended, waited for or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(60)
def test_ends_with_its_parent(tmp_path: Path) -> None:
    """Though that was killed, and the thread that spawned it is not what counts."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        lived = runs(child)
        parent.kill()
    end = time.monotonic() + GONE_S
    while runs(child) and time.monotonic() < end:
        time.sleep(0.05)

    assert lived
    assert not runs(child)
