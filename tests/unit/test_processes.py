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

ADOPTS = """
import contextlib
import subprocess

import psutil

from harness.processes import adopting_orphans

for adopting in (contextlib.nullcontext(), adopting_orphans(), contextlib.nullcontext()):
    with adopting:
        subprocess.run(["sh", "-c", "sleep 2 >/dev/null 2>&1 &"], check=True)
        orphans = psutil.Process().children()
    print(len(orphans), flush=True)
    for orphan in orphans:
        orphan.kill()
        orphan.wait()
"""
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


def test_orphans_are_adopted_as_long_as_somebody_looks() -> None:
    """Before and after, they are the system's to reap."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS], capture_output=True, text=True, check=True, timeout=30
    )

    assert ["0", "1", "0"] == done.stdout.split()
