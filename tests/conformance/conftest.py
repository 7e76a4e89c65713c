"""The runs that all tests here look at: one reference, and every contender struck and in peace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import strategies
from harness import plan, supervisor
from harness.conformance import Evidence
from harness.launching import Forks
from harness.spec import WRAPPERS, Fault, Mesh, Schedule, Spec, SpecError, choose
from strategies import Platform, Timeouts
from tests.conformance import contenders
from tests.packages import install

if TYPE_CHECKING:
    from collections.abc import Iterator

PLATFORM = Platform(device="cpu", backend="gloo")
UPDATES, CHECKPOINT_AT = 6, 1
AT_BOUNDARY = Fault(kind="absent", phase="boundary", update=2)
INSIDE = Fault(kind="absent", phase="backward", update=5)
FAULT_FREE_UPDATES = 3
TIMEOUTS = Timeouts(group=2.0)
EXAMPLE = Path(__file__).parents[2] / "examples" / "strategy" / "rerun.py"
"""The contender of `docs/adding-a-strategy.md`, of another package."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--strategy", action="append", help="contender to check; again for more")
    group.addoption("--wrapper", default="fsdp1", help=f"one of {', '.join(WRAPPERS)}")


def pytest_configure(config: pytest.Config) -> None:
    try:
        choose("--wrapper", config.getoption("--wrapper"), WRAPPERS)
        for name in config.getoption("--strategy") or ():
            choose("--strategy", name, [each for each in strategies.names() if each != "reference"])
    except SpecError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contender" in metafunc.fixturenames:
        known = [name for name in strategies.by_default() if name != plan.REFERENCE]
        names = metafunc.config.getoption("--strategy") or known
        metafunc.parametrize("contender", names, scope="session")


class Runs:
    """Runs contenders once each, on forks of one process."""

    def __init__(self, folder: Path, wrapper: str, forks: Forks) -> None:
        self._folder = folder
        self._forks = forks
        self.wrapper = wrapper

    def evidence(self, name: str) -> Evidence:
        """Records of the contender's run and of the reference's; skips what cannot run here."""
        return Evidence.read(self.folder(name), self.folder(plan.REFERENCE, faulted=False))

    def folder(self, name: str, *, faulted: bool = True) -> Path:
        """Records of the contender's run with or without faults; skips what cannot run here."""
        answer = strategies.find(name)().availability(PLATFORM)
        if not answer.available:
            pytest.skip(f"not_run: {answer.reason}")
        run = planned(name, self.wrapper, faulted=faulted)
        folder = self._folder / run.name
        if not folder.exists():
            supervisor.execute(
                run, folder, on_event=lambda _: None, stall_s=60.0, launch=self._forks
            )
        return folder


def planned(name: str, wrapper: str, *, faulted: bool = True) -> plan.RunSpec:
    """Plan a run; the faults strike at a boundary and, if the contender passes one, in an update.

    Without faults the reference is as long as the others with, and a contender as short as it can
    be to show what it adds.
    """
    kind = strategies.find(name)
    if faulted:
        faults: tuple[Fault, ...] = (AT_BOUNDARY,)
        if kind.expected_inside == "pass":
            faults = (AT_BOUNDARY, INSIDE)
        schedule = Schedule(updates=UPDATES, checkpoint_at=CHECKPOINT_AT, faults=faults)
    else:
        updates = UPDATES if name == plan.REFERENCE else FAULT_FREE_UPDATES
        schedule = Schedule(updates=updates, checkpoint_at=CHECKPOINT_AT, faults=())
    spec = Spec(
        schedule=schedule, wrapper=wrapper, mesh=Mesh.parse(WRAPPERS[wrapper]), timeouts=TIMEOUTS
    )
    entries = [] if name == plan.REFERENCE else [plan.Entry(strategy=kind(), label=name)]
    found = plan.block_runs(spec, entries, block=0, backend=PLATFORM.backend)
    return next(
        run for run in found if run.strategy == name and not run.control and run.faulted == faulted
    )


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Start the process whose forks the ranks are.

    The wrong contenders and the guide's example are installed for it.
    """
    folder = tmp_path_factory.mktemp("conformance")
    points = {name: kind for name, (kind, _) in contenders.FAULTS.items()}
    wrong = install(folder / "wrong", "wrong", contenders.__name__, points)
    example = install(folder / "example", "rerun", "rerun", {"rerun": "Rerun"})
    shutil.copy(EXAMPLE, example)
    here = str(Path(__file__).parents[2])
    added = [str(wrong), str(example), here, os.environ.get("PYTHONPATH")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(wrong))
        patch.syspath_prepend(str(example))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, added)))
        with Forks(os.environ) as forks:
            yield Runs(folder / "runs", request.config.getoption("--wrapper"), forks)
