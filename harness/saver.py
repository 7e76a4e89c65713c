"""Saves checkpoints while training goes on, in the mode that is asked for.

What is written beside training is written through a group of its own, so that no collective of it
meets one of training. When a rank's part of `torch.distributed.checkpoint.save` returns, every rank
has written its own: rank 0 can then give the checkpoint its final name without asking anybody. The
digests of the state go through the store of the attempt.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from harness import checkpoint, staging
from harness.spec import NO_CHECKPOINT
from harness.uploader import Uploader
from strategies import root_cause

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from harness.job import TrainingJob

DEADLINE_S = 120.0
"""For one collective of an upload."""
_ROOTS_S = 10.0
"""For digests that every rank has told before it began to write."""
_PATIENCE_S = 2 * DEADLINE_S
"""For a whole upload, before training goes on without it."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Pending:
    """A checkpoint that is being written."""

    update: int
    mode: str
    folder: Path
    began: float
    over: threading.Event = dataclasses.field(default_factory=threading.Event)


class Saver:
    """The checkpoints of one attempt of one rank. All ranks make the same calls."""

    def __init__(self, job: TrainingJob, folder: Path, *, modes: Collection[str]) -> None:
        """Make the group of the uploads, if any mode needs it."""
        self._job = job
        self._folder = folder
        self._rank, self._size = dist.get_rank(), dist.get_world_size()  # of one launcher's ranks
        prefix = f"checkpoint/{folder.name}/{job.attempt.index}"
        self._store = dist.PrefixStore(prefix, job.attempt.store())
        self._group: dist.ProcessGroup | None = None
        if any(mode in staging.ASYNC for mode in modes):
            timeout = timedelta(seconds=DEADLINE_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._uploader: Uploader | None = None
        self._stager: staging.BufferedStager | None = None
        self._pending: _Pending | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        self._broken = ""
        """Why this attempt saves no more."""

    def start(self, due: Collection[str]) -> None:
        """Start the process that writes, if one of the modes that are `due` needs it.

        torch starts it for the first save, beside training; so this one saves nothing that anybody
        would restore.
        """
        if not any(mode in staging.IN_A_PROCESS for mode in due):
            return
        self._uploader = Uploader()
        pending = self._expect(0, "async-process")
        self._upload({f"rank{self._rank}": torch.zeros(1)}, pending, stager=None)

    def save(self, mode: str, root: str) -> None:
        """Save the current frontier, whose digest is `root`; return when training can go on.

        A checkpoint appears under its final name only once every rank has written its part. What
        goes wrong with one that is written beside training is recorded and ends nothing.
        """
        job = self._job
        began = time.monotonic()
        job.emit("checkpoint_begin", update=job.frontier, mode=mode)
        self.settle()  # buffers and uploader are one
        waited = time.monotonic() - began
        if mode == "sync":
            self._save_now(root, began)
        elif mode != NO_CHECKPOINT and self._broken:
            job.emit("checkpoint_failed", update=job.frontier, mode=mode, reason=self._broken)
        elif mode != NO_CHECKPOINT:
            self._save_beside(mode, root, began)
        seconds = time.monotonic() - began
        job.emit("checkpoint", update=job.frontier, mode=mode, seconds=seconds, waited=waited)

    def _save_now(self, root: str, began: float) -> None:
        pending = self._expect(self._job.frontier, "sync", began=began)
        self._tell_root(pending.update, root)
        try:
            dcp.save(checkpoint.collect(self._job), checkpoint_id=pending.folder)
        except CheckpointException as error:  # the same on every rank; not an Exception
            self._finish(pending, error)
        else:
            self._finish(pending, None)
        dist.barrier()

    def _save_beside(self, mode: str, root: str, began: float) -> None:
        """Copy the state and start to write the copy."""
        job = self._job
        pending = self._expect(job.frontier, mode, began=began)
        state = staging.portable(
            checkpoint.collect(job), groups=job.groups, device=job.attempt.device.type
        )
        if mode == "async-cached" and self._stager is None:
            self._stager = staging.BufferedStager(pinned=job.attempt.device.type == "cuda")
        self._tell_root(pending.update, root)
        self._upload(state, pending, stager=self._stager if mode == "async-cached" else None)

    def _expect(self, update: int, mode: str, *, began: float | None = None) -> _Pending:
        folder = checkpoint.scratch(self._folder, update, self._job.attempt.index)
        began = time.monotonic() if began is None else began
        return _Pending(update=update, mode=mode, folder=folder, began=began)

    def _upload(
        self, state: dict[str, Any], pending: _Pending, *, stager: staging.BufferedStager | None
    ) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        in_process = pending.mode in staging.IN_A_PROCESS
        kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        given: dict[str, Any] = {} if stager is None else {"async_stager": stager}
        found = dcp.async_save(
            state,
            checkpoint_id=pending.folder,
            process_group=self._group,
            async_checkpointer_type=kind,
            **given,
        )
        future: Future[Any] = getattr(found, "upload_completion", found)
        self._pending = pending
        if self._uploader is not None:
            self._uploader.attend(future)
        future.add_done_callback(lambda done: self._finish(pending, done.exception()))

    def _tell_root(self, update: int, root: str) -> None:
        self._store.set(f"{update}/{self._rank}", root)

    def _roots(self, update: int) -> list[str]:
        keys = [f"{update}/{rank}" for rank in range(self._size)]
        self._store.wait(keys, timedelta(seconds=_ROOTS_S))
        return [self._store.get(key).decode() for key in keys]

    def _finish(self, pending: _Pending, error: BaseException | None) -> None:
        """Publish what was written, or record why it was not; in whichever thread knows first."""
        with self._lock:
            if not self._abandoned:
                try:
                    self._conclude(pending, error)
                except Exception as failed:  # noqa: BLE001  nobody above would look at it
                    self._fail(pending, failed)
        pending.over.set()

    def _conclude(self, pending: _Pending, error: BaseException | None) -> None:
        job = self._job
        if error is not None:
            self._fail(pending, error)
        elif pending.update == 0:
            if self._rank == 0:
                shutil.rmtree(pending.folder, ignore_errors=True)
        elif self._rank == 0:
            update = pending.update
            size = checkpoint.publish(pending.folder, update=update, roots=self._roots(update))
            job.emit(
                "checkpoint_complete",
                update=update,
                mode=pending.mode,
                bytes=size,
                seconds=time.monotonic() - pending.began,
            )

    def _fail(self, pending: _Pending, error: BaseException) -> None:
        """Record it. What all ranks were told alike spoils nothing but this checkpoint."""
        reason = _reason(error)
        if not isinstance(error, CheckpointException):
            self._broken = f"an earlier save has failed: {reason}"
        if pending.update > 0:
            self._job.emit(
                "checkpoint_failed", update=pending.update, mode=pending.mode, reason=reason
            )
        if self._rank == 0:
            shutil.rmtree(pending.folder, ignore_errors=True)

    def settle(self) -> None:
        """Wait, a bounded time, until nothing is being written."""
        pending = self._pending
        if pending is None:
            return
        if not pending.over.wait(_PATIENCE_S):
            error = TimeoutError(f"it was not written within {_PATIENCE_S:g} s")
            with self._lock:
                self._fail(pending, error)
        self._pending = None

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end what writes."""
        if self._pending is not None and self._pending.update > 0:
            self.settle()
        self.abandon()

    def abandon(self) -> None:
        """Give up what is being written: it stays invisible, and its process ends."""
        with self._lock:
            self._abandoned = True
        if self._uploader is not None:
            self._uploader.end()
            self._uploader = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _reason(error: BaseException) -> str:
    """One line; of a failure that torch has gathered from the ranks, the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {root_cause(cause)}"
    return root_cause(error)
