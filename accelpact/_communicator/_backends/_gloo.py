"""Gloo: `ProcessGroupGloo`, whose own abort does nothing (torch 2.13.0 and 2.14.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from accelpact._communicator._backends._base import Backend, Members
from accelpact._communicator._interrupt import shut_connections

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed import ProcessGroup, Store


class Gloo(Backend):
    """What is cut are the connections."""

    names: ClassVar[tuple[str, ...]] = ("gloo",)
    is_asynchronous: ClassVar[bool] = False

    def objection(self, group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        """Return why what `group` has for `devices` cannot be built again; None if it can."""
        backends = [group._get_backend(device) for device in devices]
        if any(each is not backends[0] for each in backends):
            return "the group has a backend object per device"
        return None

    def create(self, store: Store, members: Members, details: Any) -> Any:  # noqa: ARG002
        """Rendezvous over `store` and return the backend object."""
        timeout, deadline = members.timeout, members.deadline
        backend = dist.ProcessGroupGloo(
            store, members.position, len(members.ranks), timeout=min(timeout, deadline)
        )
        # The rendezvous is bounded by what becomes the timeout of collectives.
        if deadline < timeout:
            backend._set_default_timeout(timeout)
        backend.options.global_ranks_in_group = list(members.ranks)
        backend.options.group_name = members.name
        return backend

    def cut(self, group: ProcessGroup) -> bool:
        """Shut the connections down: whatever still calls with the group fails at once.

        Otherwise it would compute as before while its peers do the same, or hang till its timeout.
        """
        return shut_connections(group)

    def stop(self, group: ProcessGroup, *, end: float) -> None:
        """Do nothing: connections are shut at once."""
