"""DistributedDataParallel: the group is held by the module and, in C++, by its Reducer.

`reducer._update_process_group` sets the latter in place; seen in torch 2.13.0 and 2.14.1
(`torch/nn/parallel/distributed.py`). Setting the attribute alone leaves the Reducer with the old
group, which Python does not show. `DistributedDataParallel._update_process_group` sets both, but
has the buckets laid out anew too: with more than two ranks and a static graph, sums are then
rounded elsewhere than without the failure.

The state of a communication hook is kept by the Reducer too. A state object that has the group in
an attribute can be rebound; a state that is the group cannot.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from accelpact._frameworks import Attribute, adopt_nothing, set_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._frameworks import Reference

name = "ddp"
synchronizes = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Module:
    """The group of one DDP module and its Reducer."""

    module: DistributedDataParallel
    label: str

    def names(self, group: object) -> bool:
        return vars(self.module).get("process_group") is group

    def point_at(self, group: ProcessGroup) -> None:
        self.module.reducer._update_process_group(group)
        self.module.process_group = group


@dataclasses.dataclass(frozen=True, slots=True)
class _HookState:
    """A group in an attribute of a communication hook's state, whenever the hook came."""

    module: DistributedDataParallel
    key: str
    label: str

    def names(self, group: object) -> bool:
        return any(vars(state).get(self.key) is group for state in self._states())

    def point_at(self, group: ProcessGroup) -> None:
        for state in self._states():
            setattr(state, self.key, group)

    def _states(self) -> list[Any]:
        hooks = vars(self.module).get("_comm_hooks") or []
        return [state for _, state in hooks if hasattr(state, "__dict__")]


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield path or "root", module


def references(model: torch.nn.Module) -> Iterator[Reference]:
    """Yield the group of every DDP module, and those in the states of its hooks."""
    for path, module in _modules(model):
        yield _Module(module, f"{path}.process_group")
        for key in ("process_group", "group"):
            yield _HookState(module, key, f"{path}._comm_hooks.state.{key}")
    for path, module in model.named_modules():
        # SyncBatchNorm keeps the group in which it averages.
        if type(module).__name__ == "SyncBatchNorm" and "process_group" in vars(module):
            yield Attribute(module, "process_group", f"{path}.process_group")


class _Watch:
    """DDP has no state of its own between updates that Python shows: gradients tell."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [
            (f"{path}.{name}", parameter)
            for path, module in _modules(model)
            for name, parameter in module.named_parameters()
        ]

    def structure(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of all parameters."""
        return set_gradients(self._parameters)


def watch(model: torch.nn.Module) -> _Watch:
    """Collect the parameters once."""
    return _Watch(model)


adopt = adopt_nothing
