"""The command line: what it refuses and how, and what it lists."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

import harness
import strategies
from harness import doctor, options
from harness.cli import app

COMMANDS = (
    "compare",
    "run",
    "tune",
    "breakeven",
    "checkpoints",
    "report",
    "matrix",
    "qualify",
    "compiled",
    "doctor",
    "list",
)


def invoke(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, arguments)


@pytest.mark.usefixtures("elsewhere")
class TestCommandLine:
    """Exit statuses and what is printed."""

    @pytest.fixture
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Work in an empty folder, where no contender may ever be started."""
        from harness import supervisor

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("a run was started")

        monkeypatch.setattr(supervisor, "execute", never)
        monkeypatch.chdir(tmp_path)

    @staticmethod
    def refused(*arguments: str, status: int = 2) -> str:
        done = invoke(*arguments)

        assert (status, "") == (done.exit_code, done.stdout)
        assert done.stderr.startswith("accelpact: ")
        assert 1 == len(done.stderr.splitlines())
        return done.stderr.removeprefix("accelpact: ")

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            (["compare", "--mesh", "1x4"], "mesh"),
            (["compare", "--checkpoint-at", "9"], "checkpoint-at"),
            (["compare", "--fault", "absent@boundary:12"], "fault"),
            (["compare", "--fault", "absnt@boundary:8"], "fault kind"),
            (["compare", "--group-timeout", "nan"], "group-timeout"),
            (["compare", "--soft-timeout", "2"], "group-timeout"),
            (["compare", "--barrier-timeout", "inf"], "barrier-timeout"),
            (["compare", "--group-timeout", "0"], "group-timeout"),
            (["compare", "--blocks", "0"], "blocks"),
            (["compare", "--updates", "-1"], "updates"),
            (["compare", "--seed", "-1"], "seed"),
            (["compare", "--wrapper", "fsdp3"], "wrapper"),
            (["compare", "--workload", "tiney"], "workload"),
            (["compare", "--device", "gpu"], "device"),
            (["compare", "--preset", "fast"], "preset"),
            (["compare", "--data", "nowhere"], "data"),
            (["compare", "--strategies", "cold,acelpact"], "strategies"),
            (["compare", "--strategies", "cold,cold"], "strategies"),
            (["compare", "--out", "."], "out"),
            (["compare", "--out", "file"], "out"),
            (["compare", "--out", "file/below"], "out"),
            (["run", "acelpact"], "strategies"),
            (["run", "cold", "--updates", "1"], "updates"),
            (["tune", "nvrxx"], "strategy"),
            (["tune", "cold", "--blocks", "0"], "blocks"),
            (["report", "nowhere"], "folder"),
            (["report", "file"], "folder"),
            (["report", ".", "--check"], "folder"),
            (["report", "."], "folder"),
            (["list", "workload"], "kind"),
        ],
    )
    def test_bad_input(self, tmp_path: Path, arguments: list[str], field: str) -> None:
        """Exit status 2, one line on stderr that names the field, nothing on stdout or on disk."""
        (tmp_path / "file").touch()

        assert self.refused(*arguments).startswith(f"{field}: expected ")
        assert ["file"] == [path.name for path in tmp_path.iterdir()]

    @pytest.mark.parametrize(
        "arguments",
        [
            ["compare", "--nonsense"],
            ["compare", "--blocks", "many"],
            ["run"],
            ["report"],
            ["nonsense"],
        ],
    )
    def test_wrong_usage(self, arguments: list[str]) -> None:
        """Unknown options and commands, and missing arguments, end with status 2 as well."""
        done = invoke(*arguments)

        assert (2, "") == (done.exit_code, done.stdout)
        assert "Error: " in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (["compare", "--mesh", "1x2"], 2, "mesh: expected at least 2 replicas"),
            (["compare", "--data", "nowhere"], 2, "data: expected a text file"),
            (["compare", "--mesh", "2x1"], 2, "mesh: expected at least 2 shards for fsdp1"),
        ],
    )
    def test_in_a_process_of_its_own(self, arguments: list[str], status: int, message: str) -> None:
        """`python -m harness` prints the one line alone, whatever libraries would have to say."""
        done = subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(Path(harness.__file__).parent.parent)},
        )

        assert (status, "") == (done.returncode, done.stdout)
        assert done.stderr.startswith(f"accelpact: {message}")
        assert 1 == len(done.stderr.splitlines())

    def test_no_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exit status 3 with what to do where there is no GPU; nothing is created."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        found = self.refused("compare", "--device", "cuda", "--out", "new", status=3)

        assert "device: expected a CUDA GPU; found none; use --device cpu\n" == found
        assert [] == list(tmp_path.iterdir())

    def test_too_little_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exit status 3 with what is needed, what there is and what to do."""
        memory = SimpleNamespace(available=8 * 2**30, total=16 * 2**30)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        found = self.refused("compare", "--workload", "mistral-7b", status=3)

        assert found.startswith("workload: mistral-7b on 2x2 ranks needs about ")
        assert "found 8.0 GiB; use a smaller workload" in found
        assert [] == list(tmp_path.iterdir())

    def test_enough_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With more than is needed the same workload would be started."""
        memory = SimpleNamespace(available=2**40, total=2**40)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

        options.check_machine(options.make_spec(workload="mistral-7b"), refuse=AssertionError)

    def test_ctrl_c(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interrupt ends with a line and the shell's status for it."""

        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "examine", interrupt)

        assert self.refused("doctor", status=130).startswith("interrupted; every process is ended")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_has_an_example(self, command: str) -> None:
        """Every command shows how it is called."""
        done = invoke(command, "--help")

        assert 0 == done.exit_code
        assert f"Example: accelpact {command}" in " ".join(done.stdout.split())

    def test_these_are_all_commands(self) -> None:
        """No command is left out above."""
        registered = {each.name or each.callback.__name__ for each in app.registered_commands}

        assert set(COMMANDS) == registered


