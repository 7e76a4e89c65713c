"""Attaching to a script that does not ask for it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelpact._attach import attach
from accelpact._boundary import Boundary
from accelpact._discover import wrapped_models
from accelpact._errors import Rejected
from accelpact._state import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Script:
    """What is known so far of the script's models and optimizers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.boundary = Boundary()
        self._settings = dict(settings)
        self._hooked: dict[int, tuple[torch.nn.Module, Callable[[], None]]] = {}
        self._tried = False

    def install(self) -> None:
        """Watch models being wrapped and optimizers being made, and wait for the first step.

        A model is hooked before its first forward pass, since compiled code takes no notice of
        hooks that come later; the ranks meet when the optimizer steps, which all do together.
        """
        _after(DistributedDataParallel, self._hook)
        _after(torch.optim.Optimizer, self._made)
        register_optimizer_step_pre_hook(self._stepping)

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        for model in wrapped_models(parameters(optimizer)):
            self._hook(model)

    def _hook(self, model: torch.nn.Module) -> None:
        """Notice forward passes of `model`, and no longer those of its parts alone."""
        for module in model.modules():
            if id(module) in self._hooked:
                _, remove = self._hooked.pop(id(module))
                remove()
        self._hooked[id(model)] = (model, self.boundary.notice_forward(model))

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Attach at the first step of the first optimizer of a wrapped model."""
        if self._tried or not dist.is_initialized() or dist.get_world_size() < 2:
            return
        models = wrapped_models(parameters(optimizer))
        if not models:
            return
        self._tried = True
        for model in models:
            if id(model) not in self._hooked:
                self._hook(model)
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        try:
            attach(model, optimizer, boundary=self.boundary, **self._settings)
        except (Rejected, OSError, KeyError) as error:
            sys.stderr.write(
                f"accelpact: rank {dist.get_rank()}: not attached, the script runs without "
                f"protection: {error!r}\n"
            )


def protect(settings: Mapping[str, Any]) -> None:
    """Attach to whatever the program trains, once it does."""
    _Script(settings).install()


def _after(kind: type, call: Callable[[Any], None]) -> None:
    """Have `call` told of every new object of exactly `kind`'s constructor, once it is made."""
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        call(self)

    kind.__init__ = init  # type: ignore[misc]
