"""What the runtime asks of a backend."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    import torch
    from torch.distributed import ProcessGroup, Store


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Who meets in a communicator, and within which time."""

    name: str
    """Of the group."""
    ranks: Sequence[int]
    """Global ranks, in group order."""
    position: int
    """Of this rank among them."""
    timeout: timedelta
    """Of collectives."""
    deadline: timedelta
    """For the rendezvous."""
    bound: torch.device | None
    """The device that the group was bound to when it was made."""


class Backend(abc.ABC):
    """How the communicators of one backend are made, cut and stopped.

    Another backend (HCCL, say) is served by one more of these, and its entry in `BACKENDS`.
    """

    names: ClassVar[tuple[str, ...]]
    """What torch calls it."""
    is_asynchronous: ClassVar[bool]
    """Whether a collective has only been issued to the device when its call returns."""

    def wrong_settings(self, backends: Iterable[Any], *, deadline: float) -> list[str]:  # noqa: ARG002
        """Return which settings of this process keep a failure from being survived.

        Args:
            backends: the backend objects there are.
            deadline: seconds within which a step of a repair must happen.

        Returns:
            One text per setting: its name, what was found, what to set, and why.
        """
        return []

    @abc.abstractmethod
    def objection(self, group: ProcessGroup, devices: Sequence[torch.device]) -> str | None:
        """Return why what `group` has for `devices` cannot be built again; None if it can."""

    def details(self, backend: Any) -> Any:  # noqa: ARG002
        """Return what `create` must know of a backend object, apart from its members."""
        return None

    @abc.abstractmethod
    def create(self, store: Store, members: Members, details: Any) -> Any:
        """Rendezvous over `store`, a prefix that nobody else uses; return the backend object."""

    @abc.abstractmethod
    def cut(self, group: ProcessGroup) -> bool:
        """Make collectives of `group` end, under way or later; return at once, from any thread.

        Returns:
            Whether it could.
        """

    @abc.abstractmethod
    def stop(self, group: ProcessGroup, *, end: float) -> None:
        """Wait until what `cut` has begun is done.

        Args:
            group: it was cut and is about to be replaced.
            end: by the clock `time.monotonic`.

        Raises:
            Rejected: `reject_deadline`, if it is not done by then.
        """

    def failure(self, group: ProcessGroup) -> str | None:  # noqa: ARG002
        """Return why results of `group` cannot be trusted, where no exception says so."""
        return None


def type_of(name: str) -> Any:
    """Return torch's enum value for the backend of that name."""
    kinds = dist.ProcessGroup.BackendType
    return dist.Backend.backend_type_map.get(name, kinds.CUSTOM)
