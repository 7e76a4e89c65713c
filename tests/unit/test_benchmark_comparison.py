"""The comparison of benchmark records, as the command that it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compare.py"


def write(path: Path, **ratios: float | None) -> Path:
    """Write a record; None is a benchmark without a floor."""
    benchmarks = [
        {
            "fullname": name,
            "stats": {"median": 0.1},
            "extra_info": {} if ratio is None else {"ratio_to_floor": ratio},
        }
        for name, ratio in ratios.items()
    ]
    machine = {"node": "somebody", "cpu": {"brand_raw": "a CPU"}, "python_version": "3.11"}
    path.write_text(json.dumps({"machine_info": machine, "benchmarks": benchmarks}))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def rows(output: str) -> dict[str, list[str]]:
    """Name -> rest of its line in the table."""
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}


class TestCompare:
    def test_within_the_factor(self, tmp_path: Path) -> None:
        """A ratio that fell by less than the factor passes."""
        baseline = write(tmp_path / "a.json", digest=0.4, repair=0.9)
        current = write(tmp_path / "b.json", digest=0.21, repair=0.9)
        result = run(baseline, current)

        assert 0 == result.returncode
        assert ["0.400", "0.210", "x0.52", "same"] == rows(result.stdout)["digest"]

    def test_worse(self, tmp_path: Path) -> None:
        """A ratio that fell by more fails, and is named."""
        baseline = write(tmp_path / "a.json", digest=0.4, repair=0.9)
        current = write(tmp_path / "b.json", digest=0.19, repair=0.9)
        result = run(baseline, current)

        assert 1 == result.returncode
        assert "worse" == rows(result.stdout)["digest"][-1]
        assert result.stdout.rstrip().endswith("gone: digest")

    def test_factor(self, tmp_path: Path) -> None:
        """The factor can be chosen."""
        baseline = write(tmp_path / "a.json", digest=0.4)
        current = write(tmp_path / "b.json", digest=0.3)

        assert 0 == run(baseline, current).returncode
        assert 1 == run(baseline, current, "--factor", "1.2").returncode

    def test_better_and_new(self, tmp_path: Path) -> None:
        """Better and new ones pass and are marked."""
        baseline = write(tmp_path / "a.json", digest=0.2)
        current = write(tmp_path / "b.json", digest=0.5, guard=0.8)
        result = run(baseline, current)

        assert 0 == result.returncode
        assert "better" == rows(result.stdout)["digest"][-1]
        assert ["-", "0.800", "-", "new"] == rows(result.stdout)["guard"]

    def test_gone(self, tmp_path: Path) -> None:
        """One that is no longer there fails: what isn't measured can't be said to hold."""
        baseline = write(tmp_path / "a.json", digest=0.2, guard=0.8)
        current = write(tmp_path / "b.json", digest=0.2)
        result = run(baseline, current)

        assert 1 == result.returncode
        assert "gone" == rows(result.stdout)["guard"][-1]

    def test_without_a_floor(self, tmp_path: Path) -> None:
        """Benchmarks without a floor can't be compared and are left out."""
        baseline = write(tmp_path / "a.json", digest=0.2, other=None)
        result = run(baseline, baseline)

        assert 0 == result.returncode
        assert "other" not in rows(result.stdout)


class TestStore:
    def test_round_trip(self, tmp_path: Path) -> None:
        """A stored baseline compares equal and does not name the machine."""
        current = write(tmp_path / "b.json", digest=0.2, other=None)
        baseline = tmp_path / "baseline" / "ratios.json"

        assert 0 == run(baseline, current, "--store").returncode
        assert 0 == run(baseline, current).returncode
        assert "somebody" not in baseline.read_text()
        assert ["digest"] == [e["fullname"] for e in json.loads(baseline.read_text())["benchmarks"]]


class TestUnusable:
    @pytest.mark.parametrize("text", [None, "", "{", "[]", '{"benchmarks": 3}'])
    def test_one_line(self, tmp_path: Path, text: str | None) -> None:
        """A record that is missing or no record gets one line with its name and exit 2."""
        baseline = tmp_path / "a.json"
        if text is not None:
            baseline.write_text(text)
        result = run(baseline, write(tmp_path / "b.json", digest=0.2))

        assert 2 == result.returncode
        assert 1 == len(result.stderr.splitlines())
        assert str(baseline) in result.stderr
