"""How the model is spread over the ranks: one module for each way, with the same names in all."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.spec import WRAPPERS, choose

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.workload.model import Decoder
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
        self, decoder: Decoder, *, layout: Layout, groups: Groups, device: torch.device
    ) -> nn.Module:
        """Give `decoder`, which is on the meta device, its weights and its place; a collective.

        The weights depend on torch's seed alone. Every rank gets the same model.
        """
        ...

    def microbatch(self, model: Any, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of one microbatch; only the `last` one's gradients are averaged."""
        ...

    def clip_grad_norm(self, model: Any, max_norm: float) -> None:
        """Scale the gradients of the whole model to a norm of at most `max_norm`."""
        ...


def find(name: str) -> Wrapper:
    """Return the wrapper `name`.

    Raises:
        SpecError: there is none of that name.
    """
    choose("wrapper", name, WRAPPERS)
    return cast("Wrapper", importlib.import_module(f"harness.workload.wrappers.{name}"))
