"""The loop: update, commit, digest, checkpoint, boundary; and what happens on a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

import accelpact
from harness import checkpoint, compiling, drift
from harness.faults import Boundary, CollectiveFailed, Notices, halting
from harness.job import TrainingJob
from harness.layout import CHECKPOINTS, EVENTS, REPLICA
from harness.records import Event, read_lines
from harness.saver import Saver
from harness.workload import chosen, hsdp
from harness.workload.data import Loader
from strategies import Failure, Outcome, root_cause

if TYPE_CHECKING:
    from pathlib import Path

    from harness.events import Recorder
    from harness.spec import RunSpec
    from strategies import Attempt, Strategy


class RankMustEnd(BaseException):
    """The strategy wants this process to end; not an Exception, so nothing swallows it."""


class Trainer:
    """One attempt of one rank: a job, the strategy that protects it, and the loop."""

    def __init__(
        self,
        run: RunSpec,
        strategy: Strategy,
        attempt: Attempt,
        *,
        recorder: Recorder,
        folder: Path,
    ) -> None:
        """Connect, build model, optimizer and data, restore the last checkpoint if any."""
        self._run = run
        self._strategy = strategy
        self._folder = folder
        self._checkpoints = _checkpoints(folder, attempt)
        self._notices = Notices(
            run.spec.schedule.faults if run.faulted else (), store=attempt.store()
        )
        self._boundary = Boundary(strategy, self._notices)
        groups = strategy.connect(attempt)
        recorder.emit("connected")
        spec = run.spec
        model, optimizer, training = hsdp.build(
            chosen.maker(spec),
            layout=attempt.layout,
            groups=groups,
            device=attempt.device,
            dtype=getattr(torch, spec.dtype),
            activation_checkpointing=spec.activation_checkpointing,
            seed=spec.seed,
            wrapper=spec.wrapper,
            compiled=spec.compiled,
        )
        loader = Loader(
            training,
            rank=attempt.layout.rank,
            world_size=attempt.layout.world_size,
            seed=spec.seed,
            device=attempt.device,
        )
        self.job = TrainingJob(
            model=model,
            optimizer=optimizer,
            training=training,
            loader=loader,
            attempt=attempt,
            groups=groups,
            recorder=recorder,
        )
        self._capturing = accelpact.Capturing(loader, model)
        self._counting = (
            compiling.Counting(folder, rank=attempt.layout.rank) if spec.count_compiled else None
        )
        recorder.emit("built")
        self._saver = Saver(self.job, self._checkpoints, modes=spec.saving.modes)
        self._restore()
        strategy.attach(self.job)

    def _restore(self) -> None:
        found = checkpoint.chosen(self._checkpoints)
        if found is not None:
            checkpoint.restore(self.job, found)
            self.job.emit("restored", update=self.job.frontier)

    def loop(self) -> None:
        """Train until the last update is committed, and write what the run was for."""
        job, last = self.job, self._run.spec.schedule.updates
        modes = (self._mode(update) for update in range(job.frontier + 1, last + 1))
        self._saver.start({mode for mode in modes if mode is not None})
        while job.frontier < last:
            try:
                committed = self._update()
            except Exception as error:  # noqa: BLE001  the strategy decides
                self._tell(error)
                self._recover(Failure(phase="update", group=None, error=error), error)
                job.emit("discard", update=job.frontier + 1)
                continue
            if not committed:
                continue
            self._save()
            self._pass_boundary()
        drift.save_state(job.state(), self._folder, rank=job.attempt.layout.rank)
        job.emit("finish", update=job.frontier)
        self._saver.close()
        self._strategy.settle(job)
        self._measure("after")

    def _mode(self, update: int) -> str | None:
        """The mode in which update `update` is saved, None if it is not."""
        spec = self._run.spec
        return spec.saving.mode_after(update, first=spec.schedule.checkpoint_at)

    def _save(self) -> None:
        """Save a checkpoint if one is due."""
        mode = self._mode(self.job.frontier)
        if mode is not None:
            self._saver.save(mode, self._root)

    def _update(self) -> bool:
        """Execute and commit one update, and digest the state it leads to.

        Returns:
            Whether it was committed, and not taken back.
        """
        job, strategy = self.job, self._strategy
        known = job.frontier
        strategy.begin(job)
        if job.frontier > known:
            self._make_up()
        job.emit("begin", update=job.frontier + 1)
        before = self._capturing.take(job.frontier) if strategy.gates_updates else None
        own = self._run.spec.own
        with halting(
            job,
            self._notices,
            microbatches=job.training.accumulation,
            at=own.found.get("halts_at") if own is not None else None,
        ):
            update = hsdp.train_update(
                job.model,
                job.optimizer,
                job.loader,
                job.training,
                wrapper=self._run.spec.wrapper,
                may_commit=lambda: strategy.may_commit(job),
            )
        if update is None:
            assert before is not None
            self._take_back(before)
            return False
        job.frontier += 1
        self._strategy.committed(job)
        self._root = self._record(tokens=update.tokens, samples=update.samples)
        if self._counting is not None:
            self._counting.record(job.frontier, job.groups)
        if job.frontier == 1:
            self._measure("before")
        self._loss = update.loss
        return True

    def _record(self, *, tokens: int | None, samples: list[int]) -> str:
        """Write that the update at the frontier is committed, and the state; return its root."""
        job = self.job
        job.emit(
            "commit",
            update=job.frontier,
            tokens=tokens,
            samples=samples,
            cursor=job.loader.cursor,
        )
        digest = job.digest()
        job.recorder.digests(job.frontier, digest.root, digest.tensors)
        return digest.root

    def _make_up(self) -> None:
        """Write what a peer's state implies if this rank ended before it could.

        It had contributed to an update that others then committed. So it has consumed its samples,
        which the cursor tells.
        """
        job = self.job
        rank, reached = job.attempt.layout.rank, job.frontier
        written = read_lines(self._folder / EVENTS, Event)
        if any((each.event, each.rank, each.update) == ("commit", rank, reached)
               for each in written):  # fmt: skip
            return
        number, per_sample = job.training.samples_per_update, job.training.tokens
        self._record(
            tokens=None if per_sample is None else number * per_sample,
            samples=job.loader.places(job.loader.cursor - number, number),
        )

    def _take_back(self, before: accelpact.Capture) -> None:
        """Undo the update that the strategy did not let commit: no gradient is left of it."""
        job = self.job
        error = self._strategy.swallowed(job)
        if error is not None:
            self._tell(error)
        before.restore()
        job.emit("discard", update=job.frontier + 1)

    def _tell(self, error: BaseException) -> None:
        """Record a failure inside an update, and let the absent rank know."""
        message = root_cause(error)
        self.job.emit("failure", update=self.job.frontier + 1, error=message)
        self._notices.tell(self.job, message)

    def _pass_boundary(self) -> None:
        """Log the loss; recover as often as that fails, and log it again."""
        job = self.job
        while True:
            group = job.groups.replicate
            try:
                loss = self._boundary.reduce_loss(job, self._loss)
            except CollectiveFailed as error:
                # Not kept in this frame, which the error leads back to: it names the old group.
                outcome = self._recover(Failure(phase="boundary", group=group, error=error), error)
                if outcome is Outcome.FORGONE:
                    return
            else:
                job.emit("logged", update=job.frontier, loss=loss)
                return

    def _recover(self, failure: Failure, error: Exception) -> Outcome:
        """Ask the strategy, and do what it answers."""
        job = self.job
        job.emit("recover", update=job.frontier)
        outcome = self._strategy.recover(job, failure)
        job.emit("recovered", update=job.frontier, outcome=outcome.value)
        if outcome is Outcome.RERAISE:
            raise error
        if outcome is Outcome.EXIT:
            raise RankMustEnd from error
        return outcome

    def _measure(self, at: str) -> None:
        """Record what this process holds."""
        process, device = psutil.Process(), self.job.attempt.device
        self.job.recorder.resources(
            at=at,
            threads=process.num_threads(),
            descriptors=process.num_fds(),
            rss_bytes=process.memory_info().rss,
            groups=accelpact.num_registered_groups(),
            device_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
        )

    def abandon(self) -> None:
        """Give up what goes on beside training: this attempt has failed, another may follow."""
        self._saver.abandon()

    def tear_down(self) -> None:
        """Let go of groups and threads."""
        self._strategy.close(self.job)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.job.emit("closed")


def _checkpoints(folder: Path, attempt: Attempt) -> Path:
    """Where those checkpoints are that the ranks of one launcher write together."""
    own = folder / CHECKPOINTS
    if attempt.settings.launchers == "world":
        return own
    return own / REPLICA.format(attempt.layout.replica)
