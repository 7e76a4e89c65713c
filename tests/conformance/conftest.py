"""The runs that the checks look at: one reference, and one run of every contender."""

from __future__ import annotations

import os
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
TIMEOUTS = Timeouts(group=2.0)


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
        self._wrapper = wrapper
        self._forks = forks
        self._done: dict[str, Path] = {}

    def evidence(self, name: str) -> Evidence:
        """Records of the contender's run and of the reference's; skips what cannot run here."""
        answer = strategies.find(name)().availability(PLATFORM)
        if not answer.available:
            pytest.skip(f"not_run: {answer.reason}")
        return Evidence.read(self._run(name), self._run(plan.REFERENCE))

    def _run(self, name: str) -> Path:
        if name not in self._done:
            self._done[name] = self._folder / name
            supervisor.execute(
                planned(name, self._wrapper),
                self._done[name],
                on_event=lambda _: None,
                stall_s=60.0,
                launch=self._forks,
            )
        return self._done[name]


def planned(name: str, wrapper: str) -> plan.RunSpec:
    """Plan a run with a fault at a boundary and, if the contender passes one, inside an update."""
    kind = strategies.find(name)
    inside = kind.expected_inside == "pass"
    spec = Spec(
        schedule=Schedule(
            updates=UPDATES,
            checkpoint_at=CHECKPOINT_AT,
            faults=(AT_BOUNDARY, INSIDE) if inside else (AT_BOUNDARY,),
        ),
        wrapper=wrapper,
        mesh=Mesh.parse(WRAPPERS[wrapper]),
        timeouts=TIMEOUTS,
    )
    entries = [] if name == plan.REFERENCE else [plan.Entry(strategy=kind(), label=name)]
    found = plan.block_runs(spec, entries, block=0, backend=PLATFORM.backend)
    return next(
        run
        for run in found
        if run.strategy == name and not run.control and run.faulted == (name != plan.REFERENCE)
    )


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Start the process whose forks the ranks are; the wrong contenders are installed for it."""
    folder = tmp_path_factory.mktemp("conformance")
    points = {name: kind for name, (kind, _) in contenders.FAULTS.items()}
    packages = install(folder / "packages", "wrong", contenders.__name__, points)
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [str(packages), here, os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        patch.setenv("PYTHONPATH", path)
        with Forks(os.environ) as forks:
            yield Runs(folder, request.config.getoption("--wrapper"), forks)
