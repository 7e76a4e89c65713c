"""The examples of integration, with and without a failure: the same weights at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import strategies
from harness import integration
from strategies import Platform
from tests.distributed import ranks, scripts

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

IN_PROCESS = ("accelpact", "c10d_reconfigure", "torchft_pg", "torchft_manager", "nvrx")
LATE_AFTER = 3
"""Update. The last checkpoint before it is that of update 2."""
_TORCHRUN = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"


def skip_unless_available(name: str) -> None:
    answer = strategies.find(name)().availability(Platform(device="cpu", backend="gloo"))
    if not answer.available:
        pytest.skip(answer.reason)


def surroundings(folder: Path, late_after: int) -> dict[str, str]:
    return {
        "EXAMPLE_FOLDER": str(folder),
        "EXAMPLE_FAIL_AT": str(late_after),
        "RUST_LOG": "error",  # torchft's
    }


def run_example(rank: Rank, name: str, folder: Path, late_after: int) -> list[str]:
    """Be a rank of `torchrun train_NAME.py`; return what it printed."""
    scripts.launch_environment(rank)
    os.environ.update(surroundings(folder, late_after))
    script = integration.folder() / f"train_{name}.py"
    sys.path.insert(0, str(script.parent))
    # NVRx starts a process for every rank, which daemons may not, and which wants real files.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    printed = folder / f"rank{rank.number}.txt"
    with (
        Path(os.devnull).open() as sys.stdin,
        printed.open("w") as output,
        contextlib.redirect_stdout(output),
    ):
        scripts.run_bare(str(script), [])
    return printed.read_text().splitlines()


def weights(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if " weights " in line)


def on_ranks(name: str, folder: Path, late_after: int = 0) -> list[str]:
    """Lines that the ranks of one example printed."""
    found = ranks.values(ranks.run(run_example, name, folder, late_after))
    return [line for lines in found for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests that the plain script ends with, when nothing fails."""
    found = weights(on_ranks("plain", tmp_path_factory.mktemp("plain")))
    assert 4 == len(found), found
    assert 2 == len({line.rsplit(" ", 1)[1] for line in found})  # replicas are equal, shards differ
    return found


class TestExamples:
    """The last rank comes late to the collective after update 3."""

    @pytest.mark.parametrize("name", ["cold", *IN_PROCESS])
    def test_trains_like_the_plain_script(
        self, name: str, plain: list[str], tmp_path: Path
    ) -> None:
        """Without a failure integration changes no weight."""
        skip_unless_available(name)

        assert plain == weights(on_ranks(name, tmp_path))

    @pytest.mark.parametrize("name", IN_PROCESS)
    def test_survives(self, name: str, plain: list[str], tmp_path: Path) -> None:
        """It ends with the same weights in the same processes."""
        skip_unless_available(name)
        lines = on_ranks(name, tmp_path, LATE_AFTER)

        assert f"rank 3 comes late after update {LATE_AFTER}" in lines
        assert plain == weights(lines)

    def test_survives_by_a_restart(self, plain: list[str], tmp_path: Path) -> None:
        """The launcher starts the ranks again, which replay what came after the checkpoint."""
        script = str(integration.folder() / "train_cold.py")
        port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
        options = ("--nproc-per-node", "4", "--max-restarts", "1", "--master-port", str(port))
        ended = subprocess.run(
            [sys.executable, "-c", _TORCHRUN, *options, script],
            env={**os.environ, **surroundings(tmp_path, LATE_AFTER), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        printed = re.findall(r"update \d loss|rank \d weights [0-9a-f]+|rank 3 comes", ended.stdout)

        assert 0 == ended.returncode, ended.stderr[-3000:]
        assert "rank 3 comes" in printed
        assert 2 == printed.count(f"update {LATE_AFTER} loss")
        assert plain == weights(printed)
