"""Two ways to start the ranks of a run: torch's elastic launcher, or forks of one process.

Either way there is one launcher for all ranks, or one per replica if the contender's settings say
so. The latter's ranks are started again without the others'.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Protocol, final

from harness.layout import FIRST_RANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from harness.spec import RunSpec

_ENDS_S = 10.0


class Launched(Protocol):
    """The launcher of one run, or all of them."""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs.

        Of several the first that has failed decides, even if others still run.
        """
        ...

    def wait(self) -> int:
        """Return the exit status when all have ended."""
        ...


class Launch(Protocol):
    """Starts the ranks of `run`, which write into `folder`."""

    def __call__(
        self, run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path
    ) -> Launched:
        """Start the launchers; what they print goes to `log`, an existing file."""
        ...


def num_launchers(run: RunSpec) -> int:
    """How many launchers share the ranks of `run`; each has as many, in order."""
    return run.spec.mesh.replicate if run.settings.get("launchers") == "replica" else 1


def torchrun(run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path) -> Launched:
    """Start torch's elastic launcher, or the one like it that the contender names.

    As often as there are launchers.
    """
    options = run.settings["options"]
    number = num_launchers(run)
    num_ranks = run.spec.mesh.world_size // number
    command = [
        *(sys.executable, "-m", "harness.launcher", str(num_ranks)),
        *(str(run.settings["max_restarts"]), str(options.get("monitor_interval", 0.1))),
        *(str(folder), options.get("launcher", "torch.distributed.run")),
        *options.get("launcher_arguments", []),
    ]
    with log.open("ab") as output:
        return _Torchruns([
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, FIRST_RANK: str(place * num_ranks)},
            )
            for place in range(number)
        ])  # fmt: skip


class _Torchruns:
    """The launchers of one run."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def poll(self) -> int | None:
        found = [process.poll() for process in self._processes]
        return next((status for status in found if status), None if None in found else 0)

    def wait(self) -> int:
        found = [process.wait() for process in self._processes]
        return next((status for status in found if status), 0)


@final
class Forks:
    """A process that has imported torch, whose forks are the ranks of one run after another.

    For trials in which only the verdict counts: a restart is cheaper than torchrun's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it; it imports while this process goes on."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __call__(
        self, run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path
    ) -> Launched:
        """Fork the ranks of `run`; one run at a time."""
        request = {
            "num_ranks": run.spec.mesh.world_size // num_launchers(run),
            "num_launchers": num_launchers(run),
            "max_restarts": run.settings["max_restarts"],
            "folder": str(folder),
            "log": str(log),
            "environment": dict(environment),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return _Forked(self._process.stdout)


class _Forked:
    """One run of `Forks`."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if selector.select(0):
                    self._read()
        return self._status

    def wait(self) -> int:
        if self._status is None:
            self._read()
        assert self._status is not None
        return self._status

    def _read(self) -> None:
        # An empty answer: the process of the forks is gone.
        self._status = int(self._answers.readline() or b"1")
