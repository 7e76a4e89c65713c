"""The verdict matrix: a pure function of its records, with a word in every cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import matrix, options
from harness.progress import Progress
from harness.records import write_json
from harness.spec import SpecError
from strategies import Platform
from tests.unit import logs, summaries

COMMITTED = sorted(path.parent for path in Path(__file__).parents[2].glob("reports/*/matrix.json"))
WITHOUT = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == PACKAGE:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == MODULE:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""
"""Makes a package look as if it were not installed, from the interpreter's start on."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of two contenders and two faults, of which one run and one contender are missing."""
    place = tmp_path / "torch-2.14.0" / "fsdp1"
    place.mkdir(parents=True)
    write_json(place / "environment.json", {})
    contenders = [
        summaries.contender("cold"),
        summaries.contender("nvrx", available=False, reason="package x is not installed"),
    ]
    spec = {"wrapper": "fsdp1", "strikes": ["absent@boundary:3", "absent@forward:4"]}
    described = {"title": "t", "spec": spec, "contenders": contenders, "complete": False}
    write_json(place / "comparison.json", described)
    write_json(place / "seconds.json", 12.5)
    good = logs.uninterrupted()
    for label, control in (("reference", False), ("reference-control", True)):
        run = logs.run_spec("reference", name=f"0-{label}", control=control)
        logs.write_run(place / "runs", run, good, logs.digests(good))
    log = logs.restarted()
    run = logs.run_spec("cold", name="0-cold-absent-boundary")
    logs.write_run(place / "runs", run, log, logs.digests(log))
    matrix.finish(tmp_path)
    return tmp_path


def cells(folder: Path) -> dict[tuple[str, str], Any]:
    found = json.loads((folder / "matrix.json").read_text())["cells"]
    return {(cell["strategy"], cell["strike"]): cell for cell in found}


class TestCells:
    """No cell is empty."""

    def test_verdict_and_evidence(self, folder: Path) -> None:
        """A run's cell has its verdict and that the fault fired."""
        cell = cells(folder)["cold", "absent@boundary"]

        assert ("pass", "pass", 2) == (cell["verdict"], cell["expected"], cell["replayed_updates"])
        assert "rank 3 stayed away after update 3" in cell["evidence"]

    def test_missing_run_says_so(self, folder: Path) -> None:
        """What was interrupted or cannot run has a reason."""
        found = cells(folder)

        assert "interrupted" in found["cold", "absent@forward"]["reason"]
        for strike in ("absent@boundary", "absent@forward"):
            cell = found["nvrx", strike]
            assert ("not_run", "package x is not installed") == (cell["verdict"], cell["reason"])

    def test_table(self, folder: Path) -> None:
        """Every cell has a verdict, every footnote one number."""
        text = (folder / "matrix.md").read_text()

        assert "| cold | pass (2+0) | not_run [1] |" in text
        assert "| nvrx | not_run [2] | not_run [2] |" in text
        assert "2. package x is not installed" in text

    def test_unexpected_verdict_stands_out(self, folder: Path) -> None:
        """A cell that is not as expected is bold and counted."""
        place = folder / "torch-2.14.0" / "fsdp1" / "runs" / "0-cold-absent-boundary"
        run = logs.run_spec("cold", name=place.name, expected="rejected")
        write_json(place / "run.json", run)
        found = matrix.finish(folder)

        assert ["cold"] == [cell.strategy for cell in matrix.unexpected(found)]
        assert "**pass (2+0)**, expected rejected" in (folder / "matrix.md").read_text()


class TestCheck:
    """Records, matrix and checksums belong together."""

    def test_untouched(self, folder: Path) -> None:
        """What was written is what the records give."""
        assert [] == matrix.check(folder)

    def test_edited_verdict_is_found(self, folder: Path) -> None:
        """A matrix that was improved by hand differs."""
        path = folder / "matrix.md"
        path.write_text(path.read_text().replace("not_run [2]", "pass"))

        assert ["matrix.md"] == matrix.check(folder)

    @pytest.mark.parametrize("committed", COMMITTED, ids=lambda path: path.name)
    def test_committed(self, committed: Path) -> None:
        """Whoever changes a judgement builds the committed matrices anew."""
        assert [] == matrix.check(committed)


class TestFaults:
    """Which faults are planned."""

    def test_strike_between_the_same_two_commits(self) -> None:
        """Inside an update or before it, the last commit is the same."""
        assert {matrix.FRONTIER} == {each.frontier for each in matrix.faults(matrix.STRIKES)}

    @pytest.mark.parametrize(
        "wrong", [["absent@night"], ["nap@boundary"], ["absent@forward"] * 2, ["absent"]]
    )
    def test_mistakes(self, wrong: list[str]) -> None:
        """Unknown kinds and phases, and what is named twice, are refused."""
        with pytest.raises(SpecError, match=r"^fault"):
            matrix.faults(wrong)


class TestOwnWorkload:
    """A matrix of what the user trains."""

    @pytest.fixture
    def own(self, folder: Path) -> Path:
        """The same records, of a workload of the user's own."""
        path = folder / "torch-2.14.0" / "fsdp1" / "comparison.json"
        described = json.loads(path.read_text())
        described["spec"] |= {"workload": "mine.py:build", "own": {"sha256": "ab" * 32}}
        path.write_text(json.dumps(described))
        matrix.finish(folder)
        return folder

    def test_is_named(self, own: Path) -> None:
        """With the version of the file; the usual workload goes without saying."""
        assert "The workload is mine.py:build (abababababab)." in (own / "matrix.md").read_text()

    def test_stays_alone(self, own: Path) -> None:
        """What was trained otherwise goes elsewhere."""
        with pytest.raises(SpecError, match=r"^out: expected a folder for tiny alone; found reco"):
            matrix.run(
                options.make_spec(),
                [],
                wrappers=["ddp"],
                strikes=matrix.STRIKES,
                platform=Platform(device="cpu", backend="gloo"),
                folder=own,
                progress=Progress(),
                check=lambda spec: spec,
            )


class TestMissingPackage:
    """What an environment without a package changes."""

    @staticmethod
    def listed(tmp_path: Path, blocked: str = "") -> dict[str, Any]:
        (tmp_path / "sitecustomize.py").write_text(blocked)
        paths = [str(tmp_path), str(Path.cwd())]
        done = subprocess.run(
            [sys.executable, "-m", "harness", "list", "strategies", "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return {row["name"]: row for row in json.loads(done.stdout)}

    @pytest.mark.parametrize(
        ("package", "module", "names"),
        [
            ("torchft", "torchft", {"torchft_pg", "torchft_manager"}),
            ("nvidia-resiliency-ext", "nvidia_resiliency_ext", {"nvrx", "cold_ft"}),
        ],
    )
    def test_changes_its_contenders_rows_alone(
        self, tmp_path: Path, package: str, module: str, names: set[str]
    ) -> None:
        """All others are listed as before, and no import of the package is tried."""
        usual = self.listed(tmp_path)
        blocked = f"PACKAGE, MODULE = {package!r}, {module!r}\n{WITHOUT}"
        found = self.listed(tmp_path, blocked)

        assert usual.keys() == found.keys()
        for name, row in found.items():
            if name in names:
                assert (False, f"package {package} is not installed") == (
                    row["available"],
                    row["reason"],
                )
            else:
                assert usual[name] == row
