"""Bad input: one line that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import options
from harness.spec import PRESETS, Fault, Mesh, Schedule, Spec, SpecError, choose
from strategies import Timeouts


def refusal(**given: Any) -> str:
    """The one line with which these options are refused."""
    with pytest.raises(SpecError) as refused:
        options.make_spec(**given)
    text = str(refused.value)

    assert 1 == len(text.splitlines())
    return text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mesh": "2"}, "mesh: expected RxS, for example 2x2; found '2'"),
    ({"mesh": "2x2x2"}, "mesh: expected RxS"),
    ({"mesh": "axb"}, "mesh: expected RxS"),
    ({"mesh": "-2x2"}, "mesh: expected RxS"),
    ({"mesh": "2x2\n"}, "mesh: expected RxS"),
    ({"mesh": ""}, "mesh: expected RxS"),
    ({"mesh": "1x4"}, "mesh: expected at least 2 replicas and 1 shard, as in 2x2; found 1x4"),
    ({"mesh": "2x0"}, "mesh: expected at least 2 replicas and 1 shard, as in 2x2; found 2x0"),
    ({"mesh": "4x1"}, "mesh: expected at least 2 shards for fsdp1; found 4x1"),
    ({"mesh": "4x1", "wrapper": "fsdp2"}, "mesh: expected at least 2 shards for fsdp2; found 4x1"),
    ({"mesh": "2x2", "wrapper": "ddp"}, "mesh: expected 1 shard for ddp; found 2x2; use 4x1"),
    ({"checkpoint_at": 9}, "checkpoint-at: expected at most 8, the last before absent@boundary:8"),
    ({"checkpoint_mode": "thread"}, "checkpoint-mode: expected one of async-cached, async-process"),
    ({"checkpoint_mode": "sync,"}, "checkpoint-mode: expected one of async-cached, async-process"),
    ({"checkpoint_every": 0}, "checkpoint-every: expected at least 1; found 0"),
    ({"checkpoint_at": 0}, "checkpoint-at: expected an update from 1 to 12; found 0"),
    ({"checkpoint_at": -1}, "checkpoint-at: expected an update from 1 to 12; found -1"),
    ({"checkpoint_at": 13}, "checkpoint-at: expected an update from 1 to 12; found 13"),
    ({"fault": ["absent@boundary:12"]}, "fault: expected an update from 1 to 11, so that one"),
    ({"fault": ["absent@boundary:40"]}, "fault: expected an update from 1 to 11, so that one"),
    ({"fault": ["absent@boundary:0"]}, "fault: expected an update from 1 to 11, so that one"),
    ({"fault": ["absent@backward:1"]}, "fault: expected an update from 2 to 12, so that one is"),
    ({"fault": ["absent@forward:13"]}, "fault: expected an update from 2 to 12, so that one is"),
    ({"fault": ["absent@forward:4"]}, "checkpoint-at: expected at most 3, the last before"),
    (
        {"fault": ["absent@boundary:8", "absent@forward:9"]},
        "fault: expected at most one per update; found two after 8",
    ),
    ({"fault": ["absent@boundary:2"]}, "checkpoint-at: expected at most 2, the last before"),
    ({"fault": ["absent@boundary:8"] * 2}, "fault: expected at most one per update; found two"),
    ({"fault": ["absent"]}, "fault: expected KIND@PHASE:UPDATE, for example absent@boundary:15"),
    ({"fault": ["absent@boundary:-3"]}, "fault: expected KIND@PHASE:UPDATE"),
    ({"fault": [""]}, "fault: expected KIND@PHASE:UPDATE"),
    ({"updates": 6}, "fault: expected an update from 1 to 5, so that one follows; found absent@b"),
    ({"updates": 1}, "updates: expected at least 2; found 1"),
    ({"updates": 0}, "updates: expected at least 2; found 0"),
    ({"updates": -1}, "updates: expected at least 2; found -1"),
    ({"blocks": 0}, "blocks: expected at least 1; found 0"),
    ({"blocks": -1}, "blocks: expected at least 1; found -1"),
    ({"seed": -1}, "seed: expected"),
    ({"seed": 2**64}, "seed: expected"),
]
TIMES: list[tuple[dict[str, float], str]] = [
    ({"group_timeout": 10.0}, "group-timeout: expected group < soft < hard < barrier, so less"),
    ({"soft_timeout": 20.0}, "soft-timeout: expected group < soft < hard < barrier, so less"),
    ({"hard_timeout": 31.0}, "hard-timeout: expected group < soft < hard < barrier, so less"),
    ({"barrier_timeout": 20.0}, "hard-timeout: expected group < soft < hard < barrier, so less"),
]
NAMES: list[tuple[dict[str, Any], str, str]] = [
    ({"preset": "papr"}, "preset", "paper"),
    ({"workload": "mistal-7b"}, "workload", "mistral-7b"),
    ({"wrapper": "fsdp_2"}, "wrapper", "fsdp2"),
    ({"device": "cud"}, "device", "cuda"),
    ({"dtype": "bfloat"}, "dtype", "bfloat16"),
    ({"fault": ["absnt@boundary:8"]}, "fault kind", "absent"),
    ({"fault": ["absent@boundry:8"]}, "fault phase of absent", "boundary"),
]


class TestOptions:
    """What the options make, and what they refuse."""

    @pytest.mark.parametrize(("given", "message"), BAD)
    def test_bad_value(self, given: dict[str, Any], message: str) -> None:
        """The line begins with the field and says what was expected and found."""
        assert refusal(**given).startswith(message)

    @pytest.mark.parametrize(("given", "message"), TIMES)
    def test_timeouts_that_cannot_nest(self, given: dict[str, float], message: str) -> None:
        """Group < in-process soft < hard < barrier, each strictly."""
        assert refusal(**given).startswith(message)

    @pytest.mark.parametrize("name", ["group", "soft", "hard", "barrier"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e300])
    def test_timeouts_that_are_none(self, name: str, value: float) -> None:
        """What is not a number, not positive or longer than any run is refused by name."""
        found = refusal(**{f"{name}_timeout": value})

        assert found.startswith(f"{name}-timeout: expected more than 0 s and at most")
        assert found.endswith(f"found {value:g} s")

    def test_world_timeout(self) -> None:
        """Healthy ranks must outlast a detection."""
        with pytest.raises(SpecError, match=r"^world-timeout: expected more than group-timeout"):
            Spec(timeouts=Timeouts(group=3.0, world=3.0))

    @pytest.mark.parametrize(("given", "field", "nearest"), NAMES)
    def test_unknown_name(self, given: dict[str, Any], field: str, nearest: str) -> None:
        """The nearest known name is offered."""
        found = refusal(**given)

        assert found.startswith(f"{field}: expected one of ")
        assert found.endswith(f"; did you mean {nearest!r}?")

    @pytest.mark.parametrize(("wrapper", "mesh"), [("fsdp1", "2x2"), ("ddp", "4x1")])
    def test_mesh_is_the_wrappers_by_default(self, wrapper: str, mesh: str) -> None:
        """Without a shard dimension all four ranks are replicas."""
        assert mesh == str(options.make_spec(wrapper=wrapper).mesh)

    def test_nothing_near(self) -> None:
        """A name like no other is offered none."""
        assert refusal(workload="zzzzzz").endswith("found 'zzzzzz'")

    def test_name_with_a_line_break(self) -> None:
        """Whatever a name holds, the message stays one line."""
        assert "'a\\nb'" in refusal(workload="a\nb")

    def test_defaults(self) -> None:
        """Without options: quick, tiny, 2x2, CPU."""
        found = options.make_spec()

        assert Spec() == found
        assert (12, 4, "absent@boundary:8") == (
            found.schedule.updates,
            found.schedule.checkpoint_at,
            str(found.schedule.faults[0]),
        )

    def test_paper(self) -> None:
        """25 updates, checkpoint at 10, fault after 15."""
        assert Schedule(
            updates=25,
            checkpoint_at=10,
            faults=(Fault(kind="absent", phase="boundary", update=15),),
        ) == PRESETS["paper"]  # fmt: skip

    def test_taken_as_given(self, tmp_path: Path) -> None:
        """Every option ends up in its field; the workload gives what was left open."""
        data = tmp_path / "text.txt"
        data.write_text("some text " * 1000)
        found = options.make_spec(
            mesh="3x2",
            updates=9,
            checkpoint_at=2,
            fault=["absent@boundary:2", "absent@boundary:5"],
            seed=7,
            data=str(data),
            blocks=6,
            group_timeout=1.5,
            workload="decoder-32l",
        )

        assert (Mesh(replicate=3, shard=2), 6) == (found.mesh, found.mesh.world_size)
        assert ["absent@boundary:2", "absent@boundary:5"] == [str(f) for f in found.schedule.faults]
        assert (7, 6, 1.5, str(data)) == (
            found.seed,
            found.blocks,
            found.timeouts.group,
            found.data,
        )
        assert ("bfloat16", True) == (
            options.make_spec(workload="mistral-7b").dtype,
            options.make_spec(workload="mistral-7b").activation_checkpointing,
        )

    def test_checkpoint_at_the_fault(self) -> None:
        """A checkpoint of the very update of the fault can be restored."""
        assert 8 == options.make_spec(checkpoint_at=8).schedule.checkpoint_at


class TestData:
    """What `--data` may name."""

    def test_missing(self, tmp_path: Path) -> None:
        """A path with nothing there."""
        assert refusal(data=str(tmp_path / "no")).startswith("data: expected a text file or a")

    def test_empty(self, tmp_path: Path) -> None:
        """A file with nothing in it."""
        (tmp_path / "text").touch()

        assert "data: expected text; found an empty file" in refusal(data=str(tmp_path / "text"))

    def test_empty_folder(self, tmp_path: Path) -> None:
        """A folder with nothing in it."""
        assert "found a folder without text" in refusal(data=str(tmp_path))

    def test_not_utf8(self, tmp_path: Path) -> None:
        """Bytes that are no text, with the place of the first."""
        (tmp_path / "text").write_bytes(b"good " * 1000 + b"\xff")

        assert refusal(data=str(tmp_path / "text")).startswith(
            "data: expected UTF-8 text; found an invalid byte at offset 5000 of text"
        )

    @pytest.mark.parametrize(("size", "mesh"), [(256, "2x2"), (384, "3x2")])
    def test_too_small(self, tmp_path: Path, size: int, mesh: str) -> None:
        """One byte less than one microbatch per rank is too little, one more is enough."""
        path = tmp_path / "text"
        path.write_text("x" * size)

        assert refusal(data=str(path), mesh=mesh).startswith(
            f"data: expected at least {size + 1} bytes"
        )
        path.write_text("x" * (size + 1))
        assert str(path) == options.make_spec(data=str(path), mesh=mesh).data


class TestOutputFolder:
    """Where records may go."""

    def test_holds_something(self, tmp_path: Path) -> None:
        """Nothing that lies there is ever mixed with records."""
        (tmp_path / "notes").touch()

        with pytest.raises(SpecError, match=r"^out: .* found a folder that is not empty"):
            options.output_folder(tmp_path, "x")

    def test_is_a_file(self, tmp_path: Path) -> None:
        """A file is no folder."""
        (tmp_path / "out").touch()

        with pytest.raises(SpecError, match=r"^out: expected a new or empty folder; found a file"):
            options.output_folder(tmp_path / "out", "x")

    def test_below_a_file(self, tmp_path: Path) -> None:
        """Nothing can be made below a file, however deep."""
        (tmp_path / "file").touch()

        with pytest.raises(SpecError, match=r"^out: expected a new or empty folder; found a file"):
            options.output_folder(tmp_path / "file" / "a" / "b", "x")

    def test_new_or_empty(self, tmp_path: Path) -> None:
        """A new folder, also below new ones, and an empty one are taken, and not yet made."""
        new = tmp_path / "a" / "b"

        assert tmp_path == options.output_folder(tmp_path, "x")
        assert new == options.output_folder(new, "x")
        assert not new.parent.exists()

    def test_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a name a new folder in reports/ with date and stem."""
        monkeypatch.chdir(tmp_path)
        found = options.output_folder(None, "quick-tiny-cpu")

        assert "reports" == found.parent.name
        assert found.name.endswith("-quick-tiny-cpu")


class TestChoose:
    """Names out of a list."""

    def test_known(self) -> None:
        """A known name is itself."""
        assert "cpu" == choose("device", "cpu", ("cpu", "cuda"))

    def test_lists_all(self) -> None:
        """The message has every name there is."""
        with pytest.raises(SpecError, match=r"^device: expected one of cpu, cuda; found 'tpu'"):
            choose("device", "tpu", ("cuda", "cpu"))
