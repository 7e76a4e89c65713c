"""Records: written whole, read whole, without a word about the machine; and what is planned."""

from __future__ import annotations

import importlib.metadata
import json
import platform as machine
import re
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import strategies
from harness import environment, integration, plan, redact
from harness.events import JsonLines, Recorder
from harness.records import Digests, Event, Resources, read_lines, write_json
from harness.spec import RunSpec, Schedule, Spec, SpecError
from strategies import Platform
from tests.unit import logs

CPU = Platform(device="cpu", backend="gloo")
WRITER = """
import sys
import time
from pathlib import Path
from harness.events import JsonLines
from harness.records import Event
path, rank = Path(sys.argv[1]), int(sys.argv[2])
lines = JsonLines(path)
print("ready", flush=True)
time.sleep(float(sys.stdin.readline()) - time.monotonic())
for number in range(200):
    error = str(rank) * (1 + 977 * number % 6000)
    lines.write(Event(t=0.5, event="failure", rank=rank, update=number, error=error))
    time.sleep(0.0002)
"""


class TestRecorder:
    """What a rank writes is what is read."""

    def test_round_trip(self, tmp_path: Path) -> None:
        """Events, digests and resources come back with rank, attempt and a time of one clock."""
        before = time.monotonic()
        recorder = Recorder(tmp_path, rank=2, attempt=1)
        recorder.emit("commit", update=3, tokens=128, samples=[4, 5], cursor=6)
        recorder.digests(3, "ab", {"weights/a": "cd"})
        recorder.resources(at="after", threads=3, descriptors=9, rss_bytes=1, groups=2)
        recorder.close()
        (event,) = read_lines(tmp_path / "events.jsonl", Event)
        (digests,) = read_lines(tmp_path / "digests.jsonl", Digests)
        (resources,) = read_lines(tmp_path / "resources.jsonl", Resources)

        assert before <= event.t <= resources.t <= time.monotonic()
        assert ("commit", 2, 1, 3, 128, [4, 5], 6) == (
            event.event,
            event.rank,
            event.attempt,
            event.update,
            event.tokens,
            event.samples,
            event.cursor,
        )
        assert digests == Digests(
            update=3, rank=2, attempt=1, root="ab", tensors={"weights/a": "cd"}
        )
        assert (2, 1, "after", 9) == (
            resources.rank,
            resources.attempt,
            resources.at,
            resources.descriptors,
        )

    def test_continues_where_another_left_off(self, tmp_path: Path) -> None:
        """A second attempt appends; nothing that was recorded is lost."""
        for attempt in (0, 1):
            recorder = Recorder(tmp_path, rank=0, attempt=attempt)
            recorder.emit("process")
            recorder.close()

        assert [0, 1] == [each.attempt for each in read_lines(tmp_path / "events.jsonl", Event)]

    def test_attempt_of_the_event_wins(self, tmp_path: Path) -> None:
        """The supervisor has no rank; a field that is given replaces the recorder's own."""
        recorder = Recorder(tmp_path, rank=None)
        recorder.emit("end", attempt=2, code=0)
        recorder.close()
        (event,) = read_lines(tmp_path / "events.jsonl", Event)

        assert (None, 2, 0) == (event.rank, event.attempt, event.code)

    def test_many_processes_never_mix_lines(self, tmp_path: Path) -> None:
        """4 processes that append 200 lines of up to 6 kB at the same time leave 800 whole ones."""
        path = tmp_path / "events.jsonl"
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in logs.RANKS
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        together = f"{time.monotonic() + 0.1}\n".encode()
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(together)
            writer.stdin.flush()
        for writer in writers:
            writer.communicate(timeout=60)
        codes = [writer.returncode for writer in writers]
        events = read_lines(path, Event)

        assert [0, 0, 0, 0] == codes
        assert path.read_bytes().endswith(b"\n")
        for rank in logs.RANKS:
            own = [event for event in events if event.rank == rank]
            assert list(range(200)) == [event.update for event in own]
            assert {str(rank)} == set().union(*(event.error or "" for event in own))


