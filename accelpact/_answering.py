"""The control thread: it answers for its rank while the training thread is blocked."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from accelpact._errors import EXIT_STATUS, Reason
from accelpact._messages import RELEASE, Notice, Standing

if TYPE_CHECKING:
    from accelpact._board import Board
    from accelpact._control import ControlPlane

_POLL_S = 50e-6
_LOOK_S = 0.005
_AGAIN_S = 0.25
"""Seconds after which a training thread that was called back and has not come is called again."""


class Answering:
    """The control thread of one rank. What it decides is told in `accelpact._control`."""

    def __init__(self, plane: ControlPlane, board: Board) -> None:
        """Start the thread.

        Args:
            plane: the control plane that this belongs to.
            board: a client that nobody else uses.
        """
        self._plane = plane
        self._board = board
        self._called_back = 0
        self._thread = threading.Thread(target=self._serve, name="accelpact-control", daemon=True)
        self._thread.start()

    def join(self, patience: float) -> None:
        """Wait `patience` seconds at most for the thread to end."""
        self._thread.join(patience)

    def _serve(self) -> None:
        generation = 1
        try:
            while self._answer(generation):
                generation += 1
        except dist.DistError as error:
            if self._plane.pledged > self._plane.released:
                self._die(f"the control plane was lost during generation {generation}: {error}")

    def _answer(self, generation: int) -> bool:
        """Wait for the next generation and see it through; whether there is to be another."""
        notice = self._board.await_notice(generation)
        if notice is None or self._plane.closing:
            return False
        self._plane.on_notice(notice)
        if self._plane.rank in self._plane.closure(notice.ranks):
            self._take_part(notice)
            verdict: str | None = self._verdict(notice)
        else:
            verdict = self._overhear(generation)
        if verdict == RELEASE:
            self._plane.on_release(notice)
        with self._plane.changed:
            self._plane.under_way = None
            self._plane.released = max(self._plane.released, generation)
            self._plane.changed.notify_all()
            if self._plane.rank in notice.ranks:
                # Else the verdict could be gone before the training thread reads it too.
                self._plane.changed.wait_for(
                    lambda: self._plane.heard >= generation, self._plane.deadline.total_seconds()
                )
        self._board.forget(generation, ended=self._plane.ended)
        # The farewell of a rank that closed meanwhile went to a key that was read already.
        return not self._plane.closing

    def _take_part(self, notice: Notice) -> None:
        self._plane.limit = notice.frontier
        self._plane.pledged = notice.generation
        with self._plane.changed:
            self._plane.under_way = notice
            self._plane.changed.notify_all()
        if notice.refused:
            return
        if self._plane.rank in notice.ranks:
            self._summon(notice)
            return
        self._settle()
        # A step that hangs may yet be applied: the frontier it would reach counts.
        frontier = self._plane.boundary.frontier + self._plane.boundary.stepping
        self._board.publish(notice.generation, Standing(frontier=frontier))

    def _overhear(self, generation: int) -> str | None:
        """Wait until a repair of others is over, however it ends; None if nobody says."""
        try:
            patience = self._plane.patience + self._plane.deadline
            return self._board.verdict(generation, patience=patience)
        except dist.DistStoreError:
            return None

    def _summon(self, notice: Notice) -> None:
        """Have the training thread join, or refuse for it if it has gone past the failure."""
        if notice.by == self._plane.rank:
            return
        with self._plane.changed:
            self._plane.pending = notice
            if self._plane.joined >= notice.generation:
                self._plane.pending = None
            self._plane.changed.notify_all()
        if notice.discards:
            self._call_back(notice)
            return
        if notice.completed < 0:
            return
        boundary = self._plane.boundary
        completed = boundary.completed[notice.group]
        has_begun = boundary.entered and boundary.frontier >= notice.frontier
        if completed > notice.completed or has_begun:
            doing = "begun the next update" if has_begun else "gone on"
            self._plane.abort(
                notice.generation,
                f"{Reason.ONE_SIDED.value}: rank {self._plane.rank} has completed the collective "
                f"of group {notice.group} that failed on rank {notice.by} after update "
                f"{notice.frontier}, and has {doing}",
            )
        elif self._plane.pending is notice and boundary.waiting == notice.group:
            self._interrupt(notice)

    def _call_back(self, notice: Notice) -> None:
        """Get the training thread out of an update, or refuse for it if that is committed.

        One that has not begun the update is on its way there by itself, and may be in a collective
        that its peers have completed and that must not be disturbed.
        """
        boundary = self._plane.boundary
        end = time.monotonic() + self._plane.patience.total_seconds() / 2
        while (
            self._plane.pending is notice
            and boundary.frontier <= notice.frontier
            and (boundary.declared or boundary.stepping or boundary.frontier < notice.frontier)
            and time.monotonic() < end
        ):
            time.sleep(_POLL_S)
        if self._plane.pending is not notice:
            return
        if boundary.frontier > notice.frontier or boundary.stepping:
            self._plane.abort(
                notice.generation,
                f"{Reason.ONE_SIDED.value}: rank {self._plane.rank} has committed update "
                f"{notice.frontier + 1}, which failed on rank {notice.by}",
            )
        else:
            self._called_back = notice.generation
            self._interrupt(notice)

    def _interrupt(self, notice: Notice) -> None:
        with self._plane.interrupting:
            if self._plane.joined < notice.generation:
                self._plane.interrupt(notice)

    def _verdict(self, notice: Notice) -> str:
        """Wait for the verdict; end this process if it is not the release."""
        patience = self._plane.patience + self._plane.deadline
        end = time.monotonic() + patience.total_seconds()
        self._call_again(notice, end)
        try:
            left = timedelta(seconds=max(end - time.monotonic(), _POLL_S))
            verdict = self._board.verdict(notice.generation, patience=left)
        except dist.DistStoreError as error:
            self._die(
                f"expected a verdict on generation {notice.generation} within "
                f"{patience.total_seconds():g} s; {error}",
                trigger=notice.trigger,
            )
        if verdict != RELEASE:
            self._die(verdict, trigger=notice.trigger)
        return verdict

    def _call_again(self, notice: Notice, end: float) -> None:
        """Interrupt a training thread that was called back until it comes: a cut can miss.

        It is asked of the kernel which connections there are, while other threads open and close
        some; and the thread may have been between two collectives. A verdict, or the time `end`,
        makes further calls useless.
        """
        again = time.monotonic() + _AGAIN_S
        while self._called_back == notice.generation > self._plane.joined:
            now = time.monotonic()
            if now >= end or self._board.has_verdict(notice.generation):
                return
            if now >= again:
                self._interrupt(notice)
                again = now + _AGAIN_S
            time.sleep(_LOOK_S)

    def _settle(self) -> None:
        """Wait until this rank has committed what the members have, and no step is under way.

        It may still be on its way to that commit, and needs nobody for it. If it
        does not get there, what it has is published, and the members refuse.
        """
        boundary, limit = self._plane.boundary, self._plane.limit
        end = time.monotonic() + self._plane.patience.total_seconds() / 2
        while (boundary.stepping or boundary.frontier < limit) and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _die(self, reason: str, *, trigger: str = "store") -> NoReturn:
        """End this process: its training thread may be blocked and cannot be asked."""
        self._plane.on_abort(reason, trigger)
        os._exit(EXIT_STATUS)
