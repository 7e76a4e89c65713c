"""What a user holds: the runtime attached to a model and its optimizer."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from accelpact import _communicator, _discard, _replacement, _updates
from accelpact._admission import Admission
from accelpact._auditing import Auditing
from accelpact._boundary import Boundary
from accelpact._capture import Capturing
from accelpact._control import ControlPlane
from accelpact._errors import EXIT_STATUS, Reason, Rejected
from accelpact._events import DIRECTORY_VARIABLE, EventLog
from accelpact._guard import structure
from accelpact._intercept import Intercept
from accelpact._protocol import Repair, repair
from accelpact._rebind import ReferenceIndex
from accelpact._redirect import Redirects
from accelpact._settings import Settings
from accelpact._settling import CollectiveFailed, Settling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import torch
    from torch.distributed import ProcessGroup, Store

    from accelpact._capture import Capture, Loader
    from accelpact._discard import Discard
    from accelpact._frameworks import Framework
    from accelpact._messages import Notice
    from accelpact._updates import Result, Update


class Pact:
    """The runtime's hold on one training job, on one rank. Made by `attach`.

    Attributes:
        boundary: where this rank is.
        captured: what this rank would have to be rewound to, as of its last committed boundary.
        control: this rank's end of the control plane.
        index: places in the model that can name a group.
        watches: what tells a committed boundary.
        joined: repairs since the last commit that had to come before one of this rank's own.
        attempt: the update under way, where it is protected too.
        discards: how often the update under way was taken back.
        redirects: where calls made with retired groups go.
        settling: waits for collectives that have only been issued.
        admission: what may be done about a failure.
        audits: proofs that nothing names a retired group.
        log: the runtime's own record.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        store: Callable[[], Store],
        prefix: str,
        settings: Settings,
        frameworks: Sequence[Framework],
        boundary: Boundary | None,
        loader: Loader | None,
        on_abort: Callable[[str], None],
    ) -> None:
        """Index the model's references and connect to the control plane."""
        self.captured: Capture
        self._capturing = Capturing(loader, model)
        self.settings = settings
        self.boundary = boundary or Boundary()
        self._follows = boundary is None
        self.frameworks = tuple(frameworks)
        self.rank = dist.get_rank()
        self.attempt: Update | None = None
        self.discards = 0
        self.log = EventLog(os.environ.get(DIRECTORY_VARIABLE), rank=self.rank)
        self.index = ReferenceIndex(model, frameworks)
        self.watches = [framework.watch(model) for framework in frameworks]
        self.redirects = Redirects()
        self.joined: dict[str, Repair] = {}
        self.audits = Auditing(self)
        self.admission = Admission(settings.envelope, model, frameworks=frameworks, log=self.log)
        self.optimizer = optimizer
        self.model = model
        self._began = time.monotonic()
        self._on_abort = on_abort
        self._hooks: list[Callable[[], None]] = []
        self._intercept: Intercept | None = None
        self._pid = os.getpid()
        self._rejecting = threading.Lock()
        self._closed = False
        self.control = ControlPlane(
            store,
            prefix=prefix,
            rank=self.rank,
            world_size=dist.get_world_size(),
            boundary=self.boundary,
            deadline=settings.deadline,
            patience=settings.patience,
            silence=settings.silence,
            on_abort=self._aborted,
            interrupt=self._interrupt,
            on_notice=self._noticed,
            on_release=self._released,
        )
        self.settling = Settling(self.control, self.index.synchronizing)

    # -- at every update -----------------------------------------------------------

    @property
    def frontier(self) -> int:
        """Last committed update F."""
        return self.boundary.frontier

    @property
    def generation(self) -> int:
        """Repairs that were released since `attach`."""
        return self.control.released

    def commit(self, frontier: int) -> None:
        """Declare a committed boundary: update `frontier` is applied.

        While a module's own state says that an update is under way, the declaration does not
        count, nothing is captured, and a repair is refused.
        """
        self.boundary.commit(frontier)
        self.joined.clear()
        self.discards = 0
        if structure(self.watches):
            self.boundary.entered = True
        else:
            self.captured = self._capturing.take(frontier)

    def begin(self, update: Update | None = None) -> None:
        """Note that an attempt at the next update begins, and what that would be rewound to.

        If peers have taken it back meanwhile, this rank does so first.
        """
        self.attempt = update
        self._began = time.monotonic()
        self.captured = self._capturing.take(self.frontier)
        # Not only from the forward pass on: `fully_shard` gathers before hooks are called that
        # tell of one. And before it looks: the control thread leaves a notice, then reads this.
        self.boundary.entered = True
        while (notice := self.control.pending) is not None and notice.discards:
            self.discard(None)
            self.boundary.entered = True

    def end(self, update: Update) -> None:
        """Note that the attempt is over, however it went."""
        if self.attempt is update:
            self.attempt = None

    def updates(self, total: int) -> Iterator[Update]:
        """Yield attempts at updates until `total` are committed, those before `attach` included.

        Every attempt is a context around all of its update::

            for update in pact.updates(1000):
                with update:
                    train(batches[update.index])

        A collective that fails in it is not seen outside: the update is taken back on all ranks
        that depend on one another, the groups are replaced, and it is attempted again.
        """
        return _updates.updates(self, total)

    def protect(self, step: Callable[..., Result]) -> Callable[..., Result]:
        """Decorate a function that executes one update: it is called again if that fails.

        It gets the arguments that it had, which it must not change.
        """
        return _updates.protect(self, step)

    def resume(self) -> None:
        """Hook the model, the optimizer and torch.distributed; nothing if that is so already."""
        if self._hooks:
            return
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step).remove,
            self.boundary.notice_step(self.optimizer),
        ]
        if self._follows:
            self._hooks.append(self.boundary.notice_forward(self.model))
        if self.settings.drive == "auto":
            self._hooks.append(self.optimizer.register_step_post_hook(self._after_step).remove)
        if self._intercept is not None:
            self._intercept.install()
            self._hooks.append(self._intercept.remove)

    def pause(self) -> None:
        """Take all hooks off until `resume`: no boundary is recognized, no step is fenced.

        Functions of torch.distributed are the original ones: what fails is not repaired, and
        calls with a retired group go to it.
        """
        for remove in self._hooks:
            remove()
        self._hooks = []

    def _before_step(self, *_: Any) -> None:
        """Let the step begin once all that it reads is there, and no repair stands in its way."""
        try:
            self.settling.await_update()
        except CollectiveFailed as error:
            if self.attempt is None and self.settings.drive == "auto":
                self.refuse(self._struck(str(error)), "unknown", [self.rank], trigger="exception")
            self.boundary.poisoned.update(error.groups)
            raise
        self.control.before_step()

    def _after_step(self, *_: Any) -> None:
        self.commit(self.boundary.frontier + 1)

    # -- repair ----------------------------------------------------------------------

    def repair(self, group: ProcessGroup) -> Repair:
        """Replace `group`, whose collective failed after the last commit.

        Every member of the group calls this, on its own exception or on the
        notice of a peer's; other ranks take part through their control thread.

        Raises:
            Rejected: see `accelpact._protocol.repair`. The process must end with `EXIT_STATUS`.
        """
        done = self.joined.pop(group.group_name, None)
        return done or repair(self, group)

    def mend(self, group: ProcessGroup, notice: Notice | None = None) -> ProcessGroup:
        """Repair `group`, by itself or on a peer's notice; a refusal ends this process.

        Returns:
            The replacement.
        """
        completed = self.boundary.completed[group.group_name]
        try:
            return repair(self, group, completed=completed, notice=notice).group
        except Rejected as rejection:
            self._end(rejection)

    def discard(self, error: BaseException | None) -> Discard:
        """Take back the update under way, which `error` has ended, with all that depend on it.

        Every rank of the chain calls this, on its own exception or on the notice of a peer's; then
        the update can be executed again.

        Raises:
            Rejected: with `drive="manual"`; else the process ends. See `accelpact._discard`.
        """
        try:
            done = _discard.discard(self, error, began=self._began)
        except Rejected as rejection:
            if self.settings.drive == "auto":
                self._end(rejection)
            raise
        self.discards += 1
        self.log.write(
            "discard",
            generation=done.generation,
            group=[repair.group.group_name for repair in done.repairs],
            ranks=list(done.ranks),
            frontier=done.frontier,
            trigger=done.trigger,
            phases_ms=done.phases_ms,
            phase=done.phase,
            update=done.frontier + 1,
            lost_s=done.lost_s,
        )
        self._began = time.monotonic()
        return done

    def poisoned(self) -> set[str]:
        """Names of this rank's groups that cannot be used any more after a failure in an update."""
        model = (group for group in self.index.synchronizing() if group.size() > 1)
        return {group.group_name for group in model} | self.boundary.poisoned

    def _interrupt(self, notice: Notice) -> None:
        """Get the training thread out of the collective that it is blocked in; from another."""
        if not notice.discards:
            _communicator.interrupt_by_name(notice.group)
            return
        waiting = self.boundary.waiting
        if waiting is not None:
            self.boundary.poisoned.add(waiting)
        for name in self.poisoned():
            _communicator.interrupt_by_name(name)

    def join_pending(self) -> None:
        """Take part in repairs that peers have begun, before this rank issues anything more."""
        while (notice := self.control.pending) is not None and not notice.discards:
            self.mend(_communicator.find(notice.group), notice)

    def give_up(self, group: ProcessGroup, error: BaseException) -> NoReturn:
        """End this process and all that depend on it, since an update was struck."""
        rejection = self._struck(
            f"a collective of group {group.group_name} failed: {_first_line(error)}"
        )
        ranks = dist.get_process_group_ranks(group)
        self.refuse(rejection, group.group_name, ranks, trigger="exception")

    def _struck(self, what: str) -> Rejected:
        return Rejected(
            Reason.UNCOMMITTED_BOUNDARY, f"update {self.frontier + 1} was under way when {what}"
        )

    def refuse(
        self, rejection: Rejected, group: str, ranks: Sequence[int], *, trigger: str
    ) -> NoReturn:
        """End this process and all that depend on it, for a reason that concerns `group`."""
        self.reject(rejection.reason, str(rejection), group=group, trigger=trigger)
        self.control.refuse(group, ranks, str(rejection), trigger=trigger)
        self._end(rejection)

    def reject(
        self, reason: Reason, detail: str, *, trigger: str, group: str | None = None
    ) -> None:
        """Record why this rank ends, and what was noticed first; later reasons are not recorded.

        Its training thread and those of the control plane may come to that at the same time.
        """
        if not self._rejecting.acquire(blocking=False):
            return
        self.log.write(
            "reject",
            generation=self.control.released + 1,
            group=group,
            frontier=self.frontier,
            trigger=trigger,
            kind=reason.value,
            reason=detail,
        )

    def _say(self, text: str) -> None:
        """Tell whoever reads the script's output."""
        sys.stdout.flush()
        sys.stderr.write(f"accelpact: {text}\n")
        sys.stderr.flush()

    def _end(self, rejection: Rejected) -> NoReturn:
        """End this process at once: what else runs in it may be blocked and cannot be asked."""
        self._say(
            f"rank {self.rank} ends with status {EXIT_STATUS}, for the launcher to restart the "
            f"job from a checkpoint: {rejection}"
        )
        self.log.close()
        os._exit(EXIT_STATUS)

    # -- called by the control plane's threads -------------------------------------------

    def _aborted(self, reason: str, trigger: str) -> None:
        self.reject(Reason.PEER_ABORTED, reason, trigger=trigger)
        self._on_abort(reason)
        if self.settings.drive == "auto":
            self._say(f"rank {self.rank} ends with status {EXIT_STATUS}: {reason}")

    def _noticed(self, notice: Notice) -> None:
        self.log.write("notice", **_described(notice))

    def _released(self, notice: Notice) -> None:
        self.log.write("release", **_described(notice))

    # -- beginning and end -------------------------------------------------------------------

    def open(self, frontier: int) -> None:
        """Begin at `frontier`: meet all ranks, rehearse a repair, and hook everything.

        Raises:
            Rejected: `reject_deadline`, if not all ranks meet; `reject_unsupported`, if something
                names a group for good that could only be rebuilt, or a backend or a setting of
                this process is not served.
        """
        world = dist.group.WORLD
        assert world is not None
        _communicator.require_served(
            {world, *self.index.synchronizing()}, deadline=self.settings.deadline
        )
        _replacement.require_choices(self.settings.replacement, self.index.obstacles)
        self.boundary.commit(frontier)
        self.captured = self._capturing.take(frontier)
        envelopes = self.control.meet(self.index.model_groups(), envelope=self.admission.digest)
        self.admission.agree(envelopes)
        if dist.get_backend(world) == "gloo":  # other communicators are too dear to build for this
            store = self.control.rendezvous(0, "rehearsal")
            description = _communicator.describe(world)
            self.audits.drop(_communicator.rehearse(description, store=store, rank=self.rank))
        for group in _communicator.registered():
            _communicator.prepare(group)
        if self.settings.drive == "auto":
            self._intercept = Intercept(self)
            atexit.register(self.close)
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        self.resume()
        self.log.write(
            "attach",
            generation=0,
            ranks=list(range(dist.get_world_size())),
            frontier=self.frontier,
            references=len(self.index),
            replacement=self.settings.replacement,
            envelope=self.admission.digest or None,
            objection=self.admission.objection,
        )

    def close(self) -> None:
        """Say farewell to the other ranks, take the hooks off, and let go of retired groups."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.pause()
        if self._intercept is not None:
            self._intercept.close()
            atexit.unregister(self.close)
            sys.excepthook = self._excepthook
        self.audits.join()
        self.control.close()
        self.log.write("exit", generation=self.generation, frontier=self.frontier)
        self.log.close()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell the other ranks when a communication failure ends the script."""
        from accelpact._collectives import is_communication_failure

        self._excepthook(kind, error, trace)
        world = dist.group.WORLD
        if is_communication_failure(error) and world is not None:
            rejection = self._struck(f"a collective failed: {_first_line(error)}")
            self.refuse(rejection, "unknown", [self.rank], trigger="exception")


def _described(notice: Notice) -> dict[str, Any]:
    return {
        "generation": notice.generation,
        "group": notice.group,
        "ranks": list(notice.ranks),
        "frontier": notice.frontier,
        "trigger": notice.trigger,
        "by": notice.by,
    }


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
