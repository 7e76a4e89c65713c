"""A job that was given an envelope does what is proven in it, and hands over everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed.distributed_c10d as c10d

from accelpact import EXIT_STATUS, Reason, _envelope
from accelpact._envelope import DISCARD, L1, Entry, Envelope, Key, Trial
from harness import compare, options, plan
from harness.launching import Forks
from harness.progress import Progress
from strategies import Platform
from tests.distributed import inflight, ranks, scripts, wrappers
from tests.distributed.inflight import Strike

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank, Result

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

DDP = ["--epochs", "2", "--timeout", "5"]
AUTO = "reconfigure" if hasattr(c10d, "_reconfigure") else "rebuild"
"""What `auto` does here."""
ROOTS = {"0": "equal"}


def write(path: Path, *entries: tuple[str, str, str], other: dict[str, str] | None = None) -> Path:
    """Write an envelope of this stack that holds (profile, phase, action) proven."""
    stack = {**_envelope.stack_of(backend="gloo", device="cpu"), **(other or {})}
    made = []
    for profile, phase, action in entries:
        trial = Trial(
            action=action,
            policy="test",
            fault="test",
            verdict="pass",
            digests=ROOTS,
            expected=ROOTS,
        )
        key = Key(platform=_envelope.title(stack), profile=profile, phase=phase)
        made.append(Entry(key=key, actions=(action,), trials=(trial,)))
    Envelope(stack=stack, entries=tuple(made)).write(path)
    return path


def matching(path: Path, step: str = AUTO) -> Path:
    return write(path, (f"ddp, eager, {step}", "boundary", L1))


def _broken(rank: Rank) -> None:
    """The 4th all-reduce fails on rank 1 before anything is sent: rank 0 waits in it."""
    if rank.number == 1:
        scripts.on_call("all_reduce", 4, scripts.fail_before)


def _script(rank: Rank, envelopes: list[str], given: list[str], **options: Any) -> dict[str, Any]:
    """Run the DDP script as `-m accelpact --envelope` with this rank's own file."""
    own = ("--envelope", envelopes[rank.number % len(envelopes)])
    return scripts.run(rank, scripts.DDP, DDP, options=(*own, *given), **options)


def run(envelopes: list[Path], events: Path, *given: str) -> list[Result]:
    return ranks.run(
        _script,
        [str(each) for each in envelopes],
        list(given),
        world_size=2,
        fault=_broken,
        events=str(events),
    )


def reasons(events: Path, results: list[Result]) -> list[str]:
    """Why the ranks ended, all of which were handed over to the launcher."""
    assert [EXIT_STATUS] * len(results) == [each.status for each in results], results
    found = []
    for rank in range(len(results)):
        assert [] == scripts.events(events, rank, "repair")
        found += [each["reason"] for each in scripts.events(events, rank, "reject")]
    return found


@pytest.fixture(scope="module")
def bare() -> list[dict[str, Any]]:
    """The script without the runtime and without a fault."""
    return ranks.values(ranks.run(scripts.run, scripts.DDP, DDP, protected=False, world_size=2))


class TestMatchingFile:
    @pytest.mark.parametrize("setting", ["auto", "rebuild"])
    def test_is_repaired(self, bare: list[dict[str, Any]], tmp_path: Path, setting: str) -> None:
        """The key is that of the step which is taken, whatever setting has led to it."""
        file = matching(tmp_path / "envelope.json", AUTO if setting == "auto" else setting)
        found = ranks.values(run([file], tmp_path / "events", "--replacement", setting))

        assert bare == found
        for rank in (0, 1):
            (asked,) = scripts.events(tmp_path / "events", rank, "admission")
            assert ("L1", "boundary", None) == (
                asked["action"],
                asked["key"]["phase"],
                asked["reason"],
            )
            assert 1 == len(scripts.events(tmp_path / "events", rank, "repair"))


def _damaged(path: Path) -> list[Path]:
    path.write_text('{"schema_version": 1, "stack": ')
    return [path]


def _missing(path: Path) -> list[Path]:
    return [path.with_name("missing.json")]


def _unknown(path: Path) -> list[Path]:
    return [write(path, ("fsdp1, eager, rebuild", "boundary", L1))]


def _other_step(path: Path) -> list[Path]:
    return [matching(path, "rebuild" if AUTO == "reconfigure" else "reconfigure")]


def _other_torch(path: Path) -> list[Path]:
    other = {"torch": "2.9.0"}
    return [write(path, (f"ddp, eager, {AUTO}", "boundary", L1), other=other)]


def _different(path: Path) -> list[Path]:
    """Both admit it; they are two files all the same."""
    profile = f"ddp, eager, {AUTO}"
    other = path.with_name("other.json")
    return [matching(path), write(other, (profile, "boundary", L1), (profile, "forward", DISCARD))]


class TestAnyOtherFile:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (_damaged, "expected JSON"),
            (_missing, "No such file"),
            (_unknown, "no trial of ddp, eager"),
            (_other_step, "no trial of ddp, eager"),
            (_other_torch, "expected torch 2.9.0, as qualified"),
            (_different, "expected one envelope on all ranks; found 2 different"),
        ],
    )
    def test_is_handed_over(self, tmp_path: Path, make: Any, reason: str) -> None:
        """Every rank ends with the status for the launcher, and the record says why."""
        found = reasons(tmp_path / "events", run(make(tmp_path / "e.json"), tmp_path / "events"))

        assert 2 == len(found)
        assert all(Reason.UNQUALIFIED.value in each for each in found), found
        assert all(reason in each for each in found), found


