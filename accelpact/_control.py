"""The out-of-band control plane: one thread per rank that answers while training is blocked.

While the members of a failed group repair it, every other rank sits in a
collective of the next update and cannot come to a barrier. So each rank has a
control thread with a store client of its own. It waits for the wake-up key of
the next generation; when that appears it *pledges* that its rank commits
nothing past the members' frontier F until the generation is released, and
publishes its own frontier once that is F and no optimizer step is under way.
The training thread is not needed for this: a blocked collective has released
the interpreter's lock.

A member of the failed group does not pledge by its control thread: its training
thread must come, and publishes where it is. It is told by `pending`, which it
looks at before it issues a collective. If it has gone past the boundary instead,
because it had completed the collective that failed on a peer, the control thread
refuses for it: the failure is one-sided. Either the training thread sees the
notice or the control thread sees that it went past, since each writes before it
reads.

Per update the cost is a few attribute stores and tests: no collective, no message.

Keys, below a prefix of the job's attempt, g being the generation:

====================  =====================================================
`claim/<g>`           the group that generation g repairs
`wake/<g>/<rank>`     the failure notice for `rank` (or a farewell, at close)
`standing/<g>/<rank>` where `rank` is: a member's training thread has come, or another's pledge
`done/<g>`            counts members whose replacement works
`verdict/<g>`         `release`, or `abort` with the reason
`rendezvous/<g>/...`  where the members of the replacement meet
====================  =====================================================

Keys of generation g - 1 are deleted once g is released.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from accelpact._errors import EXIT_STATUS, Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store

    from accelpact._boundary import Boundary

_RELEASE = "release"
_FOREVER = timedelta(days=30)
_POLL_S = 50e-6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank is, as it publishes it."""

    frontier: int
    """Last committed update."""
    completed: int = -1
    """Collectives of the failed group that it has completed at boundaries; -1: not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What a member tells all ranks of a failure."""

    generation: int
    group: str
    ranks: tuple[int, ...]
    """Members of the group."""
    by: int
    """Rank that tells."""
    frontier: int
    """Its last committed update."""
    completed: int
    """Collectives of the group that it has completed at boundaries; -1: not counted."""
    trigger: str
    """`exception`, or `audit`."""


