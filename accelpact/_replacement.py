"""The two ways to replace a group: rebuild it under its name, or reconfigure it in place.

*Rebuild* works on every torch: the old group leaves torch's maps, a new object takes its name, and
every reference to the old object must be rebound. *Reconfigure* needs torch 2.14 or later: the
same object gets new connections, and there is nothing to rebind.

Only the members take part in either, over a store prefix that nobody has used before. Members
first exchange one entry each, so that one that is missing, that has another step in mind, or that
comes to a used prefix is named, and not waited for until some timeout.

Private functions of `torch.distributed.distributed_c10d`, seen in torch 2.14.1: reconfiguration is
experimental there. Older torch lacks them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import torch.distributed.distributed_c10d as c10d

from accelpact import _communicator
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup, Store

    from accelpact._communicator import Description


class Replacement(Protocol):
    """One way to replace a group."""

    name: ClassVar[str]
    retires: ClassVar[bool]
    """Whether the old object is given up, so that what names it must be rebound."""

    def objection(self, group: ProcessGroup, description: Description) -> str | None:
        """Return why `group` cannot be replaced in this way here; None if it can."""

    def retire(self, group: ProcessGroup, description: Description, *, deadline: float) -> None:
        """Give up the communicator of `group`, if this way needs that."""

    def build(
        self,
        group: ProcessGroup,
        description: Description,
        *,
        store: Store,
        rank: int,
        generation: int,
        deadline: float,
    ) -> ProcessGroup:
        """Connect all members again; every one of them calls this.

        Args:
            group: what is replaced.
            description: what `describe` said of it.
            store: a prefix that no earlier attempt has used, and a client that nobody needs while
                this waits.
            rank: this rank's global rank.
            generation: of this attempt.
            deadline: seconds within which every member must be there and connected.

        Raises:
            Rejected: `reject_deadline` if one is missing, `reject_unsupported` if one replaces in
                another way or the prefix was used before.
        """


class Rebuild:
    """A new object under the old name."""

    name: ClassVar[str] = "rebuild"
    retires: ClassVar[bool] = True

    def objection(self, group: ProcessGroup, description: Description) -> str | None:
        """Return why the communicator of `group` cannot be built again here."""
        return _communicator.backend_objection(group, description)

    def retire(self, group: ProcessGroup, description: Description, *, deadline: float) -> None:
        """Take `group` out of torch's maps and stop its communicator."""
        _communicator.retire(group, description, deadline=deadline)

    def build(
        self,
        group: ProcessGroup,  # noqa: ARG002  it is retired
        description: Description,
        *,
        store: Store,
        rank: int,
        generation: int,  # noqa: ARG002  the store's prefix stands for it
        deadline: float,
    ) -> ProcessGroup:
        """Connect and register the replacement. See `Replacement.build`."""
        end = time.monotonic() + deadline
        _exchange(self.name, "", description, store=store, rank=rank, end=end)
        with _connecting(description, deadline):
            return _communicator.rebuild(description, store=store, rank=rank, deadline=_left(end))


class Reconfigure:
    """New connections for the same object."""

    name: ClassVar[str] = "reconfigure"
    retires: ClassVar[bool] = False

    def objection(self, group: ProcessGroup, description: Description) -> str | None:
        """Return why torch cannot reconfigure `group`.

        A backend that hands its work to a device is left out: its communicator would have to be
        revoked and not aborted, and nothing of that has been run.
        """
        if not all(hasattr(c10d, function) for function in _FUNCTIONS):
            return f"torch {torch.__version__} cannot reconfigure a group in place (2.14 can)"
        try:
            supported = c10d._supports_reconfigure(group)
        except RuntimeError as error:  # it has several backends
            return str(error).split("\n", 1)[0]
        if supported and _communicator.is_asynchronous(group):
            return f"reconfiguring {description.backend} in place is not written for here"
        if not supported:
            return f"backend {description.backend} cannot be reconfigured, as this group was made"
        return None

    def retire(
        self,
        group: ProcessGroup,
        description: Description,  # noqa: ARG002
        *,
        deadline: float,  # noqa: ARG002
    ) -> None:
        """Shut the connections down. Torch ends them too, but waits 10 ms for each to end."""
        _communicator.interrupt(group)

    def build(
        self,
        group: ProcessGroup,
        description: Description,
        *,
        store: Store,
        rank: int,
        generation: int,
        deadline: float,
    ) -> ProcessGroup:
        """Connect `group` anew and return it. See `Replacement.build`."""
        end = time.monotonic() + deadline
        handle = c10d._get_reconfigure_handle(group)  # another one after every reconfiguration
        entries = _exchange(self.name, handle, description, store=store, rank=rank, end=end)
        uuid = _fresh_uuid(description, generation, entries)
        with _connecting(description, deadline):
            c10d._reconfigure(
                uuid=uuid,
                handles=[entry["handle"] for entry in entries],  # a set would be sorted as strings
                group=group,
                timeout=timedelta(seconds=_left(end)),
            ).wait()
        _forget_previous(group, description, uuid)
        return group


