"""Records: written whole, read whole, without a word about the machine."""

from __future__ import annotations

import json
import platform as machine
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from harness import environment, redact
from harness.events import JsonLines, Recorder
from harness.records import Digests, Event, Resources, read_lines, write_json
from tests.unit import logs

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