class ControlPlane:
    """This rank's end of the control plane.

    Attributes:
        boundary: where this rank is; its training thread keeps that.
        released: generation of the last repair that was released.
        pledged: generation for which this rank has promised not to commit.
        pending: the notice of a repair that the training thread must join, or None.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        *,
        prefix: str,
        rank: int,
        world_size: int,
        boundary: Boundary,
        deadline: float,
        patience: float,
        on_abort: Callable[[str], None],
        interrupt: Callable[[str], object] = lambda _: None,
        on_notice: Callable[[Notice], None] = lambda _: None,
        on_release: Callable[[Notice], None] = lambda _: None,
    ) -> None:
        """Connect two clients and start the control thread.

        Args:
            store: gives a new client of a store that outlives every rank.
            prefix: separates this attempt of this job from all others.
            rank: this rank's global rank.
            world_size: number of ranks in W.
            boundary: where this rank is.
            deadline: seconds within which every step of a repair must happen.
            patience: seconds for which a rank that has not come yet is waited for.
            on_abort: called with the reason just before this process is ended.
            interrupt: called with the name of a group that failed on a peer, while the training
                thread of this rank is blocked in one of its collectives.
            on_notice: called with every failure notice, by the control thread.
            on_release: called when what a notice told of is repaired, by the control thread.
        """
        self.boundary = boundary
        self.released = 0
        self.pledged = 0
        self.pending: Notice | None = None
        self._limit = 0
        self._joined = 0
        self._closing = False
        self._rank = rank
        self._world_size = world_size
        self._deadline = timedelta(seconds=deadline)
        self._patience = timedelta(seconds=patience)
        self._on_abort = on_abort
        self._interrupt = interrupt
        self._on_notice = on_notice
        self._on_release = on_release
        self._main = dist.PrefixStore(prefix, store())
        self._main.set_timeout(self._deadline)
        self._served = dist.PrefixStore(prefix, store())
        self._released = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="accelpact-control", daemon=True)
        self._thread.start()

    def rehearse(self) -> None:
        """Meet all of W once, by the calls that a repair makes; a collective of all ranks.

        It proves that every rank reaches the store before a failure depends on
        it, and pays now for what only first calls pay.

        Raises:
            Rejected: `reject_deadline`, if a rank does not come.
        """
        self._main.compare_set("claim/0", "", "rehearsal")
        self._publish(self._main, 0, Standing(frontier=self.boundary.frontier))
        self._standings(0)
        self._main.add("done/0", 1)

    # -- the training thread, at every update ---------------------------------

    def before_step(self) -> None:
        """Announce that the optimizer is about to step; wait if this rank has pledged.

        Together with `_settle` this is Dekker's handshake: either the control
        thread sees `stepping` and waits for the commit, or this thread sees the
        pledge and waits for the release.
        """
        boundary = self.boundary
        boundary.stepping = True
        while self.pledged > self.released and boundary.frontier >= self._limit:
            boundary.stepping = False
            self._await_release(self.pledged)
            # Look again: the next generation may have been pledged before this was set.
            boundary.stepping = True

    def _await_release(self, generation: int) -> None:
        with self._released:
            done = self._released.wait_for(
                lambda: self.released >= generation, self._deadline.total_seconds()
            )
        if not done:
            raise self._late(f"generation {generation}")

    def _late(self, what: str) -> Rejected:
        return Rejected(
            Reason.DEADLINE,
            f"expected {what} to be released within {self._deadline.total_seconds():g} s",
        )

    # -- the members of the failed group, during a repair ----------------------

    def claim(self, group: str) -> int | Notice:
        """Agree with the other members of `group` on the generation of its repair.

        Groups that fail together are repaired one after the other: the first
        to claim a generation has it, the others wait for its release and claim
        the next.

        Returns:
            The generation, or the notice of another group's repair that needs this rank first.

        Raises:
            Rejected: `reject_deadline`, if the repair before this one is not released in time.
        """
        while True:
            generation = self.released + 1
            owner = self._main.compare_set(f"claim/{generation}", "", group).decode()
            if owner == group:
                return generation
            with self._released:
                done = self._released.wait_for(
                    functools.partial(self._is_settled, generation),
                    self._deadline.total_seconds(),
                )
            if not done:
                raise self._late(f"the repair of {owner} (generation {generation})")
            notice = self.pending
            if notice is not None and notice.group != group:
                return notice

    def _is_settled(self, generation: int) -> bool:
        return self.released >= generation or self.pending is not None

    def announce(
        self, generation: int, *, group: str, ranks: Sequence[int], completed: int, trigger: str
    ) -> None:
        """Send the failure notice to all of W in one message."""
        notice = Notice(
            generation=generation,
            group=group,
            ranks=tuple(ranks),
            by=self._rank,
            frontier=self.boundary.frontier,
            completed=completed,
            trigger=trigger,
        )
        keys = [f"wake/{generation}/{rank}" for rank in range(self._world_size)]
        self._main.multi_set(keys, [json.dumps(dataclasses.asdict(notice))] * len(keys))

    def admit(self, generation: int, *, completed: int) -> dict[int, Standing]:
        """Publish where this member is, and collect the same of all of W.

        Members come by their training threads, the others answer by their control threads.

        Raises:
            Rejected: `reject_deadline`, if a rank did not come in time.
        """
        standing = Standing(frontier=self.boundary.frontier, completed=completed)
        self._publish(self._main, generation, standing)
        # In this order, and `_summon` in the other: a notice that comes late is not left standing.
        self._joined = generation
        self.pending = None
        return self._standings(generation)

    def _publish(self, store: Store, generation: int, standing: Standing) -> None:
        value = json.dumps([standing.frontier, standing.completed])
        store.multi_set([f"standing/{generation}/{self._rank}"], [value])

    def _standings(self, generation: int) -> dict[int, Standing]:
        keys = [f"standing/{generation}/{rank}" for rank in range(self._world_size)]
        self._main.set_timeout(self._patience)
        try:
            values = self._main.multi_get(keys)
        except dist.DistStoreError as error:
            raise Rejected(
                Reason.DEADLINE,
                f"expected all {self._world_size} ranks to come within "
                f"{self._patience.total_seconds():g} s; {error}",
            ) from None
        finally:
            self._main.set_timeout(self._deadline)
        return {
            rank: Standing(frontier=frontier, completed=completed)
            for rank, (frontier, completed) in enumerate(map(json.loads, values))
        }

    def refuse(self, group: str, ranks: Sequence[int], reason: str, *, trigger: str) -> None:
        """End all of W: announce a repair of `group` that has failed already."""
        generation = self.released + 1
        self._main.compare_set(f"claim/{generation}", "", group)
        self.abort(generation, reason)
        self.announce(generation, group=group, ranks=ranks, completed=-1, trigger=trigger)

    def release(self, generation: int, *, members: int) -> None:
        """Report success; return when all `members` have, and W is released.

        Raises:
            Rejected: a peer aborted, or did not report in time.
        """
        key = f"verdict/{generation}"
        try:
            if self._main.add(f"done/{generation}", 1) == members:
                verdict = self._main.compare_set(key, "", _RELEASE).decode()
            else:
                verdict = self._main.get(key).decode()
        except dist.DistStoreError as error:
            raise Rejected(
                Reason.DEADLINE,
                f"expected all {members} members to report generation {generation} within "
                f"{self._deadline.total_seconds():g} s; {error}",
            ) from None
        if verdict != _RELEASE:
            raise Rejected(Reason.PEER_ABORTED, verdict)
        with self._released:
            self.released = max(self.released, generation)
            self._released.notify_all()

    def abort(self, generation: int, reason: str) -> None:
        """Tell all of W that `generation` failed; a verdict that was given stands."""
        try:
            self._main.compare_set(f"verdict/{generation}", "", f"abort: {reason}")
        except dist.DistError:
            return  # without a control plane, peers run into their own deadline

    def rendezvous(self, generation: int, group: str) -> Store:
        """Return a store in which the replacement of `group` meets; new for every generation."""
        return dist.PrefixStore(f"rendezvous/{generation}/{group}/", self._main)

    def close(self) -> None:
        """End the control thread; other ranks are not told."""
        self._closing = True
        try:
            self._main.set(f"wake/{self.released + 1}/{self._rank}", "farewell")
        except dist.DistError:
            return  # the store is gone, and with it what the thread waited for
        self._thread.join(self._deadline.total_seconds())

    # -- the control thread ------------------------------------------------------

    def _serve(self) -> None:
        generation = 1
        try:
            while self._answer(generation):
                generation += 1
        except dist.DistError as error:
            if self.pledged > self.released:
                self._die(f"the control plane was lost during generation {generation}: {error}")

    def _answer(self, generation: int) -> bool:
        key = f"wake/{generation}/{self._rank}"
        self._served.set_timeout(_FOREVER)
        told = self._served.get(key)
        if self._closing:
            return False
        fields = json.loads(told)
        notice = Notice(**{**fields, "ranks": tuple(fields["ranks"])})
        self._on_notice(notice)
        self._limit = notice.frontier
        self.pledged = generation
        if self._rank in notice.ranks:
            self._summon(notice)
        else:
            self._settle()
            # A step that hangs may yet be applied: the frontier it would reach counts.
            frontier = self.boundary.frontier + self.boundary.stepping
            self._publish(self._served, generation, Standing(frontier=frontier))
        verdict = self._verdict(generation)
        if verdict != _RELEASE:
            self._die(verdict)
        self._on_release(notice)
        with self._released:
            self.released = max(self.released, generation)
            self._released.notify_all()
        self._forget(generation - 1)
        # The farewell of a rank that closed meanwhile went to a key that was read already.
        return not self._closing

    def _summon(self, notice: Notice) -> None:
        """Have the training thread join, or refuse for it if it has gone past the failure."""
        if notice.by == self._rank:
            return
        with self._released:
            self.pending = notice
            if self._joined >= notice.generation:
                self.pending = None
            self._released.notify_all()
        if notice.completed < 0:
            return
        boundary = self.boundary
        completed = boundary.completed[notice.group]
        has_begun = boundary.entered and boundary.frontier >= notice.frontier
        if completed > notice.completed or has_begun:
            doing = "begun the next update" if has_begun else "gone on"
            self._served.compare_set(
                f"verdict/{notice.generation}",
                "",
                f"abort: {Reason.ONE_SIDED.value}: rank {self._rank} has completed the collective "
                f"of group {notice.group} that failed on rank {notice.by} after update "
                f"{notice.frontier}, and has {doing}",
            )
        elif self.pending is notice and boundary.waiting == notice.group:
            self._interrupt(notice.group)

    def _verdict(self, generation: int) -> str:
        key = f"verdict/{generation}"
        try:
            self._served.wait([key], self._patience + self._deadline)
        except dist.DistStoreError as error:
            self._die(
                f"expected a verdict on generation {generation} within "
                f"{(self._patience + self._deadline).total_seconds():g} s; {error}"
            )
        return str(self._served.get(key).decode())

    def _settle(self) -> None:
        """Wait until this rank has committed what the members have, and no step is under way.

        It may still be on its way to that commit, and needs nobody for it. If it
        does not get there, what it has is published, and the members refuse.
        """
        boundary = self.boundary
        end = time.monotonic() + self._patience.total_seconds() / 2
        while (boundary.stepping or boundary.frontier < self._limit) and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _forget(self, generation: int) -> None:
        """Delete what generation `generation` left in the store."""
        self._served.delete_key(f"wake/{generation}/{self._rank}")
        self._served.delete_key(f"standing/{generation}/{self._rank}")
        if self._rank == 0:
            self._served.delete_key(f"claim/{generation}")
            self._served.delete_key(f"done/{generation}")
            self._served.delete_key(f"verdict/{generation}")
            # Named by the backend, so they are looked up; torch before 2.9 cannot.
            for key in getattr(self._served, "list_keys", list)():
                if key.startswith(f"rendezvous/{generation}/"):
                    self._served.delete_key(key)

    def _die(self, reason: str) -> NoReturn:
        """End this process: its training thread may be blocked and cannot be asked."""
        self._on_abort(reason)
        os._exit(EXIT_STATUS)