class TestReadLines:
    """Damage is noticed; a killed writer is none."""

    LINE = b'{"t":1.0,"event":"begin","rank":0,"update":1}\n'

    @pytest.mark.parametrize("torn", [b'{"t":2.0,"ev', b"{", b'{"t":2.0,"event":"com', b"\xc3"])
    def test_torn_last_line_is_left_out(self, tmp_path: Path, torn: bytes) -> None:
        """A writer that was killed inside its last line leaves the lines before it."""
        path = tmp_path / "events.jsonl"
        path.write_bytes(self.LINE * 2 + torn)

        assert 2 == len(read_lines(path, Event))

    @pytest.mark.parametrize(
        "damaged",
        [
            b'{"t":2.0,"ev\n',
            b'{"t":2.0,"event":"lunch"}\n',
            b'{"t":2.0,"event":"begin","upadte":1}\n',
            b'{"event":"begin"}\n',
            b'{"t":2.0,"event":"begin","error":"\xff"}\n',
        ],
    )
    @pytest.mark.parametrize("following", [0, 1])
    def test_damaged_line_is_refused(self, tmp_path: Path, damaged: bytes, following: int) -> None:
        """A line that was ended and is no record is refused, with file and line."""
        path = tmp_path / "events.jsonl"
        path.write_bytes(self.LINE * 2 + damaged + self.LINE * following)

        with pytest.raises(
            ValueError, match=r"^[^/]+/events\.jsonl, line 3: expected a Event record; .+$"
        ):
            read_lines(path, Event)

    def test_no_file_is_no_records(self, tmp_path: Path) -> None:
        """A run that never started has none."""
        assert [] == read_lines(tmp_path / "events.jsonl", Event)

    def test_json_is_written_in_one_step(self, tmp_path: Path) -> None:
        """A record that cannot be encoded leaves the old file and nothing else."""
        path = tmp_path / "summary.json"
        write_json(path, {"a": 1})
        with pytest.raises(TypeError):
            write_json(path, {"a": object()})

        assert b'{\n "a": 1\n}\n' == path.read_bytes()
        assert [path] == list(tmp_path.iterdir())


class TestRedact:
    """Records say nothing about where they were made."""

    def test_paths_are_replaced(self, tmp_path: Path) -> None:
        """Home, environment, packages and the folder itself become what they are to a reader."""
        text = (
            f"{tmp_path}/rank0.log {Path.home()}/notes {sys.prefix}/bin/python "
            f"{Path(redact.__file__).parent}/train.py {tempfile.gettempdir()}/x"
        )
        names = ["rank0.log", "launcher.log", "run.json", "events.jsonl"]
        for name in names:
            (tmp_path / name).write_text(json.dumps({"error": text}))
        redact.redact(tmp_path)
        cleaned = [(tmp_path / name).read_text() for name in names]

        assert 1 == len(set(cleaned))
        for private in (str(tmp_path), str(Path.home()) + "/", sys.prefix, str(Path.cwd())):
            assert private not in cleaned[0]
        assert "<run>/rank0.log" in cleaned[0]
        assert re.search(r"<(project|cwd|packages)>/harness/train\.py", cleaned[0])

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A path below home keeps only what is below it."""
        monkeypatch.setenv("HOME", "/people/ada")
        (tmp_path / "rank0.log").write_text("loaded /people/ada/corpus.txt\n")
        redact.redact(tmp_path)

        assert "loaded <home>/corpus.txt\n" == (tmp_path / "rank0.log").read_text()

    def test_host(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The machine's name goes wherever it stands as a word."""
        monkeypatch.setattr(socket, "gethostname", lambda: "lovelace")
        (tmp_path / "rank0.log").write_text("[lovelace]: lovelace:29500 refused\n")
        redact.redact(tmp_path)

        assert "[<host>]: <host>:29500 refused\n" == (tmp_path / "rank0.log").read_text()

    @pytest.mark.parametrize("host", ["beef", "main", "rank", "begin", "ab", ""])
    def test_host_with_a_common_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
    ) -> None:
        """A name that is part of a word, a digest, a field or a value leaves them as they are."""
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        records = [Digests(update=1, rank=0, attempt=0, root="00beef11", tensors={"domain": "ab"})]
        logs.write_lines(tmp_path / "digests.jsonl", records)
        events = [Event(t=1.0, event="begin", rank=0, update=1)]
        logs.write_lines(tmp_path / "events.jsonl", events)
        (tmp_path / "rank0.log").write_text("remaining ranks: rank0\n")
        redact.redact(tmp_path)

        assert records == read_lines(tmp_path / "digests.jsonl", Digests)
        assert events == read_lines(tmp_path / "events.jsonl", Event)
        assert "remaining ranks: rank0\n" == (tmp_path / "rank0.log").read_text()

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        """Output that is not UTF-8 is redacted all the same."""
        path = tmp_path / "rank0.log"
        path.write_bytes(b"\xff " + str(tmp_path).encode())
        redact.redact(tmp_path)

        assert "\\xff <run>" == path.read_text()

    def test_environment_names_nobody(self) -> None:
        """What a report says about the machine holds neither its name nor a path."""
        found = json.dumps(environment.describe(device="cpu", backend="gloo"))

        assert machine.node() not in found
        assert str(Path.home()) + "/" not in found
        assert sys.prefix not in found
        assert str(Path(environment.__file__).parent) not in found

    def test_missing_package_has_no_version(self) -> None:
        """What is not installed is None, not an error."""
        assert environment.version("a-package-that-nobody-has") is None


