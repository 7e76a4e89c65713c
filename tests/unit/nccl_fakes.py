"""NCCL groups without a device: what torch's classes do, as far as the runtime asks."""

from __future__ import annotations

import enum
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact import Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA = torch.device("cuda")
UNDEFINED = -(2**31)
"""What NCCL takes for a setting that is left to it."""


class Error(enum.Enum):
    """As torch's `ErrorType`."""

    SUCCESS = 0
    TIMEOUT = 1


class Config:
    """As torch's `NCCLConfig`: a plain object, and no setting may be lost."""

    def __init__(self) -> None:
        self.blocking = UNDEFINED
        self.min_ctas = UNDEFINED
        self.net_name: str | None = None

    def unsafe_get_ptr(self) -> int:
        """A method, which is no setting."""
        return 0


class Options:
    """As torch's `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self.config = Config()
        self.is_high_priority_stream = False
        self.enable_reconfigure = False
        self.split_from: object = None
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class Fake:
    """What both of torch's backends of NCCL have."""

    Options = Options
    label = ""
    connects = threading.Event()
    """Set: connecting comes to its end."""

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.connected: list[torch.device] = []
        self.aborts = 0
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.abort_error: RuntimeError | None = None
        self.error = Error.SUCCESS

    def name(self) -> str:
        """As torch calls it."""
        return self.label

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect, as soon as all members have come."""
        self.connects.wait(10)
        self.connected.append(device)

    def abort(self) -> None:
        """Abort, as soon as the device lets go."""
        self.aborts += 1
        self.may_abort.wait(10)
        if self.abort_error is not None:
            raise self.abort_error

    def get_error(self) -> Error:
        """What the watchdog has seen."""
        return self.error


class ProcessGroupNCCL(Fake):
    """The first of the two."""

    label = "nccl"


class ProcessGroupNCCL2(Fake):
    """The second, which is no subclass of the first."""

    label = "nccl2"


class Wrapped:
    """What TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a backend."""

    def __init__(self, backend: Fake) -> None:
        self.options = backend.options

    def name(self) -> str:
        """As that of what it wraps."""
        return "nccl"


class Group:
    """A group of one device type."""

    def __init__(self, name: str, backend: Any) -> None:
        self.group_name = name
        self.group_desc = "undefined"
        self.bound_device_id: torch.device | None = None
        self._device_types = [CUDA]
        self._backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError("no backend for this device")
        return self._backend

    def _has_hooks(self) -> bool:
        return False


def make(kind: type[Fake] = ProcessGroupNCCL) -> Fake:
    """Return a backend object of two ranks."""
    return kind(None, 0, 2, Options())


def group(kind: type[Fake] = ProcessGroupNCCL, name: str = "pair") -> Any:
    """Return a group of two ranks."""
    return Group(name, make(kind))


def register(patch: pytest.MonkeyPatch, each: Any, config: str) -> None:
    """Have torch.distributed know the group."""
    world = c10d._world
    patch.setitem(world.pg_map, each, ("nccl", None))
    patch.setitem(world.pg_names, each, each.group_name)
    patch.setitem(world.pg_backend_config, each, config)
    patch.setitem(world.pg_group_ranks, each, {0: 0, 1: 1})


class Device:
    """A CUDA device that is not there.

    Attributes:
        idle: set while it has nothing to do.
        is_capturing: whether a graph is captured.
        current: (thread, number) whenever a thread chose one.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of `torch.cuda`."""
        self.idle = threading.Event()
        self.idle.set()
        self.current: list[tuple[str, Any]] = []
        self.queries = 0
        self.is_capturing = False
        for name, value in (
            ("is_available", lambda: True),
            ("is_initialized", lambda: True),
            ("is_current_stream_capturing", lambda: self.is_capturing),
            ("current_device", lambda: 1),
            ("set_device", self._choose),
            ("synchronize", lambda: self.idle.wait(10)),
            ("Event", lambda: SimpleNamespace(record=lambda: None, query=self._query)),
        ):
            patch.setattr(torch.cuda, name, value)
        for kind in (ProcessGroupNCCL, ProcessGroupNCCL2):
            patch.setattr(dist, kind.__name__, kind, raising=False)
        patch.setattr(Fake, "connects", threading.Event())
        Fake.connects.set()

    def _choose(self, device: Any) -> None:
        self.current.append((threading.current_thread().name, device))

    def _query(self) -> bool:
        self.queries += 1
        return self.idle.is_set()


def later(seconds: float, act: Any) -> None:
    """Do something in another thread after a while."""

    def run() -> None:
        time.sleep(seconds)
        act()

    threading.Thread(target=run, daemon=True).start()


def refusal(call: Callable[[], object]) -> Rejected:
    """Return why `call` refuses."""
    with pytest.raises(Rejected) as found:
        call()
    return found.value
