"""Finding what a script has made, on the heap: objects of a class, and its wrapped models."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"),
)
"""Where torch defines what makes a model a distributed one (torch 2.8 to 2.14.1)."""


def living(module: str, kind: str) -> Iterator[Any]:
    """Yield every object of this process that is of class `kind` of `module`, defined in Python.

    Walks the heap, unless `module` was never imported: then there is none.
    """
    home = sys.modules.get(module)
    if home is None:
        return
    yield from _instances(getattr(home, kind))


def _instances(*classes: type) -> list[Any]:
    """Every object of one of `classes` or of a class derived from it; walks the heap once.

    An object refers to its class, if Python code has defined that, and the collector finds who
    refers to something several times faster than a loop here could ask every object for its class.
    """
    kinds = set(classes)
    waiting = list(classes)
    while waiting:
        derived: set[type] = set(waiting.pop().__subclasses__()) - kinds
        kinds |= derived
        waiting += derived
    return [item for item in gc.get_referrers(*kinds) if type(item) in kinds] if kinds else []


def wrapped_models(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost wrapped models that own any of `parameters`, in order of creation.

    Walks the heap once. Modules that no framework has wrapped are not looked at.
    """
    kinds = [
        getattr(sys.modules[module], name) for module, name in _WRAPPERS if module in sys.modules
    ]
    wanted = {id(parameter) for parameter in parameters}
    found = [
        item
        for item in _instances(*kinds)
        if any(id(parameter) in wanted for parameter in item.parameters())
    ]
    inner = {id(module) for model in found for module in model.modules() if module is not model}
    return [model for model in found if id(model) not in inner]
