"""The out-of-band control plane: one thread per rank that answers while training is blocked.

While the members of a failed group repair it, every rank that depends on them sits in a
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

A failure inside an update concerns all training threads of the chain: each must take the
update back. The control thread gets its own out of whatever collective it is blocked in, once it
is in that update; the fence stops one that was about to commit it. One that has committed it
cannot take it back, and the control thread refuses for it.

Ranks outside the chains of the failed group (`accelpact._chains`) hear the notice
and the verdict, so that they count generations as the others do; they neither
pledge nor stop, and do not end when the repair fails.

A rank that takes part and dies gives no answer, and no verdict. Its heartbeat
stops (`accelpact._heartbeat`), and whoever takes part and hears of that gives the
verdict `abort` for all. Outside a repair, a rank that hangs in an update or a
collective while one that it depends on is silent ends its chain the same way.

Per update the cost is a few attribute stores and tests: no collective, no message.
"""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact._answering import Answering
from accelpact._board import Board
from accelpact._chains import Chains
from accelpact._errors import Reason, Rejected, UpdateInterrupted
from accelpact._messages import BOUNDARY, RELEASE, Notice, Standing
from accelpact._vigil import Vigil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed import Store

    from accelpact._boundary import Boundary


class ControlPlane:
    """This rank's end of the control plane.

    Attributes:
        boundary: where this rank is; its training thread keeps that.
        released: generation of the last repair that is over for this rank: it was released, or
            this rank had no part in it.
        pledged: generation for which this rank has promised not to commit.
        pending: the notice of a repair that the training thread must join, or None.
        under_way: the notice of a repair that this rank takes part in, until its verdict.
        limit: frontier past which a rank that has pledged commits nothing.
        joined: generation of the last repair that the training thread has come to.
        heard: generation of the last repair of which the training thread has read the verdict.
        closing: this rank has finished.
        changed: guards what is above where a thread waits for another to change it.
        interrupting: held while this rank's groups are interrupted, which must not go on once the
            training thread has come to replace them.
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
        silence: float = 2.0,
        on_abort: Callable[[str, str], None],
        interrupt: Callable[[Notice], object] = lambda _: None,
        on_notice: Callable[[Notice], None] = lambda _: None,
        on_release: Callable[[Notice], None] = lambda _: None,
    ) -> None:
        """Connect three clients and start the control thread.

        Args:
            store: gives a new client of a store that outlives every rank.
            prefix: separates this attempt of this job from all others.
            rank: this rank's global rank.
            world_size: number of ranks in W.
            boundary: where this rank is.
            deadline: seconds within which every step of a repair must happen.
            patience: seconds for which a rank that has not come yet is waited for.
            silence: seconds after which a rank without a heartbeat counts as silent.
            on_abort: called with the reason, and what was noticed, before this process is ended.
            interrupt: called with the notice of a peer's failure, while the training thread of
                this rank is, or may be, blocked in a collective because of it.
            on_notice: called with every failure notice, by the control thread.
            on_release: called when what a notice told of is repaired, by the control thread.

        Make it on the thread that trains.
        """
        self.boundary = boundary
        self.released = 0
        self.pledged = 0
        self.pending: Notice | None = None
        self.under_way: Notice | None = None
        self.limit = 0
        self.joined = 0
        self.heard = 0
        self.closing = False
        self.changed = threading.Condition()
        self.interrupting = threading.Lock()
        self.rank = rank
        self.world_size = world_size
        self.deadline = timedelta(seconds=deadline)
        self.patience = timedelta(seconds=patience)
        self.on_abort = on_abort
        self.interrupt = interrupt
        self.on_notice = on_notice
        self.on_release = on_release
        self._chains: Chains | None = None
        self._main, aside, answering = (
            Board(
                dist.PrefixStore(prefix, store()),
                rank=rank,
                world_size=world_size,
                deadline=self.deadline,
            )
            for _ in range(3)
        )
        self._aside = aside
        """For calls that never wait, from any thread."""
        self._vigil = Vigil(self, aside.store, silence=silence)
        self._answering = Answering(self, answering)

    def meet(self, groups: Sequence[Sequence[int]], *, envelope: str = "") -> set[str]:
        """Meet all of W once, by the calls that a repair makes; a collective of all ranks.

        It tells which ranks depend on one another, proves that every rank reaches the store before
        a failure depends on it, and pays now for what only first calls pay.

        Args:
            groups: global ranks of this rank's groups of the model.
            envelope: digest of what this rank may do.

        Returns:
            The digests of all ranks.

        Raises:
            Rejected: `reject_deadline`, if a rank does not come.
        """
        everyone = range(self.world_size)
        self._main.rehearse(groups, Standing(frontier=self.boundary.frontier, envelope=envelope))
        envelopes = {each.envelope for each in self._standings(0, everyone).values()}
        self._chains = Chains(self.world_size, self._main.end_rehearsal())
        self._vigil.start()
        return envelopes

    def closure(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all that depend on any of `ranks`: they take part when one of those fails."""
        if self._chains is None:
            return tuple(range(self.world_size))
        return self._chains.closure(ranks)

    # -- the training thread, at every update ---------------------------------

    def before_step(self) -> None:
        """Announce that the optimizer is about to step; wait if this rank has pledged.

        Together with `Answering` this is Dekker's handshake: either the control
        thread sees `stepping` and waits for the commit, or this thread sees the
        pledge and waits for the release.

        Raises:
            UpdateInterrupted: the update must be taken back instead.
        """
        boundary = self.boundary
        boundary.stepping = True
        while self.pledged > self.released and boundary.frontier >= self.limit:
            boundary.stepping = False
            self._await_release(self.pledged)
            self.require_no_discard()
            # Look again: the next generation may have been pledged before this was set.
            boundary.stepping = True

    def require_no_discard(self) -> None:
        """Stop the update under way if peers take it back.

        Raises:
            UpdateInterrupted: they do.
        """
        notice = self.pending
        if notice is not None and notice.discards and notice.frontier == self.boundary.frontier:
            raise UpdateInterrupted(
                f"update {notice.frontier + 1} is taken back, since it failed on rank {notice.by}"
            )

    def _await_release(self, generation: int) -> None:
        with self.changed:
            done = self.changed.wait_for(
                lambda: (
                    self.released >= generation
                    or (self.pending is not None and self.pending.discards)
                ),
                self.deadline.total_seconds(),
            )
        if not done:
            raise self._late(f"generation {generation}")

    def _late(self, what: str) -> Rejected:
        return Rejected(
            Reason.DEADLINE,
            f"expected {what} to be released within {self.deadline.total_seconds():g} s",
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
            owner = self._claim(self._main, generation, group)
            if owner == group:
                return generation
            if not owner:
                continue
            with self.changed:
                done = self.changed.wait_for(
                    functools.partial(self._is_settled, generation),
                    self.deadline.total_seconds(),
                )
            if not done:
                raise self._late(f"the repair of {owner} (generation {generation})")
            notice = self.pending
            if notice is not None and notice.group != group:
                return notice

    def _claim(self, board: Board, generation: int, group: str) -> str:
        """Return which group has `generation`, claimed for `group` if none had; "" if it is over.

        Its keys are deleted once it is over on all ranks, so that it would look unclaimed.
        """
        owner = board.claim(generation, group)
        if self.released < generation:
            return owner
        if owner == group:
            board.disclaim(generation)
        return ""

    def _is_settled(self, generation: int) -> bool:
        return self.released >= generation or self.pending is not None

    def announce(
        self,
        generation: int,
        *,
        group: str,
        ranks: Sequence[int],
        trigger: str,
        completed: int = -1,
        refused: bool = False,
        phase: str = BOUNDARY,
    ) -> None:
        """Send the failure notice to all of W in one message."""
        notice = Notice(
            generation=generation,
            group=group,
            ranks=tuple(ranks),
            by=self.rank,
            frontier=self.boundary.frontier,
            completed=completed,
            trigger=trigger,
            refused=refused,
            phase=phase,
        )
        self._aside.announce(notice)

    def admit(
        self,
        generation: int,
        *,
        ranks: Iterable[int],
        completed: int = -1,
        groups: Iterable[str] = (),
    ) -> dict[int, Standing]:
        """Publish where this member is, and collect the same of all that depend on `ranks`.

        Members come by their training threads, the others answer by their control threads.

        Raises:
            Rejected: `reject_deadline`, if a rank did not come in time.
        """
        standing = Standing(
            frontier=self.boundary.frontier, completed=completed, groups=tuple(groups)
        )
        self._main.publish(generation, standing)
        # In this order, and `Answering` in the other: a notice that comes late does not stay.
        with self.interrupting:
            self.joined = generation
        self.pending = None
        return self._standings(generation, self.closure(ranks))

    def _standings(self, generation: int, ranks: Sequence[int]) -> dict[int, Standing]:
        try:
            return self._main.standings(generation, ranks, patience=self.patience)
        except dist.DistStoreError as error:
            raise Rejected(
                Reason.DEADLINE,
                f"expected all {len(ranks)} ranks that depend on the group to come within "
                f"{self.patience.total_seconds():g} s; {error}",
            ) from None

    def refuse(self, group: str, ranks: Sequence[int], reason: str, *, trigger: str) -> None:
        """End all that depend on `ranks`, this rank among them; from any thread.

        It announces a repair that has failed already, or fails the one under way.

        Args:
            group: name of the group concerned, or what else is.
            ranks: its members, or which ranks are.
            reason: for people.
            trigger: see `Notice.trigger`.
        """
        end = time.monotonic() + self.deadline.total_seconds()
        while not self.try_to_refuse(group, ranks, reason, trigger=trigger):
            generation = self.released + 1
            with self.changed:
                if not self.changed.wait_for(
                    functools.partial(self._is_known, generation), end - time.monotonic()
                ):
                    return

    def try_to_refuse(self, group: str, ranks: Sequence[int], reason: str, *, trigger: str) -> bool:
        """Refuse as `refuse` does, without waiting; whether that was done.

        It is not while a repair that another rank has begun is not announced, or concerns others.
        """
        notice = self.under_way
        if notice is not None:
            return self.abort(notice.generation, reason) != RELEASE
        generation = self.released + 1
        if self._claim(self._aside, generation, group) != group:
            return False
        self.abort(generation, reason)
        self.announce(generation, group=group, ranks=ranks, trigger=trigger, refused=True)
        return True

    def _is_known(self, generation: int) -> bool:
        return self.released >= generation or self.under_way is not None

    def release(self, generation: int, *, members: int) -> None:
        """Report success; return when all `members` have, and W is released.

        Raises:
            Rejected: a peer aborted, or did not report in time.
        """
        try:
            if self._main.count_done(generation) == members:
                verdict = self._main.give_verdict(generation, RELEASE)
            else:
                verdict = self._main.verdict(generation)
        except dist.DistStoreError as error:
            raise Rejected(
                Reason.DEADLINE,
                f"expected all {members} members to report generation {generation} within "
                f"{self.deadline.total_seconds():g} s; {error}",
            ) from None
        if verdict != RELEASE:
            raise Rejected(Reason.PEER_ABORTED, verdict)
        with self.changed:
            self.released = max(self.released, generation)
            self.heard = generation
            self.changed.notify_all()

    def abort(self, generation: int, reason: str) -> str:
        """Tell all that take part that `generation` failed; return the verdict that stands."""
        try:
            verdict = self._aside.give_verdict(generation, f"abort: {reason}")
            if verdict != RELEASE and self.released >= generation:
                self._aside.withdraw_verdict(generation)  # released, and forgotten before this
                return RELEASE
        except dist.DistError:
            return ""  # without a control plane, peers run into their own deadline
        return verdict

    def rendezvous(self, generation: int, group: str) -> Store:
        """Return a store in which the replacement of `group` meets; new for every generation."""
        return self._main.rendezvous(generation, group)

    @property
    def ended(self) -> set[int]:
        """Ranks that have said farewell, as far as this rank has heard."""
        return self._vigil.ended

    def close(self) -> None:
        """Say farewell and end the threads; whoever has no need of this rank is not disturbed."""
        self.closing = True
        patience = self.deadline.total_seconds()
        try:
            # First to the end of a repair that this rank has pledged for, if there is one.
            self._aside.say_farewell(self.released + 1)
            self._answering.join(patience)
            self._vigil.close(patience)
        except dist.DistError:
            return  # the store is gone, and with it what the threads waited for
