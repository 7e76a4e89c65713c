"""The out-of-band control plane: one thread per rank that answers while training is blocked.

While the members of a failed group repair it, every other rank sits in a
collective of the next update and cannot come to a barrier. So each rank has a
control thread with a store client of its own. It waits for the wake-up key of
the next generation; when that appears it *pledges* that its rank commits
nothing past the members' frontier F until the generation is released, and
publishes its own frontier once that is F and no optimizer step is under way.
The training thread is not needed for this: a blocked collective has released
the interpreter's lock.

Per update the cost is two attribute stores and two tests: no collective, no
message.

Keys, below a prefix of the job's attempt, g being the generation:

====================  =====================================================
`claim/<g>`           the group that generation g repairs
`wake/<g>/<rank>`     the failure notice for `rank` (or a farewell, at close)
`frontier/<g>/<rank>` the pledge: last committed update of `rank`
`done/<g>`            counts members whose replacement works
`verdict/<g>`         `release`, or `abort` with the reason
`rendezvous/<g>/...`  where the members of the replacement meet
====================  =====================================================

Keys of generation g - 1 are deleted once g is released.
"""

from __future__ import annotations

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

_RELEASE = "release"
_FOREVER = timedelta(days=30)
_POLL_S = 50e-6


class ControlPlane:
    """This rank's end of the control plane.

    Attributes:
        frontier: last committed update F.
        released: generation of the last repair that was released.
        pledged: generation for which this rank has promised not to commit.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        *,
        prefix: str,
        rank: int,
        world_size: int,
        deadline: float,
        on_abort: Callable[[str], None],
    ) -> None:
        """Connect two clients and start the control thread.

        Args:
            store: gives a new client of a store that outlives every rank.
            prefix: separates this attempt of this job from all others.
            rank: this rank's global rank.
            world_size: number of ranks in W.
            deadline: seconds within which every step of a repair must happen.
            on_abort: called with the reason just before this process is ended.
        """
        self.frontier = 0
        self.released = 0
        self.pledged = 0
        self._limit = 0
        self._stepping = False
        self._closing = False
        self._rank = rank
        self._world_size = world_size
        self._deadline = timedelta(seconds=deadline)
        self._on_abort = on_abort
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
        self._main.multi_set([f"frontier/0/{self._rank}"], [str(self.frontier)])
        self.frontiers(0)
        self._main.add("done/0", 1)

    # -- the training thread, at every update ---------------------------------

    def before_step(self) -> None:
        """Announce that the optimizer is about to step; wait if this rank has pledged.

        Together with `_settle` this is Dekker's handshake: either the control
        thread sees `_stepping` and waits for the commit, or this thread sees the
        pledge and waits for the release.
        """
        self._stepping = True
        while self.pledged > self.released and self.frontier >= self._limit:
            self._stepping = False
            self._await_release(self.pledged)
            # Look again: the next generation may have been pledged before this was set.
            self._stepping = True

    def commit(self, frontier: int) -> None:
        """Make `frontier` the last committed update."""
        self.frontier = frontier
        self._stepping = False

    @property
    def declared(self) -> bool:
        """Whether every optimizer step has been committed."""
        return not self._stepping

    def _await_release(self, generation: int) -> None:
        with self._released:
            done = self._released.wait_for(
                lambda: self.released >= generation, self._deadline.total_seconds()
            )
        if not done:
            raise Rejected(
                Reason.DEADLINE,
                f"expected generation {generation} to be released within "
                f"{self._deadline.total_seconds():g} s",
            )

    # -- the members of the failed group, during a repair ----------------------

    def claim(self, group: str) -> int:
        """Agree with the other members of `group` on the generation of its repair.

        Groups that fail together are repaired one after the other: the first
        to claim a generation has it, the others wait for its release and claim
        the next.

        Raises:
            Rejected: `reject_deadline`, if the repair before this one is not released in time.
        """
        while True:
            generation = self.released + 1
            owner = self._main.compare_set(f"claim/{generation}", "", group).decode()
            if owner == group:
                return generation
            self._await_release(generation)

    def announce(self, generation: int, *, group: str, ranks: Sequence[int]) -> None:
        """Send the failure notice to all of W in one message."""
        notice = json.dumps(
            {"group": group, "ranks": list(ranks), "from": self._rank, "frontier": self.frontier}
        )
        keys = [f"wake/{generation}/{rank}" for rank in range(self._world_size)]
        self._main.multi_set(keys, [notice] * len(keys))

    def frontiers(self, generation: int) -> list[int]:
        """Collect the pledges of all of W.

        Raises:
            Rejected: `reject_deadline`, if a rank did not pledge in time.
        """
        keys = [f"frontier/{generation}/{rank}" for rank in range(self._world_size)]
        try:
            return [int(value) for value in self._main.multi_get(keys)]
        except dist.DistStoreError as error:
            raise Rejected(
                Reason.DEADLINE,
                f"expected the frontier of all {self._world_size} ranks within "
                f"{self._deadline.total_seconds():g} s; {error}",
            ) from None

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
        notice = self._served.get(key)
        if self._closing:
            return False
        self._limit = json.loads(notice)["frontier"]
        self.pledged = generation
        self._settle()
        # A step that hangs may yet be applied: the frontier it would reach counts.
        frontier = self.frontier + self._stepping
        self._served.set(f"frontier/{generation}/{self._rank}", str(frontier))
        verdict = self._verdict(generation)
        if verdict != _RELEASE:
            self._die(verdict)
        with self._released:
            self.released = max(self.released, generation)
            self._released.notify_all()
        self._forget(generation - 1)
        # The farewell of a rank that closed meanwhile went to a key that was read already.
        return not self._closing

    def _verdict(self, generation: int) -> str:
        key = f"verdict/{generation}"
        try:
            self._served.wait([key], self._deadline)
        except dist.DistStoreError as error:
            self._die(
                f"expected a verdict on generation {generation} within "
                f"{self._deadline.total_seconds():g} s; {error}"
            )
        return str(self._served.get(key).decode())

    def _settle(self) -> None:
        """Wait until this rank has committed what the members have, and no step is under way.

        It may still be on its way to that commit, and needs nobody for it. If it
        does not get there, what it has is published, and the members refuse.
        """
        end = time.monotonic() + self._deadline.total_seconds() / 2
        while (self._stepping or self.frontier < self._limit) and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _forget(self, generation: int) -> None:
        """Delete what generation `generation` left in the store."""
        self._served.delete_key(f"wake/{generation}/{self._rank}")
        self._served.delete_key(f"frontier/{generation}/{self._rank}")
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
