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
    """Yield every object of this process that is of class `kind` of `module`.

    Walks the heap, unless `module` was never imported: then there is none.
    """
    home = sys.modules.get(module)
    if home is None:
        return
    wanted = getattr(home, kind)
    for item in gc.get_objects():
        if issubclass(type(item), wanted):
            yield item


def wrapped_models(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost wrapped models that own any of `parameters`, in order of creation.

    Walks the heap once. Modules that no framework has wrapped are not looked at.
    """
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in _WRAPPERS if module in sys.modules
    )
    wanted = {id(parameter) for parameter in parameters}
    found = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), kinds)
        and any(id(parameter) in wanted for parameter in item.parameters())
    ]
    inner = {id(module) for model in found for module in model.modules() if module is not model}
    return [model for model in found if id(model) not in inner]
