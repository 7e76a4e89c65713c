"""Two ways to start the ranks of a run: torch's elastic launcher, or forks of one process."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from harness.spec import RunSpec

_ENDS_S = 10.0


class Launched(Protocol):
    """The launcher of one run."""

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        ...

    def wait(self) -> int:
        """Return its exit status when it has ended."""
        ...


class Launch(Protocol):
    """Starts the ranks of `run`, which write into `folder`."""

    def __call__(
        self, run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path
    ) -> Launched:
        """Start the launcher; what it prints goes to `log`, an existing file."""
        ...


def torchrun(
    run: RunSpec, folder: Path, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start torch's elastic launcher, or the one like it that the contender names."""
    options = run.settings["options"]
    command = [
        *(sys.executable, "-m", "harness.launcher", str(run.spec.mesh.world_size)),
        *(str(run.settings["max_restarts"]), str(options.get("monitor_interval", 0.1))),
        *(str(folder), options.get("launcher", "torch.distributed.run")),
        *options.get("launcher_arguments", []),
    ]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


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
            "num_ranks": run.spec.mesh.world_size,
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
