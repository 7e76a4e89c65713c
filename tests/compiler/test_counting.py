"""`accelpact compiled` on real ranks: a group that is rebuilt has nothing compiled again."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from harness import compiling, matrix
from harness.compiling import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.distributed
@pytest.mark.timeout(240)
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


class TestCounters:
    """What the compiler tells is what happened."""

    @pytest.fixture(autouse=True)
    def nothing_compiled(self) -> Iterator[None]:
        """Begin and leave as if nothing had ever been compiled."""
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()
        counters.clear()

    def test_graph_break(self) -> None:
        """One break makes two graphs."""
        before = compiling._so_far()

        def broken(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        torch.compile(broken, backend="eager")(torch.ones(2))
        found = compiling._difference(compiling._so_far(), before)

        assert Counts(graphs=2, breaks=1, recompiled=0) == found

    def test_recompilation(self) -> None:
        """Another shape makes another graph of the same function."""
        before = compiling._so_far()
        add = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        for size in (2, 3, 3):
            add(torch.ones(size))
        found = compiling._difference(compiling._so_far(), before)

        assert Counts(graphs=2, breaks=0, recompiled=1) == found