class TestListings:
    """What there is, for people and for scripts."""

    @staticmethod
    def listed(kind: str) -> list[dict[str, Any]]:
        done = invoke("list", kind, "--json")

        assert 0 == done.exit_code
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def test_strategies(self) -> None:
        """Every contender with availability, reason and version."""
        found = self.listed("strategies")

        assert strategies.names() == [each["name"] for each in found]
        for each in found:
            assert {"name", "available", "reason", "version"} <= each.keys()
            assert bool(each["reason"]) is not each["available"]
        assert importlib.metadata.version("torch") in found[1]["version"]

    def test_workloads(self) -> None:
        """Exact parameter counts; those of the paper's models are the paper's."""
        found = {each["name"]: (each["parameters"], each["layers"])
                 for each in self.listed("workloads")}  # fmt: skip

        assert (7_248_023_552, 32) == found["mistral-7b"]
        assert (1_216_448_512, 24) == found["decoder-1.2b"]
        assert 32 == found["decoder-32l"][1]
        assert (529_248, 4) == found["tiny"]

    def test_faults(self) -> None:
        """Kinds and the phases in which they strike."""
        phases = ["boundary", "forward", "backward"]

        assert [
            {"name": "absent", "kinds": ["absent"], "phases": phases},
            {"name": "kill", "kinds": ["kill"], "phases": phases},
            {"name": "error", "kinds": ["error"], "phases": ["step"]},
        ] == self.listed("faults")

    @pytest.mark.parametrize("kind", ["strategies", "workloads", "faults"])
    def test_for_people(self, kind: str) -> None:
        """Without --json one line each, under a heading."""
        done = invoke("list", kind)

        assert 0 == done.exit_code
        assert len(self.listed(kind)) + 1 == len(done.stdout.splitlines())

    def test_doctor_json(self) -> None:
        """One object: torch, backends, devices, contenders with reasons, privileges."""
        done = invoke("doctor", "--json")
        found = json.loads(done.stdout)

        assert 0 == done.exit_code
        assert {"torch", "backends", "gpus", "contenders", "network_namespaces"} <= found.keys()
        assert torch.__version__ == found["torch"]
        assert "gloo" in found["backends"]
        assert found["contenders"]["cold"]["available"]

    def test_doctor_for_people(self) -> None:
        """One line for every contender."""
        done = invoke("doctor")

        assert 0 == done.exit_code
        assert "contender cold: available" in done.stdout
