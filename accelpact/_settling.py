"""Waiting for collectives that have only been issued when their calls return.

Gloo's calls return when the collective is complete, or raise. NCCL's return when the device has its
orders: the host runs ahead, a failure shows minutes later or in another place, and what waited for
the device goes on with a result that is none. Two things must not depend on such a result:

* an optimizer's step, which commits: no step begins before everything that it will read is there.
  That is one wait per update; the host still runs ahead within it.
* a collective at a boundary, since all members must agree whether it has completed: it is waited
  for as Gloo's are.

The wait looks again and again, so that a notice of a peer's failure, the timeout of the group, and
an abort by another thread end it. Groups whose calls do not return early are not waited for. The
order in which the device works off what it was given is that of the current stream, which the
frameworks have made wait for their own by then.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accelpact import _communicator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from accelpact._control import ControlPlane

_POLL_S = 50e-6


class CollectiveFailed(dist.DistBackendError):
    """A collective that was issued has not completed, or its result cannot be trusted.

    Attributes:
        groups: names of those groups that have failed, as far as is known.
    """

    def __init__(self, detail: str, *groups: str) -> None:
        """Keep the names beside the message."""
        super().__init__(detail)
        self.groups = groups


class Settling:
    """The waits of one rank."""

    def __init__(
        self, control: ControlPlane, synchronizing: Callable[[], Sequence[ProcessGroup]]
    ) -> None:
        """Ask `control` for notices, and `synchronizing` for the groups of the model."""
        self._control = control
        self._synchronizing = synchronizing
        self._patience: float | None = None

    def await_update(self) -> None:
        """Wait until the device has done what was issued for the update under way.

        Raises:
            CollectiveFailed: a collective of some group has failed, or none of the model's could
                still complete in time.
            UpdateInterrupted: a peer takes the update back.
        """
        if not _is_device_in_use():
            return
        groups = _asynchronous(_communicator.registered())
        if not groups:
            return
        if self._patience is None:
            model = _asynchronous(self._synchronizing())
            self._patience = min(map(_timeout, model or groups))
        _await(groups, self._patience, self._control.require_no_discard)

    def await_collective(self, group: ProcessGroup) -> None:
        """Wait until the device has done the collective of `group` that was issued just now.

        Raises:
            CollectiveFailed: it has failed, here or on a peer, or did not complete in time.
        """
        if _is_device_in_use() and _communicator.is_asynchronous(group):
            look = functools.partial(self._require_no_notice, group.group_name)
            _await([group], _timeout(group), look)

    def _require_no_notice(self, name: str) -> None:
        notice = self._control.pending
        if notice is not None and notice.group == name:
            raise CollectiveFailed(f"a collective of group {name} failed on rank {notice.by}", name)


def _is_device_in_use() -> bool:
    """Whether there can be anything to wait for; not while a graph is captured, which runs none."""
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def _asynchronous(groups: Sequence[ProcessGroup]) -> list[ProcessGroup]:
    return [group for group in groups if _communicator.is_asynchronous(group)]


def _timeout(group: ProcessGroup) -> float:
    return _communicator.describe(group).timeout.total_seconds()


def _await(groups: Sequence[ProcessGroup], patience: float, look: Callable[[], None]) -> None:
    done = torch.cuda.Event()
    done.record()
    end = time.monotonic() + patience
    while not done.query():
        _require_trust(groups)
        look()
        if time.monotonic() > end:
            names = ", ".join(group.group_name for group in groups)
            raise CollectiveFailed(
                f"expected the collectives of {names} to complete within {patience:g} s"
            )
        time.sleep(_POLL_S)
    # A communicator that is aborted lets the device go, which looks like the end of its work.
    _require_trust(groups)


def _require_trust(groups: Sequence[ProcessGroup]) -> None:
    for group in groups:
        why = _communicator.failure(group)
        if why is not None:
            raise CollectiveFailed(why, group.group_name)
