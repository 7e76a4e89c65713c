"""A workload of the user's own: what is refused, by which line, and what is found."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harness
from harness import options
from harness.faults.inside import _named
from harness.spec import Own, SpecError
from harness.workload import chosen, own, preflight
from harness.workload.checks import fingerprint
from harness.workload.memory import Measured, needed

EXAMPLE = Path(__file__).parents[2] / "examples" / "workload" / "vit.py"

SOURCE = """
import random
import torch
from torch import nn
from harness.workload import Given, Training
COUNT = [0]
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), Block()
        self.register_buffer("scale", torch.ones(1))
    def forward(self, x):
        return self.last(self.first(x)) * self.scale
class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((4,), float(index))
def build(given):
    COUNT[0] += 1
    model, data = Model(), Data()
    optimizer = torch.optim.AdamW
    loss = lambda model, batch: model(batch).square().mean()
    more = dict(blocks=(Block,))
    # here
    return Training(model=model, optimizer=optimizer, data=data, loss=loss, **more)
"""


def inspected(tmp_path: Path, here: str = "", *, source: str = "", **spec: Any) -> dict[str, Any]:
    """Try a workload into whose function a line was put, in this process."""
    path = tmp_path / "mine.py"
    path.write_text(source or SOURCE.replace("# here", here))
    return preflight.inspect(options.make_spec(workload=str(path), **spec))


def refusal(tmp_path: Path, *arguments: str, **more: Any) -> str:
    """The line by which it is refused."""
    with pytest.raises(SpecError) as raised:
        inspected(tmp_path, *arguments, **more)
    line = str(raised.value)
    assert "\n" not in line
    return line


WRONG = [
    ("return 3", "workload: expected mine.py:build to return a harness.workload.Training; found i"),
    ("1 / 0", "workload: expected build in mine.py to succeed; found ZeroDivisionError in line 3"),
    ("more['blocks'] = (3,)", "workload: blocks: expected a tuple of module classes or a functio"),
    ("more['blocks'] = (nn.GRU,)", "workload: blocks: expected submodules of these classes in th"),
    ("more['microbatch'] = 0", "workload: microbatch: expected a whole number of at least 1; fou"),
    ("more['microbatch'] = 17", "workload: data: expected at least 68 samples, one microbatch of"),
    ("more['accumulation'] = True", "workload: accumulation: expected a whole number of at least"),
    ("more['clip_norm'] = 0.0", "workload: clip_norm: expected a number above 0 or None; found 0"),
    ("more['tokens'] = 1.5", "workload: tokens: expected a whole number of at least 1 or None; "),
    ("model = 'a model'", "workload: model: expected a torch.nn.Module; found a str"),
    ("model = nn.Identity()", "workload: model: expected parameters that require gradients; fou"),
    ("model.requires_grad_(False)", "workload: model: expected parameters that require gradients"),
    ("model.to('meta')", "workload: initialize: expected a function, since first.inner.weight is"),
    (
        "model.to('meta'); more['initialize'] = lambda module: None",
        "workload: initialize: expected it to give every parameter and buffer storage; found firs",
    ),
    ("model.last.inner.weight = model.first.inner.weight", "workload: blocks: expected every para"),
    ("model.odd = nn.Parameter(torch.tensor(1.0))", "workload: model: expected parameters with a "),
    ("data = 3", "workload: data: expected a map-style dataset, with len and [i]; found 3"),
    ("data = [torch.ones(4)] * 3", "workload: data: expected at least 4 samples, one microbatch "),
    ("data = [torch.ones(3)] * 64", "workload: expected the loss of a batch of mine.py:build to s"),
    ("data = [object()] * 64", "workload: expected making a batch of samples of mine.py:build to"),
    (
        "Data.__getitem__ = lambda self, i: torch.full((4,), random.random())",
        "workload: expected the same from the same seed every time and on every rank; found sampl",
    ),
    ("optimizer = None", "workload: optimizer: expected a function of the parameters; found None"),
    ("optimizer = lambda parameters: 3", "workload: optimizer: expected the function to return a"),
    (
        "optimizer = lambda parameters: torch.optim.SGD([nn.Parameter(torch.ones(2))])",
        "workload: optimizer: expected the parameters that the function is called with; found 1 o",
    ),
    ("loss = lambda model, batch: 3.0", "workload: loss: expected a finite floating-point scalar"),
    ("loss = lambda model, batch: model(batch)", "workload: loss: expected a finite floating-poi"),
    ("loss = lambda model, batch: model(batch).sum() * torch.inf", "workload: loss: expected a "),
    ("loss = lambda model, batch: batch.sum()", "workload: loss: expected a finite floating-poin"),
    (
        "model.scale.fill_(COUNT[0])",
        "workload: expected the same from the same seed every time and on every rank; found buffe",
    ),
    (
        "loss = lambda model, batch, count=COUNT[0]: model(batch).square().mean() * count",
        "workload: expected the same from the same seed every time and on every rank; found param",
    ),
]


class TestRefused:
    """Each in one line, before any rank is started."""

    @pytest.mark.parametrize(("line", "expected"), WRONG, ids=[line[:40] for line, _ in WRONG])
    def test_wrong_build(self, tmp_path: Path, line: str, expected: str) -> None:
        """The line names what was expected of the workload and what was found."""
        assert refusal(tmp_path, line).startswith(expected)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("def build(given:\n", "importing mine.py to succeed; found SyntaxError in line 1: "),
            ("import nowhere_at_all", "importing mine.py to succeed; found ModuleNotFoundError in"),
            ("raise SystemExit(3)", "importing mine.py to succeed; found SystemExit in line 1: 3"),
            ("built = 3", "a function build(given) in mine.py; found none"),
            ("def buidl(given): ...", "build(given) in mine.py; found none; did you mean 'buidl'"),
        ],
    )
    def test_wrong_file(self, tmp_path: Path, source: str, expected: str) -> None:
        """Python that is none, or has not the function."""
        assert expected in refusal(tmp_path, source=source)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("gone.py:build", "workload: expected a Python file; found nothing at gone.py"),
            ("gone.py", "workload: expected a Python file; found nothing at gone.py"),
            ("folder.py:build", "workload: expected a Python file; found a folder at folder.py"),
            ("mine.txt:build", "workload: expected a built-in one, or FILE.py:FUNCTION, for exam"),
            ("mine.py:a b", "workload: expected a built-in one, or FILE.py:FUNCTION, for example"),
            ("tinny", "workload: expected one of decoder-1.2b, decoder-32l, mistral-7b, tiny; fo"),
        ],
    )
    def test_wrong_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
    ) -> None:
        """What names no file that there is."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder.py").mkdir()
        with pytest.raises(SpecError) as raised:
            options.make_spec(workload=text)

        assert str(raised.value).startswith(expected)

    def test_text_for_it(self, tmp_path: Path) -> None:
        """`--data` is for the built-in workloads."""
        assert refusal(tmp_path, data="some.txt").startswith("data: expected none, since mine.py")

    def test_unused_parameter(self, tmp_path: Path) -> None:
        """DDP would wait for its gradient; FSDP does not."""
        line = "model.extra = nn.Linear(2, 2)"

        assert inspected(tmp_path, line)["found"]["units"] == 3
        assert "extra.weight does not" in refusal(tmp_path, line, wrapper="ddp")

    def test_nowhere_to_strike(self, tmp_path: Path) -> None:
        """A fault inside an update needs a module at which it can halt; one at a boundary not."""
        line = "loss = lambda model, batch: model(batch).sum() + model(batch).sum()"
        found = refusal(tmp_path, line, fault=["absent@forward:8"])

        assert found.startswith("fault: expected one at a boundary")
        assert inspected(tmp_path, line)["found"]["halts_at"] is None

    def test_changed_since(self, tmp_path: Path) -> None:
        """A rank builds nothing from a file that is not the one recorded."""
        path = tmp_path / "mine.py"
        path.write_text(SOURCE)
        spec = options.make_spec(workload=str(path))
        path.write_text(SOURCE + "\n")
        with pytest.raises(SpecError, match=r"mine\.py as it was when the comparison began"):
            chosen.maker(spec)

    def test_blocks_are_recomputed(self, tmp_path: Path) -> None:
        """Without blocks there is no activation checkpointing."""
        line = "more['blocks'] = ()"

        assert "expected blocks" in refusal(tmp_path, line, activation_checkpointing=True)


