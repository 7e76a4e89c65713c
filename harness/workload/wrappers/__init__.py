"""How the model is spread over the ranks: one module for each way, with the same names in all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.spec import WRAPPERS, choose

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.workload.training import Training
    from strategies import Groups, Layout


class Wrapper(Protocol):
    """What a wrapper's module offers."""

    def check_layout(self, layout: Layout) -> None:
        """Refuse meshes on which this wrapper would not train what was asked for.

        Raises:
            SpecError: names the mesh and one that would do.
        """
        ...

    def wrap(
        self,
        training: Training,
        units: Sequence[nn.Module],
        *,
        layout: Layout,
        groups: Groups,
        device: torch.device,
    ) -> nn.Module:
        """Give the model its weights, its place and its wrapper; a collective.

        Args:
            training: its model is not wrapped yet.
            units: submodules that are sharded one by one, the inner before the outer.
            layout: where this rank stands.
            groups: that the contender connected.
            device: on which the model is to be.
        """
        ...

    def microbatch(self, model: Any, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of one microbatch; only the `last` one's gradients are averaged."""
        ...

    def clip_grad_norm(self, model: Any, max_norm: float) -> None:
        """Scale the gradients of the whole model to a norm of at most `max_norm`."""
        ...


def materialize(training: Training, device: torch.device) -> nn.Module:
    """Return the model with all its values on `device`."""
    model = training.model
    if training.initialize is None:
        return model.to(device)
    for module in model.modules():
        training.initialize(module)
    return model


def find(name: str) -> Wrapper:
    """Return the wrapper `name`.

    Raises:
        SpecError: there is none of that name.
    """
    choose("wrapper", name, WRAPPERS)
    return cast("Wrapper", importlib.import_module(f"harness.workload.wrappers.{name}"))
