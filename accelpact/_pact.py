"""What a user holds: the runtime attached to a model and its optimizer."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelpact import _communicator
from accelpact._communicator import Reaper
from accelpact._control import ControlPlane
from accelpact._frameworks import fsdp1
from accelpact._protocol import Repair, repair
from accelpact._rebind import ReferenceIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ProcessGroup, Store

    from accelpact._frameworks import Framework

FRAMEWORKS: tuple[Framework, ...] = (fsdp1,)
"""Every framework the runtime knows."""


class Pact:
    """The runtime's hold on one training job, on one rank. Made by `attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        control: ControlPlane,
        frameworks: Sequence[Framework],
        deadline: float,
    ) -> None:
        """Index the model's references and hook the optimizer's step."""
        self.control = control
        self.deadline = deadline
        self.rank = dist.get_rank()
        self.index = ReferenceIndex(model, frameworks)
        self.watches = [framework.watch(model) for framework in frameworks]
        self.reaper = Reaper()
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @property
    def frontier(self) -> int:
        """Last committed update F."""
        return self.control.frontier

    @property
    def generation(self) -> int:
        """Repairs that were released since `attach`."""
        return self.control.released

    def rehearse(self) -> None:
        """Go through a repair's steps without a failure, as far as they cost little.

        Raises:
            Rejected: `reject_deadline`, if not all ranks meet.
        """
        self.control.rehearse()
        world = dist.group.WORLD
        if dist.get_backend(world) == "gloo":  # other communicators are too dear to build for this
            store = self.control.rendezvous(0, "rehearsal")
            description = _communicator.describe(world)
            self.reaper.take(_communicator.rehearse(description, store=store, rank=self.rank))
            self.reaper.release()

    def commit(self, frontier: int) -> None:
        """Declare a committed boundary: update `frontier` is applied, gradients are cleared."""
        self.control.commit(frontier)

    def repair(self, group: ProcessGroup) -> Repair:
        """Replace `group`, whose collective failed after the last commit.

        Every member of the group calls this, on its own exception or on the
        notice of a peer's; other ranks take part through their control thread.

        Raises:
            Rejected: see `accelpact._protocol.repair`.
        """
        return repair(self, group)

    def close(self) -> None:
        """Take the hook off, end the control thread, and let go of retired groups."""
        self._hook.remove()
        self.control.close()
        self.reaper.join()

    def _before_step(self, *_: Any) -> None:
        self.control.before_step()


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    store: Callable[[], Store] | None = None,
    prefix: str | None = None,
    frontier: int = 0,
    deadline: float = 30.0,
    frameworks: Sequence[Framework] = FRAMEWORKS,
    on_abort: Callable[[str], None] | None = None,
) -> Pact:
    """Protect a job at its committed boundaries. Every rank calls this once, all meet in it.

    Args:
        model: the wrapped model (FSDP1).
        optimizer: its optimizer; `step` gets a hook, nothing else changes.
        store: gives a new client of a store that outlives every rank; by
            default the launcher's, at MASTER_ADDR and MASTER_PORT.
        prefix: separates this start of this job from others in that store; by
            default the launcher's run id and restart count.
        frontier: last update that is committed already, after a restore.
        deadline: seconds within which each step of a repair must happen.
        frameworks: what knows the private parts of the model.
        on_abort: called with the reason just before this process is ended
            because a repair of its peers failed.

    Raises:
        Rejected: `reject_deadline`, if not every rank comes within `deadline`.
    """
    control = ControlPlane(
        store or _launcher_store,
        prefix=prefix or _launcher_prefix(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        deadline=deadline,
        on_abort=on_abort or (lambda _: None),
    )
    control.commit(frontier)
    # FSDP1's constructor leaves its arguments, the groups among them, in reference cycles. What
    # holds a retired group keeps its threads and sockets, until the collector happens to come by.
    gc.collect()
    pact = Pact(model, optimizer, control=control, frameworks=frameworks, deadline=deadline)
    pact.rehearse()
    return pact


def _launcher_store() -> Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
    )


def _launcher_prefix() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    return f"accelpact/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
