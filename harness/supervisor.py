"""Runs one contender once: hosts the store, starts the launcher, watches, cleans up."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import strategies
from harness import processes
from harness.events import Recorder
from harness.launching import torchrun
from harness.layout import CHECKPOINTS
from harness.records import Event, write_json
from harness.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.launching import Launch, Launched
    from harness.spec import RunSpec, Spec

_POLL_S = 0.05
STALL_S = 180.0
"""A run that records nothing for so long is ended."""


class EventTail:
    """Reads the events of a run as they are written."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning of `path`, which need not exist yet."""
        self._path = path
        self._offset = 0
        self._decoder = msgspec.json.Decoder(Event)

    def read(self) -> list[Event]:
        """Return the complete events since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [self._decoder.decode(line) for line in data[:end].splitlines()]


@processes.adopting_orphans()
def execute(
    run: RunSpec,
    folder: Path,
    *,
    on_event: Callable[[Event], None],
    stall_s: float = STALL_S,
    launch: Launch = torchrun,
) -> int | None:
    """Run `run` in `folder`, which must not exist; return the launcher's exit status.

    Whatever happens, Ctrl-C included, every process of the run is gone when this
    returns or raises, and the records are readable. None means that the run
    recorded nothing for `stall_s` seconds and was ended.
    """
    import torch.distributed as dist

    folder.mkdir(parents=True)
    write_json(folder / "run.json", run)
    keep = processes.descendants()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    recorder = Recorder(folder, rank=None)
    status: int | None = None
    launcher: Launched | None = None
    strategy = strategies.find(run.strategy)(variant=run.variant)
    try:
        with strategy.services(run.spec.mesh.layout()) as found:
            log = folder / "launcher.log"
            log.touch()
            recorder.emit("launch")
            environment = {**_environment(run, port=store.port), **found}
            launcher = launch(run, folder, environment, log)
            status = _watch(launcher, EventTail(folder / "events.jsonl"), on_event, stall_s)
    finally:
        processes.end_tree(keep)
        if launcher is not None:
            launcher.wait()
        recorder.emit("end", code=status)
        recorder.close()
        del store
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        redact(folder, also=_given_paths(run.spec))
    return status


def _given_paths(spec: Spec) -> dict[str, str]:
    """Paths that the user has named, and what stands for them in records."""
    named = {spec.data: "<data>", spec.envelope: "<envelope>"}
    paths = {path: token for path, token in named.items() if path}
    if spec.own is not None:
        path = Path(spec.own.path)
        paths[str(path)] = f"<workload>/{path.name}"
        if path.parent != path.parent.parent:  # "/" is in every path
            paths[f"{path.parent}/"] = "<workload>/"
    return paths


def _environment(run: RunSpec, *, port: int) -> dict[str, str]:
    own = {
        "ACCELPACT_STORE": f"127.0.0.1:{port}",
        "ACCELPACT_ENVELOPE": run.spec.envelope or "",  # and none that happens to be set here
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Stores look up their peers' names for their logs; a name server that does not answer costs
        # 5 s by default, and those who reconnect would be charged with it.
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "PYTHONUNBUFFERED": "1",
        # cuBLAS is deterministic only with a workspace of a fixed size; CPU ranks ignore it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    needed = run.settings["environment"]
    return {**os.environ, **own, **(needed if isinstance(needed, dict) else {})}


def _watch(
    launcher: Launched,
    tail: EventTail,
    on_event: Callable[[Event], None],
    stall_s: float,
) -> int | None:
    heard = time.monotonic()
    while True:
        status = launcher.poll()
        for event in tail.read():
            heard = time.monotonic()
            on_event(event)
        if status is not None:
            return status
        if time.monotonic() - heard > stall_s:
            return None
        time.sleep(_POLL_S)