def _inside(rank: Rank, envelope: str, events: str) -> None:
    """A reduction fails in update 2; in update 3 the first gathering, in a forward pass."""
    wrappers.connect(rank)
    build, _ = wrappers.WRAPPERS["fsdp2"]
    strikes = [
        Strike(update=2, kind="reduce-scatter", place=0.5, rank=1),
        Strike(update=3, kind="all-gather", place=0.0, rank=2),
    ]
    inflight.protected(
        rank, build, 4, form="iterator", strikes=strikes, envelope=envelope, events=events
    )
    raise AssertionError("the second failure was not refused")


class TestInsideAnUpdate:
    def test_what_is_proven_in_one_phase_is_not_in_another(self, tmp_path: Path) -> None:
        """A failure in a backward pass is taken back, the next one in a forward pass is not."""
        file = write(tmp_path / "envelope.json", (f"fsdp2, eager, {AUTO}", "backward", DISCARD))
        results = ranks.run(_inside, str(file), str(tmp_path / "events"))

        assert [EXIT_STATUS] * 4 == [each.status for each in results], results
        rejected = []
        for rank in range(4):
            (done,) = scripts.events(tmp_path / "events", rank, "discard")
            assert (2, "backward") == (done["update"], done["phase"])
            rejected += scripts.events(tmp_path / "events", rank, "reject")
        assert 4 == len(rejected)
        assert all("no trial of fsdp2, eager" in each["reason"] for each in rejected), rejected
        assert all("forward" in each["reason"] for each in rejected), rejected


class TestComparison:
    """The contender accelpact with a file that admits nothing."""

    def test_refusal_is_expected_and_recorded(self, tmp_path: Path) -> None:
        """Verdict and reason, the digest of the file, and its path nowhere."""
        place = tmp_path / "secret-place"
        place.mkdir()
        file = write(place / "envelope.json")
        spec = options.make_spec(
            wrapper="ddp",
            mesh="2x1",
            updates=3,
            checkpoint_at=1,
            fault=["absent@boundary:2"],
            envelope=str(file),
        )
        with Forks() as forks:
            found = compare.run(
                spec,
                plan.contenders(["accelpact"]),
                platform=Platform(device="cpu", backend="gloo"),
                folder=tmp_path / "out",
                title="Refused",
                progress=Progress(),
                launch=forks,
            )
        struck = next(each for each in found.runs if each.strategy == "accelpact" and each.faulted)
        described = json.loads((tmp_path / "out" / "comparison.json").read_text())["spec"]

        assert ("rejected", "rejected") == (struck.verdict, struck.expected), struck
        assert Reason.UNQUALIFIED.value in struck.reason
        assert _envelope.read(file).digest == described["envelope"]["sha256"]
        records = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert [] == [path.name for path in records if b"secret-place" in path.read_bytes()]


@pytest.fixture(scope="module")
def qualified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file that a short `accelpact qualify` writes, and what it prints."""
    out = tmp_path_factory.mktemp("qualify") / "envelope.json"
    command = ["qualify", "--rows", "ddp", "--faults", "absent@boundary", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *command],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return out, done.stdout


class TestQualify:
    """A short one, by the command line."""

    def test_file_admits_what_was_proven(self, qualified: tuple[Path, str]) -> None:
        """A job on this stack may repair with it, in the way that it would take."""
        found = _envelope.read(qualified[0])
        stack = _envelope.stack_of(backend="gloo", device="cpu")
        for step in {"rebuild", AUTO}:
            key = Key(
                platform=_envelope.title(stack), profile=f"ddp, eager, {step}", phase="boundary"
            )
            assert found.objection(stack, key, L1) is None
            assert found.objection(stack, key, DISCARD) is not None

    def test_every_policy_was_tried(self, qualified: tuple[Path, str]) -> None:
        """Nobody recovered without one; by its own file the runtime repaired."""
        trials = [each for entry in _envelope.read(qualified[0]).entries for each in entry.trials]
        by_policy = {(each.policy, each.action, each.verdict) for each in trials}

        assert {
            ("no recovery", "none", "fail"),
            ("always L1", "L1", "pass"),
            ("always L2", "L2", "rejected"),
            ("qualified", "L1", "pass"),
        } == by_policy
        assert all(each.digests == each.expected for each in trials if each.verdict != "fail")

    def test_table_is_printed(self, qualified: tuple[Path, str]) -> None:
        assert f"| ddp, eager, {AUTO} | boundary | always L2 | L2 | 1/1 | 0 | 1 |" in qualified[1]

    def test_file_serves_a_script(self, qualified: tuple[Path, str], tmp_path: Path) -> None:
        """The whole way: trials of the harness's model admit a repair of another one."""
        ranks.values(run([qualified[0]], tmp_path / "events"))

        assert 1 == len(scripts.events(tmp_path / "events", 0, "repair"))
