"""One rank of one run: the training loop that every strategy shares.

Usage: python -m harness.worker FOLDER, started by `harness.launcher`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from harness.events import Recorder
from harness.layout import FIRST_RANK
from harness.processes import die_with_parent, end_with_parent
from strategies import root_cause

if TYPE_CHECKING:
    from harness.spec import RunSpec
    from strategies import Attempt, Strategy

UNTIMED_VARIABLE = "ACCELPACT_UNTIMED"
"""Set where times mean nothing."""
_EXIT_RECOVERY = 75
"""Exit status of a rank whose strategy gives the failure to the launcher."""
_MUST_END = "RankMustEnd"
"""Compared by name: this module must be able to report a failed import of torch."""
_TEARDOWN_S = 20.0


def main(folder: Path) -> None:
    """Run one rank and end the process; never returns."""
    rank = _global("RANK")
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    _own_output(folder / f"rank{rank}.log")
    recorder = Recorder(folder, rank=rank, attempt=restart)
    recorder.emit("process")
    status = 1
    try:
        _Rank(folder, recorder).run()
        status = 0
    except BaseException as error:  # noqa: BLE001  the process ends here, whatever it was
        traceback.print_exc()
        if type(error).__name__ == _MUST_END:
            status = _EXIT_RECOVERY
        else:
            recorder.emit("failure", error=root_cause(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter shutdown could wait for a communicator that will not answer.
        os._exit(status)


def _global(variable: str) -> int:
    """What a launcher counts from 0, counted over all launchers of the run."""
    return int(os.environ[variable]) + int(os.environ.get(FIRST_RANK, "0"))


def _own_output(path: Path) -> None:
    """Send everything this process prints, C++ included, to a file of its own."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


class _Rank:
    """Joins the run's specification, its strategy and the loop."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        import msgspec

        import strategies
        from harness.spec import RunSpec

        self._folder = folder
        self._recorder = recorder
        self._run = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunSpec)
        self._strategy: Strategy = strategies.find(self._run.strategy)(variant=self._run.variant)

    def run(self) -> None:
        import harness.train  # noqa: F401  torch and what the loop needs, before the clock stops

        self._recorder.emit("imported")
        self._strategy.enter(self._body, _first_attempt(self._run, self._recorder.attempt))

    def _body(self, attempt: Attempt) -> None:
        """Train to the last update; called again for every restart in process."""
        from harness.train import Trainer

        self._recorder.attempt = attempt.index
        trainer = Trainer(
            self._run, self._strategy, attempt, recorder=self._recorder, folder=self._folder
        )
        try:
            trainer.loop()
        except BaseException:
            trainer.abandon()
            raise
        with _bounded(self._recorder):
            trainer.tear_down()


def _first_attempt(run: RunSpec, restart: int) -> Attempt:
    from datetime import timedelta

    import msgspec
    import torch
    import torch.distributed as dist

    import strategies

    host, port = os.environ["ACCELPACT_STORE"].rsplit(":", 1)

    def store() -> dist.Store:
        return dist.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
        )

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device(run.spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", _global("LOCAL_RANK") % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(mode=True)
    return strategies.Attempt(
        index=restart,
        layout=run.spec.mesh.layout(_global("RANK")),
        device=device,
        backend=run.backend,
        settings=msgspec.convert(run.settings, strategies.Settings),
        store=store,
        store_address=(host, int(port)),
        timed=UNTIMED_VARIABLE not in os.environ,
    )


class _bounded:  # noqa: N801  reads as a statement
    """Ends the process if the body takes too long; the results are already written."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._timer = threading.Timer(_TEARDOWN_S, self._give_up)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        self._recorder.emit(
            "closed", reason=f"teardown took over {_TEARDOWN_S:g} s and was cut off"
        )
        os._exit(0)


if __name__ == "__mp_main__":  # imported by a process that a rank has spawned
    end_with_parent()
if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]))
