"""`accelpact compiled` on real ranks: a group that is rebuilt has nothing compiled again."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from harness import compiling, matrix

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def test_counts_before_and_after_a_rebuild(tmp_path: Path) -> None:
    """Ranks are forks of a process of the command's own, which has compiled nothing."""
    folder = tmp_path / "out"
    options = ("--strategies", "accelpact", "--wrappers", "fsdp2", "--out", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compiled", *options],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert 0 == done.returncode, f"{done.stdout}\n{done.stderr}"
    rows = json.loads((folder / compiling.COUNTS).read_text())["rows"]
    found = {row["strategy"]: row for row in rows}

    assert ["pass", "pass"] == [row["verdict"] for row in rows]
    for row in rows:
        assert row["before"]["model"]["graphs"] > 0
        assert {"graphs": 1, "breaks": 0, "recompiled": 0} == row["before"]["function"]
        assert {"graphs": 0, "breaks": 0, "recompiled": 0} == row["after"]["model"]
        assert {"graphs": 0, "breaks": 0, "recompiled": 0} == row["after"]["function"]
    assert found["reference"]["before"] == found["accelpact"]["before"]
    assert [] == matrix.check(folder)