class TestIntegration:
    """Lines that a contender needs in a training script."""

    def test_counts_code_between_markers(self) -> None:
        """Blank lines, comments and what is outside do not count."""
        source = """
        before = 1
        # integration: begin
        first = 1

        # a comment
        second = 2
        # integration: end
        between = 3
            # integration: begin
            third = 3
            # integration: end
        """

        assert 3 == integration.count_lines(source)

    def test_nothing_needed(self) -> None:
        """No markers mean no answer; markers around nothing mean no lines."""
        assert integration.count_lines("a = 1\n") is None
        assert 0 == integration.count_lines("# integration: begin\n# integration: end\n")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("# integration: begin\na = 1\n", "expected '# integration: end' before the end"),
            ("a = 1\n# integration: end\n", "line 2: expected the other marker; found"),
            ("# integration: begin\n# integration: begin\n", "line 2: expected the other marker"),
        ],
    )
    def test_unbalanced_markers(self, source: str, message: str) -> None:
        """A marker without its counterpart is an error that names the line."""
        with pytest.raises(ValueError, match=message):
            integration.count_lines(source)

    def test_own_contenders(self) -> None:
        """Every contender that recovers says what it needs; the reference needs nothing."""
        found = {
            name: integration.integration_lines(strategies.find(name))
            for name in ("reference", "cold", "nvrx", "torchft_pg", "accelpact")
        }

        assert found.pop("reference") is None
        assert all(lines for lines in found.values())


