"""FullyShardedDataParallel (FSDP1): where it caches groups, what a boundary looks like.

Attributes seen in torch 2.13.0 and 2.14.1 (`torch/distributed/fsdp/_init_utils.py`,
`_common_utils.py`, `_flat_param.py`, `_exec_order_utils.py`):

* `_inter_node_pg`, the replicate group, used by `_reduce_grad`; one per module.
* `_inter_node_state.process_group`: unused by today's all-reduce, but it keeps
  the communicator and its threads alive.
* `process_group`, `_handle.process_group`, `_exec_order_data.process_group`: the shard group.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accelpact._frameworks import Attribute, adopt_nothing, set_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


name = "fsdp1"
synchronizes = True

_OWN_GROUPS = ("process_group", "_inter_node_pg")
_PARTS = ("_inter_node_state", "_handle", "_exec_order_data")
_HOME = "torch.distributed.fsdp.fully_sharded_data_parallel"


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    home = sys.modules.get(_HOME)
    if home is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, home.FullyShardedDataParallel):
            clean = path.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
            yield clean.replace("_checkpoint_wrapped_module", "") or "root", module


def references(model: torch.nn.Module) -> Iterator[Attribute]:
    """Yield every cached group of every FSDP module, objects shared by modules once."""
    seen: set[int] = set()
    for path, module in _modules(model):
        own = vars(module)
        for key in _OWN_GROUPS:
            if own.get(key) is not None:
                yield Attribute(module, key, f"{path}.{key}")
        for part in _PARTS:
            holder = own.get(part)
            if holder is None or id(holder) in seen:
                continue
            seen.add(id(holder))
            # May still be None: the execution order gets its group in the first forward pass.
            if hasattr(holder, "process_group"):
                yield Attribute(holder, "process_group", f"{path}.{part}.process_group")


def watch(model: torch.nn.Module) -> _Watch:
    """Collect once what tells an update under way in `model`."""
    return _Watch(model)


class _Watch:
    """Looks for signs of an update under way in a model, whose modules are collected once.

    A flat parameter's gradient is no such sign: with `use_orig_params` it stays
    set until the next backward. An unfinished forward graph leaves no sign at
    all, which is why only a boundary declared by the caller counts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Collect the state of every FSDP module."""
        modules = list(_modules(model))
        self._modules = [(path, vars(module)) for path, module in modules]
        self._handles = [
            (path, vars(module._handle), vars(module._handle.flat_param))
            for path, module in modules
            if vars(module).get("_handle") is not None
        ]
        self._parameters = list(model.named_parameters()) if modules else []

    def structure(self) -> Iterator[str]:
        """Yield modules and flat parameters that are not idle."""
        for path, own in self._modules:
            state = own["training_state"]
            if state.name != "IDLE":
                yield f"{path}: training_state is {state.name}, not IDLE"
            if own.get("_post_backward_callback_queued"):
                yield f"{path}: a post-backward callback is queued"
        for path, handle, parameter in self._handles:
            state = handle["_training_state"]
            if state.name != "IDLE":
                yield f"{path}: the flat parameter's state is {state.name}, not IDLE"
            if parameter.get("_saved_grad_shard") is not None:
                yield f"{path}: a reduced gradient shard waits to be accumulated"

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the parameters as the optimizer sees them."""
        return set_gradients(self._parameters)


adopt = adopt_nothing