class TestFound:
    """What trying it shows."""

    def test_example(self) -> None:
        """Counts, units and the place of a fault of the guide's example; in samples."""
        found = preflight.inspect(options.make_spec(workload=f"{EXAMPLE}:build"))["found"]

        assert ("ViT", "AdamW", 5, 4) == tuple(
            found[key] for key in ("class", "optimizer", "units", "microbatch")
        )
        assert (None, "samples") == (found["tokens"], found["unit"])
        assert found["halts_at"].startswith("layers.layers.")

    def test_random_augmentation_from_torchs_generator(self, tmp_path: Path) -> None:
        """Recovery restores that generator, so that the same state gives the same sample."""
        line = "Data.__getitem__ = lambda self, i: torch.rand(4)"

        assert 192 // 4 == inspected(tmp_path, line)["found"]["data"]["hashed"]

    def test_imported_neighbours_are_recorded(self, tmp_path: Path) -> None:
        """The digest of one file does not say what was run if it imports another."""
        (tmp_path / "neighbour_of_mine.py").write_text("value = 1\n")
        found = inspected(tmp_path, "import neighbour_of_mine")["found"]

        assert ["neighbour_of_mine.py"] == list(found["beside"])

    def test_leaves_no_compiled_file(self, tmp_path: Path) -> None:
        """Nothing appears beside the user's file."""
        inspected(tmp_path)

        assert ["mine.py"] == [path.name for path in tmp_path.iterdir()]

    def test_meta_model(self, tmp_path: Path) -> None:
        """A model without storage is given its values one submodule at a time."""
        line = (
            "model.to('meta'); more['initialize'] = lambda module: (module.to_empty(device="
            "given.device, recurse=False), [each.data.fill_(0.5) for each in [*module.parameters("
            "recurse=False), *module.buffers(recurse=False)]])"
        )

        assert 40 == inspected(tmp_path, line)["found"]["parameters"]

    def test_memory(self) -> None:
        """Shards divide weights and optimizer state, and whole gradients stay whole."""
        each = {"parameters": 8_000, "trained": 8_000, "optimizer": 16_000, "unit": 1_000}
        seen = functools.partial(Measured, **each, root=500, data=70, activations=30)
        base = 2 * needed(seen(accumulates=True), ranks=2, shards=2)

        assert needed(seen(accumulates=True), ranks=4, shards=2) == base
        assert 4 * 4_000 == base - needed(seen(accumulates=False), ranks=4, shards=2)
        assert needed(seen(accumulates=False), ranks=4, shards=1) > base

    def test_module_is_found_in_its_wrapper(self) -> None:
        """The innermost of those with the name that the bare model gives it."""
        inner = nn.Linear(1, 1)
        outer = nn.ModuleDict({"_fsdp_wrapped_module": nn.ModuleDict({"head": nn.ModuleDict(
            {"_fsdp_wrapped_module": inner})})})  # fmt: skip

        assert _named(outer, "head") is inner

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
            ((torch.ones(2), 1), (torch.ones(2), 2)),
            ({"a": 1}, {"b": 1}),
            ([1, 2], (1, 2)),
        ],
    )
    def test_fingerprints_differ(self, one: object, other: object) -> None:
        """Type, order, names and bits count."""
        assert fingerprint(one) == fingerprint(one)
        assert fingerprint(one) != fingerprint(other)