def without_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `package` look as if it were not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return "1.0" if name in ("torchft", "nvidia-resiliency-ext") else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def with_entry_points(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Make other packages offer contenders."""
    real, group = importlib.metadata.entry_points, "accelpact.strategies"
    found = [EntryPoint(name=name, value=value, group=group) for name, value in points]

    def entry_points(**wanted: str) -> Any:
        return found if wanted == {"group": group} else real(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


class TestContenders:
    """Who takes part."""

    @pytest.mark.parametrize(
        ("package", "names"),
        [("torchft", {"torchft_pg", "torchft_manager"}), ("nvidia-resiliency-ext", {"nvrx"})],
    )
    def test_missing_package(
        self, monkeypatch: pytest.MonkeyPatch, package: str, names: set[str]
    ) -> None:
        """A contender whose package is missing says so, and the rest is planned."""
        before, unable_before = plan.availability(plan.contenders(()), CPU)
        without_package(monkeypatch, package)
        able, unable = plan.availability(plan.contenders(()), CPU)
        planned = plan.block_runs(Spec(), able, block=0, backend="gloo")
        reasons = {entry.label: answer.reason for entry, answer in unable}

        assert {f"package {package} is not installed"} == {reasons.pop(name) for name in names}
        assert {entry.label: answer.reason for entry, answer in unable_before} == reasons
        assert {entry.label for entry in before} - names == {
            run.strategy for run in planned if run.faulted
        }

    def test_all_by_default(self) -> None:
        """Without names everybody takes part; the reference is no contender."""
        own = ["cold", "nvrx", "torchft_pg", "torchft_manager"]
        own += ["c10d_reconfigure", "accelpact", "comm_only"]

        assert own == [entry.label for entry in plan.contenders(())]

    def test_as_given(self) -> None:
        """Named contenders take part in the order of their names' mention."""
        found = plan.contenders(("accelpact", "reference", "cold"))

        assert ["accelpact", "cold"] == [entry.label for entry in found]

    def test_unknown(self) -> None:
        """An unknown name is refused with the nearest one."""
        with pytest.raises(SpecError, match=r"^strategies: .*did you mean 'accelpact'\?$"):
            plan.contenders(("cold", "acelpact"))

    def test_twice(self) -> None:
        """A contender cannot be set against itself by mistake."""
        with pytest.raises(SpecError, match="strategies: expected each once; found cold, cold"):
            plan.contenders(("cold", "cold"))

    def test_of_another_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An entry point adds a contender after our own, and it is found by its name."""
        with_entry_points(monkeypatch, ("dummy", "tests.unit.logs:Dummy"))
        able, unable = plan.availability(plan.contenders(("cold", "dummy")), CPU)

        assert "dummy" == strategies.names()[-1]
        assert "gives up" == strategies.find("dummy").summary
        assert ["cold"] == [entry.label for entry in able]
        assert "package a-package-that-nobody-has is not installed" == unable[0][1].reason

    def test_our_own_names_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another package cannot replace one of our contenders."""
        with_entry_points(monkeypatch, ("cold", "tests.unit.logs:Dummy"))

        assert 1 == strategies.names().count("cold")
        assert "cold" == strategies.find("cold").name

    def test_find_unknown(self) -> None:
        """What nobody offers is a KeyError."""
        with pytest.raises(KeyError, match="nobody"):
            strategies.find("nobody")

    @pytest.mark.parametrize("name", ["cold", "nvrx", "torchft_pg", "accelpact", "comm_only"])
    def test_unknown_variant(self, name: str) -> None:
        """A variant that was never tried is refused with those that were."""
        with pytest.raises(ValueError, match=f"variant: {name} has .*found 'best'"):
            strategies.find(name)(variant="best")

    def test_variants(self) -> None:
        """For tuning a contender appears once per variant, each under a name of its own."""
        entries = plan.variants("cold")

        assert list(strategies.find("cold").variants) == [each.strategy.variant for each in entries]
        assert ["cold-0", "cold-1", "cold-2"] == [each.label for each in entries]


class TestBlock:
    """Which runs a block consists of, and in which order."""

    @staticmethod
    def runs(*, seed: int = 1, block: int = 0, **changes: Any) -> list[RunSpec]:
        entries = plan.contenders(("cold", "accelpact", "comm_only"))
        return plan.block_runs(Spec(seed=seed, **changes), entries, block=block, backend="gloo")

    def test_consists_of(self) -> None:
        """Two references, and every contender with the fault and without."""
        found = self.runs(block=2)

        assert {
            "2-reference": (False, False, "pass"),
            "2-reference-control": (False, True, "pass"),
            "2-cold": (True, False, "pass"),
            "2-cold-fault-free": (False, False, "pass"),
            "2-accelpact": (True, False, "pass"),
            "2-accelpact-fault-free": (False, False, "pass"),
            "2-comm_only": (True, False, "fail"),
            "2-comm_only-fault-free": (False, False, "pass"),
        } == {run.name: (run.faulted, run.control, run.expected) for run in found}
        assert list(range(8)) == [run.order for run in found]
        assert {2} == {run.block for run in found}

    def test_same_seed_same_order(self) -> None:
        """Order depends on seed and block alone."""
        assert self.runs() == self.runs()

    def test_shuffled_between_blocks_and_seeds(self) -> None:
        """No contender always runs first, or always after the same other."""
        orders = {
            tuple(run.name.partition("-")[2] for run in self.runs(seed=seed, block=block))
            for seed in (1, 2)
            for block in range(4)
        }

        assert 8 == len(orders)

    def test_without_faults(self) -> None:
        """A schedule without faults has fault-free runs alone."""
        schedule = Schedule(updates=4, checkpoint_at=2, faults=())

        assert not any(run.faulted for run in self.runs(schedule=schedule))

    def test_variants_skip_fault_free_runs(self) -> None:
        """Tuning runs every variant with the fault alone."""
        found = plan.block_runs(Spec(), plan.variants("cold"), block=0, backend="gloo")

        assert {"0-reference", "0-reference-control", "0-cold-0", "0-cold-1", "0-cold-2"} == {
            run.name for run in found
        }

    def test_settings_follow_the_timeouts(self) -> None:
        """What a run records is what its contender asked for."""
        (cold,) = [run for run in self.runs() if run.name == "0-cold"]

        assert 1 == cold.settings["max_restarts"]
        assert 3.0 == cold.settings["group_timeout"]

    def test_run_json_round_trip(self, tmp_path: Path) -> None:
        """Ranks read exactly what was planned."""
        planned = self.runs()[0]
        write_json(tmp_path / "run.json", planned)
        found = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunSpec)
        settings = {**found.settings, "notes": tuple(found.settings["notes"])}

        assert planned == logs.planned(found, settings=settings)

    def test_division(self) -> None:
        """Runs are compared only if workload, wrapper, mesh, backend, device and dtype agree."""
        run = logs.run_spec()

        assert "tiny/fsdp1/2x2/gloo-cpu/float32" == run.division
        assert "tiny/fsdp1/2x2/gloo-cpu/float32+ac" == (
            logs.planned(run, spec=Spec(activation_checkpointing=True)).division
        )


class TestJsonLines:
    """One file, many writers."""

    def test_a_record_is_there_at_once(self, tmp_path: Path) -> None:
        """A rank that is killed loses nothing that it has written."""
        path = tmp_path / "events.jsonl"
        lines = JsonLines(path)
        lines.write(Event(t=1.0, event="begin", rank=0, update=1))

        assert 1 == len(read_lines(path, Event))
        lines.close()

    def test_close_gives_the_descriptor_back(self, tmp_path: Path) -> None:
        """Recorders that are closed leave no descriptor open."""
        held = psutil.Process().num_fds()
        for _ in range(5):
            Recorder(tmp_path, rank=0).close()

        assert held == psutil.Process().num_fds()
