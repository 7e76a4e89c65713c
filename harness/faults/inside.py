"""`absent@forward` and `absent@backward`: a rank halts in the middle of an update.

It halts at the module in the middle of the model, in the microbatch whose gradients are averaged,
until a peer's collective has failed for it. Then it goes on, and what becomes of its own
collectives is for them to say. `kill@forward` and `kill@backward` end it there.

`error@step`: the optimizer's step raises what a failed collective raises, and has written the
weights by then. Who executes the update again applies it twice.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from accelpact._state import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from harness.faults.notices import Notices
    from harness.job import TrainingJob
    from harness.spec import Fault


@contextlib.contextmanager
def halting(
    job: TrainingJob, notices: Notices, *, microbatches: int, at: str | None = None
) -> Iterator[None]:
    """Halt this rank in the update that the body executes, if a fault is planned for it.

    Args:
        job: of this rank.
        notices: knows what is planned.
        microbatches: of an update.
        at: name of the module in the bare model; None for the one in the middle.
    """
    fault = notices.due(job)
    if fault is None or not fault.inside:
        yield
        return
    halt = _Halt(job, notices, fault, microbatches)
    module = _middle(job.model) if at is None else _named(job.model, at)
    if fault.phase == "step":
        handle = job.optimizer.register_step_post_hook(halt.in_step)
    elif fault.phase == "forward":
        handle = module.register_forward_pre_hook(halt.before)
    else:
        handle = module.register_forward_hook(halt.after)
    try:
        yield
    finally:
        handle.remove()


def _middle(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module in the middle, of those that hold parameters and no other module."""
    compiled = _compiled(model)
    leaves = [
        module
        for module in model.modules()
        if module not in compiled
        and not any(module.children())
        and any(True for _ in module.parameters(recurse=False))
    ]
    return leaves[len(leaves) // 2]


def _named(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return the module that the bare model called `name`, whatever it is wrapped in.

    If that is compiled, it is the one in the middle of the others.
    """
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = {clean_name(f"{each}.").rstrip("."): module for each, module in bare.named_modules()}
    module = found[name]  # of those with this name the innermost
    return _middle(model) if module in _compiled(model) else module


def _compiled(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return what is in compiled code, which takes no notice of a hook that comes later."""
    return {
        inner
        for module in model.modules()
        if vars(module).get("_compiled_call_impl") is not None
        for inner in module.modules()
    }


class _Halt:
    """The hooks, which know the last microbatch by counting."""

    def __init__(self, job: TrainingJob, notices: Notices, fault: Fault, microbatches: int) -> None:
        self._job = job
        self._notices = notices
        self._fault = fault
        self._left = microbatches

    def before(self, _module: torch.nn.Module, _inputs: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._notices.strike(self._job, self._fault)

    def after(self, _module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            output.register_hook(self._in_backward)

    def in_step(self, *_: object) -> None:
        self._notices.fail(self._job, self._fault)

    def _in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._notices.strike(self._job, self._fault)
        return gradient
