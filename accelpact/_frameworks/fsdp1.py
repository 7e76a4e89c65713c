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
from typing import TYPE_CHECKING, Any

from accelpact._frameworks import Attribute, adopt_nothing, set_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


name = "fsdp1"
synchronizes = True

_OWN_GROUPS = ("process_group", "_inter_node_pg")
_PARTS = ("_inter_node_state", "_handle", "_exec_order_data")
_PROMISES = (
    "_ran_pre_backward_hook",
    "_needs_pre_backward_unshard",
    "_needs_pre_forward_unshard",
    "_prefetched",
)
"""What a handle notes of the update under way."""
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


def undo(model: torch.nn.Module) -> None:
    """Make every module idle and sharded again, and drop what it keeps of a backward pass.

    `_runtime_utils._post_backward_final_callback` does as much at the end of one that succeeds
    (torch 2.13.0 and 2.14.1), and trusts what is in between to have succeeded too.
    """
    from torch.distributed.fsdp._common_utils import TrainingState

    for _, module in _modules(model):
        module.training_state = TrainingState.IDLE
        if module._is_root:
            module._post_backward_callback_queued = False
        if module._handle is not None:
            _undo_handle(module, module._handle)
        order = module._exec_order_data
        # Not `next_iter`, which would end the first iteration, whose order all others are held to.
        order.handles_post_forward_order.clear()
        order.current_order_index = 0


def _undo_handle(module: Any, handle: Any) -> None:
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle._training_state = HandleTrainingState.IDLE
    parameter = handle.flat_param
    parameter.grad = None
    for key in ("_saved_grad_shard", "_post_backward_hook_handle", "_post_backward_hook_state"):
        value = vars(parameter).pop(key, None)
        hook = value[-1] if isinstance(value, tuple) else value
        if key != "_saved_grad_shard" and hook is not None:
            hook.remove()
    parameter._post_backward_called = False
    for key in _PROMISES:
        setattr(handle, key, False)
    if handle.uses_sharded_strategy:
        # Also where an all-gather has failed and its output is allocated: the next one would be
        # left out on this rank alone.
        _reshard(module, handle, True)  # noqa: FBT003  torch's
    if handle._uses_param_mixed_precision and parameter._mp_shard.untyped_storage().size():
        handle._free_low_precision_sharded_param()
    if handle._use_orig_params:
        handle._reset_flat_param_grad_info_if_needed()


adopt = adopt_nothing