class TestProcesses:
    """In processes of its own, as the command line does it."""

    def test_examined(self) -> None:
        """The specification comes back with what was found; the machine would do."""
        spec = options.check_machine(
            options.make_spec(workload=f"{EXAMPLE}:build"), refuse=AssertionError
        )

        assert isinstance(spec.own, Own)
        assert 4096 == spec.own.found["data"]["samples"]
        assert {"path": "vit.py", "found": {}}.items() <= chosen.describe(spec)["own"].items()
        assert own.short_name(spec.own) == chosen.describe(spec)["model"]["name"]

    def test_depends_on_the_rank(self, tmp_path: Path) -> None:
        """Two processes build it as two ranks; exit status 2, and nothing was run or written."""
        (tmp_path / "mine.py").write_text(SOURCE.replace("# here", "model.scale += given.rank"))
        done = subprocess.run(
            [sys.executable, "-m", "harness", "run", "cold", "--workload", "mine.py:build"],
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(harness.__file__).parent.parent)},
        )

        assert (2, "") == (done.returncode, done.stdout)
        assert "found buffer scale different" in done.stderr
        assert 1 == len(done.stderr.splitlines())
        assert ["mine.py"] == [path.name for path in tmp_path.iterdir()]

    def test_ended(self, tmp_path: Path) -> None:
        """A process that ends without an answer is reported as such."""
        path = tmp_path / "mine.py"
        path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
        with pytest.raises(SpecError, match="process ended by SIGKILL; memory may have run out"):
            preflight.examine(options.make_spec(workload=str(path)))

    def test_takes_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Waiting has an end."""
        monkeypatch.setattr(preflight, "LIMIT_S", 0.01)
        path = tmp_path / "mine.py"
        path.write_text("import time\ntime.sleep(600)\n")
        with pytest.raises(SpecError, match=r"within 0\.01 s; found it still at it"):
            preflight.examine(options.make_spec(workload=str(path)))


def test_division_is_the_files_own() -> None:
    """Two versions of one file are not compared with each other."""
    from harness import plan

    spec = options.make_spec(workload=f"{EXAMPLE}:build")
    assert spec.own is not None
    other = dataclasses.replace(spec, own=dataclasses.replace(spec.own, sha256="0" * 64))
    divisions = {
        plan.block_runs(each, [], block=0, backend="gloo")[0].division for each in (spec, other)
    }

    assert 2 == len(divisions)
    assert any("vit.py:build@000000000000/" in each for each in divisions)