_FUNCTIONS = ("_supports_reconfigure", "_get_reconfigure_handle", "_reconfigure")
_STEPS: tuple[Replacement, ...] = (Reconfigure(), Rebuild())
"""In the order of preference: what is not rebound cannot be forgotten."""


def choose(
    setting: str, group: ProcessGroup, description: Description, obstacles: Sequence[str] = ()
) -> Replacement:
    """Return how to replace `group`.

    Args:
        setting: `rebuild`, `reconfigure`, or `auto` for the first of them that has no objection,
            reconfiguration first.
        group: the group to replace.
        description: what `describe` said of it.
        obstacles: what names the group and cannot be rebound, so that the group must stay.

    Raises:
        Rejected: `reject_unsupported`, with every objection.
    """
    objections = []
    for step in _STEPS:
        if setting in ("auto", step.name):
            objection = step.objection(group, description)
            if step.retires and obstacles:
                objection = "; ".join(obstacles)
            if objection is None:
                return step
            objections.append(f"{step.name}: {objection}")
    raise Rejected(
        Reason.UNSUPPORTED,
        f"expected a group that can be replaced by {setting}; group {description.name} cannot "
        f"({'; '.join(objections) or 'there is no such way'})",
    )


def require_choices(setting: str, obstacles: Callable[[ProcessGroup], Sequence[str]]) -> None:
    """Refuse now what every repair of some group would have to refuse for its obstacles."""
    for group in _communicator.registered():
        found = obstacles(group)
        if found:
            choose(setting, group, _communicator.describe(group), found)


def _exchange(
    step: str, handle: str, description: Description, *, store: Store, rank: int, end: float
) -> list[dict[str, str]]:
    """Publish this member's entry and return those of all members, in group order.

    The nonce makes the entries of two attempts differ, whatever the callers number them.
    """
    entry = json.dumps({"step": step, "handle": handle, "nonce": secrets.token_hex(8)})
    if store.compare_set(f"member/{rank}", "", entry).decode() != entry:
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected a store prefix that no attempt has used; rank {rank} was there before",
        )
    keys = [f"member/{member}" for member in description.ranks]
    try:
        store.wait(keys, timedelta(seconds=_left(end)))
    except RuntimeError as error:
        missing = [
            rank
            for rank, key in zip(description.ranks, keys, strict=True)
            if not store.check([key])
        ]
        raise Rejected(
            Reason.DEADLINE,
            f"expected all members of group {description.name} to {step} it in time; "
            f"ranks {missing} did not come",
        ) from error
    entries: list[dict[str, str]] = [json.loads(value) for value in store.multi_get(keys)]
    steps = {rank: each["step"] for rank, each in zip(description.ranks, entries, strict=True)}
    if set(steps.values()) != {step}:
        raise Rejected(
            Reason.UNSUPPORTED,
            f"expected all members of group {description.name} to {step} it; found {steps}",
        )
    return entries


@contextlib.contextmanager
def _connecting(description: Description, deadline: float) -> Iterator[None]:
    """Turn what torch raises into a refusal."""
    try:
        yield
    except Rejected:
        raise
    except RuntimeError as error:
        raise Rejected(
            Reason.DEADLINE,
            f"expected all members of group {description.name} to connect within {deadline:g} s; "
            f"{str(error).strip().splitlines()[0]}",
        ) from error


def _left(end: float) -> float:
    """Seconds until `end`; torch takes 0 and less for no limit."""
    return max(0.001, end - time.monotonic())


def _fresh_uuid(
    description: Description, generation: int, entries: Sequence[dict[str, str]]
) -> int:
    """Return a positive 63-bit number that all members agree on, and no other attempt has.

    One that is used again splits a Gloo group: some members refuse it, others go on.
    """
    text = json.dumps([description.name, generation, list(entries)], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


_previous: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def _forget_previous(group: ProcessGroup, description: Description, uuid: int) -> None:
    """Delete what the reconfiguration before this one has left in the store of `group`.

    Torch does not. The keys of this one may still be read by slower members; those of the one
    before are not, since all members have come here from it.
    """
    before = _previous.get(group)
    _previous[group] = uuid
    if before is None:
        return
    position = group.rank()
    names = [f"0/{position}"] + ["claimed"] * (position == 0)
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
        for name in names:
            store.delete_key(f"{description.entry.part}//reconfigure/{before}/{name}")
