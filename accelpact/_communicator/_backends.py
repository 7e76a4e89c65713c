"""What differs between the communicators of two backends.

Private attributes of `ProcessGroupGloo` and `ProcessGroupNCCL`, seen in torch 2.13.0 and 2.14.1;
those of NCCL are read in the source and have not been run.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelpact._communicator._interrupt import interrupt
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Store


class Backend(abc.ABC):
    """How the communicator of one backend is made and stopped."""

    @staticmethod
    @abc.abstractmethod
    def objection(group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        """Return why `group` cannot be built again in this process; None if it can."""

    @staticmethod
    @abc.abstractmethod
    def type() -> Any:
        """Return torch's enum value."""

    @staticmethod
    @abc.abstractmethod
    def create(
        store: Store,
        *,
        name: str,
        ranks: Sequence[int],
        position: int,
        timeout: timedelta,
        deadline: timedelta,
    ) -> Any:
        """Rendezvous over `store` and return the backend object.

        Args:
            store: a prefix that nobody else uses.
            name: of the group.
            ranks: global ranks of the members, in group order.
            position: of this rank among them.
            timeout: of collectives.
            deadline: for the rendezvous.
        """

    @staticmethod
    @abc.abstractmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:
        """Make the communicator of a retired group stop, as far as the backend can."""


class _Gloo(Backend):
    """`ProcessGroupGloo`: its own abort does nothing."""

    @staticmethod
    def objection(group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        backends = [group._get_backend(device) for device in devices]
        if any(each is not backends[0] for each in backends):
            return "the group has a backend object per device"
        return None

    @staticmethod
    def type() -> Any:
        return dist.ProcessGroup.BackendType.GLOO

    @staticmethod
    def create(
        store: Store,
        *,
        name: str,
        ranks: Sequence[int],
        position: int,
        timeout: timedelta,
        deadline: timedelta,
    ) -> Any:
        backend = dist.ProcessGroupGloo(store, position, len(ranks), timeout=min(timeout, deadline))
        # The rendezvous is bounded by what becomes the timeout of collectives.
        if deadline < timeout:
            backend._set_default_timeout(timeout)
        backend.options.global_ranks_in_group = list(ranks)
        backend.options.group_name = name
        return backend

    @staticmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:  # noqa: ARG004  at once
        """Shut the connections down: whatever still calls with the group fails at once.

        Otherwise it would compute as before while its peers do the same, or hang till its timeout.
        """
        interrupt(group)


class _Nccl(Backend):
    """`ProcessGroupNCCL`, built directly.

    The usual helper may split the default communicator, which is collective
    over all ranks and would hang here.
    """

    @staticmethod
    def objection(group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        if not torch.cuda.is_available():
            return "NCCL needs a CUDA device, and none is available"
        kind = getattr(dist, "ProcessGroupNCCL", None)
        for device in devices:
            if kind is None or not isinstance(group._get_backend(device), kind):
                return f"the group's {device.type} backend is not ProcessGroupNCCL"
        return None

    @staticmethod
    def type() -> Any:
        return dist.ProcessGroup.BackendType.NCCL

    @staticmethod
    def create(
        store: Store,
        *,
        name: str,
        ranks: Sequence[int],
        position: int,
        timeout: timedelta,
        deadline: timedelta,
    ) -> Any:
        # NCCL bounds its rendezvous by the store's own timeout.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.set_timeout(deadline)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        backend = dist.ProcessGroupNCCL(store, position, len(ranks), options)
        backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return backend

    @staticmethod
    def stop(group: ProcessGroup, *, deadline: float) -> None:
        """Abort in a helper thread, since it may wait for the group's own timeout."""
        backend = group._get_backend(torch.device("cuda"))
        thread = threading.Thread(target=backend.abort, name="accelpact-abort", daemon=True)
        thread.start()
        thread.join(deadline)
        if thread.is_alive():
            raise Rejected(
                Reason.DEADLINE,
                f"expected the NCCL communicator to abort within {deadline:g} s; it did not",
            )
        torch.cuda.synchronize()


BACKENDS: dict[str, type[Backend]] = {"gloo": _Gloo, "nccl": _Nccl}


def probe_device(devices: Sequence[torch.device]) -> torch.device:
    """The host's memory where a group serves it, since its other devices may not exist here."""
    host = torch.device("cpu")
    return host if host in devices else torch.device("cuda")
