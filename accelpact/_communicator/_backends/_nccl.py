"""NCCL: torch's `ProcessGroupNCCL`, or `nccl2`. Read in the source; nothing was run on a device.

Private attributes of torch 2.13.0 and 2.14.1. Which of the two classes a group has is asked of its
backend object: what the name `nccl` means depends on torch's version and on a variable.

A communicator is aborted in a thread of its own, once: the call waits up to the timeout of the
group and raises then. Each has its own thread, so that none waits for another's, as aborts one
after the other would where ranks take them in another order.

After an abort the device is free again, and what waited for the collective returns as if that had
completed. So who aborts notes it, and `failure` says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from accelpact._communicator._aside import Aside, bounded
from accelpact._communicator._backends import _nccl_settings
from accelpact._communicator._backends._base import Backend, Members
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Store

_CLASSES = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
"""Those that can be made by hand; the lazy variant keeps several communicators and is left out."""
_NEEDED = ("abort", "eager_connect_single_device", "get_error")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """What a communicator was made with, besides its members."""

    kind: type
    """Its class."""
    is_high_priority_stream: bool
    config: tuple[tuple[str, int | str], ...]
    """NCCL's own settings, by name."""


class Nccl(Backend):
    """Cut by an abort, built by hand.

    By hand, since the usual helper splits the default communicator if that is bound to a device,
    which is collective over all ranks and would hang here.
    """

    names: ClassVar[tuple[str, ...]] = ("nccl", "nccl-legacy", "nccl2")
    is_asynchronous: ClassVar[bool] = True

    def __init__(self) -> None:
        """Begin with no group cut."""
        self._aborts: weakref.WeakKeyDictionary[ProcessGroup, Aside[None]] = (
            weakref.WeakKeyDictionary()
        )
        self._cutting = threading.Lock()

    def wrong_settings(self, backends: Iterable[Any], *, deadline: float) -> list[str]:
        """Return which variables would end the process, or hold it up. See `_nccl_settings`."""
        legacy = _class("ProcessGroupNCCL")
        is_legacy = any(legacy is not None and isinstance(each, legacy) for each in backends)
        return _nccl_settings.wrong_settings(os.environ, is_legacy=is_legacy, deadline=deadline)

    def objection(self, group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        """Return why what `group` has for `devices` cannot be built again; None if it can."""
        if not torch.cuda.is_available():
            return "NCCL needs a CUDA device, and none is available"
        kinds = tuple(each for name in _CLASSES if (each := _class(name)) is not None)
        for device in devices:
            backend = group._get_backend(device)
            if type(backend) not in kinds:
                return (
                    f"expected a {device.type} backend of class {' or '.join(_CLASSES)}; found "
                    f"{type(backend).__name__} (TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them)"
                )
            lacks = [name for name in _NEEDED if not hasattr(backend, name)]
            if lacks:
                return f"this torch's {type(backend).__name__} lacks {' and '.join(lacks)}"
            if getattr(backend.options, "enable_reconfigure", False):
                return "the group was made to be reconfigured, which is not written for NCCL here"
        return None

    def details(self, backend: Any) -> Details:
        """Return what `create` must know of a backend object, apart from its members."""
        options = backend.options
        config = options.config
        values = ((name, getattr(config, name)) for name in dir(config) if name[0] != "_")
        return Details(
            kind=type(backend),
            is_high_priority_stream=options.is_high_priority_stream,
            config=tuple((name, value) for name, value in values if isinstance(value, (int, str))),
        )

    def create(self, store: Store, members: Members, details: Details) -> Any:
        """Rendezvous over `store` and return the backend object, connected."""
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = details.is_high_priority_stream
        for name, value in details.config:
            setattr(options.config, name, value)
        options._timeout = members.timeout
        options.global_ranks_in_group = list(members.ranks)
        options.group_name = members.name
        device = members.bound or torch.device("cuda", torch.cuda.current_device())

        def connect() -> Any:
            torch.cuda.set_device(device)
            # NCCL bounds its rendezvous by the store's own timeout.
            with _waiting(store, members.deadline):
                backend = details.kind(store, members.position, len(members.ranks), options)
                backend.eager_connect_single_device(device)
            return backend

        purpose = f"the members of group {members.name} to connect by NCCL"
        return bounded(connect, members.deadline.total_seconds(), purpose=purpose)

    def cut(self, group: ProcessGroup) -> bool:
        """Begin to abort the communicator of `group`, unless that was begun before."""
        with self._cutting:  # the control thread does so too
            if group not in self._aborts:
                abort = group._get_backend(torch.device("cuda")).abort  # it sets its own device
                self._aborts[group] = Aside(abort, purpose="the NCCL communicator to abort")
        return True

    def stop(self, group: ProcessGroup, *, end: float) -> None:
        """Wait until the communicator of `group` is aborted."""
        seconds = max(0.001, end - time.monotonic())
        try:
            self._aborts[group].wait(seconds)
        except Rejected:
            raise
        except RuntimeError as error:  # torch's own limit is the timeout of the group
            raise Rejected(
                Reason.DEADLINE,
                f"expected the NCCL communicator of group {group.group_name} to abort; "
                f"{str(error).strip().splitlines()[0]}",
            ) from error

    def failure(self, group: ProcessGroup) -> str | None:
        """Return why results of `group` cannot be trusted: it was aborted, or torch saw an error.

        The watchdog that aborts it notes that as an error of the backend object.
        """
        if group in self._aborts:
            return f"NCCL group {group.group_name} was aborted"
        error = group._get_backend(torch.device("cuda")).get_error()
        if error.name != "SUCCESS":
            return f"NCCL group {group.group_name} has failed: {error.name}"
        return None


def _class(name: str) -> type | None:
    """Return a class that this torch may not have."""
    return getattr(dist, name, None) or getattr(dist.distributed_c10d, name, None)


@contextlib.contextmanager
def _waiting(store: Store, limit: timedelta) -> Iterator[None]:
    """Have calls of `store` wait no longer than `limit`, and as long as before afterwards."""
    before = store.timeout
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.set_timeout(limit)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.set_timeout(before)
