"""FullyShardedDataParallel (FSDP1): where it caches groups, what a boundary looks like.

Attributes seen in torch 2.13.0 and 2.14.1 (`torch/distributed/fsdp/_init_utils.py`,
`_common_utils.py`, `_flat_param.py`, `_exec_order_utils.py`):

* `_inter_node_pg`, the replicate group, used by `_reduce_grad`; one per module.
* `_inter_node_state.process_group`: unused by today's all-reduce, but it keeps
  the communicator and its threads alive.
* `process_group`, `_handle.process_group`, `_exec_order_data.process_group`: the shard group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from accelpact._frameworks import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from accelpact._frameworks import Watch

name = "fsdp1"

_OWN_GROUPS = ("process_group", "_inter_node_pg")
_PARTS = ("_inter_node_state", "_handle", "_exec_order_data")


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            clean = path.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
            yield clean.replace("_checkpoint_wrapped_module", "") or "root", module


def references(model: torch.nn.Module) -> Iterator[Reference]:
    """Yield every cached group of every FSDP module, objects shared by modules once."""
    seen: set[int] = set()
    for path, module in _modules(model):
        own = vars(module)
        for key in _OWN_GROUPS:
            if own.get(key) is not None:
                yield Reference(module, key, f"{path}.{key}")
        for part in _PARTS:
            holder = own.get(part)
            if holder is None or id(holder) in seen:
                continue
            seen.add(id(holder))
            # May still be None: the execution order gets its group in the first forward pass.
            if hasattr(holder, "process_group"):
                yield Reference(holder, "process_group", f"{path}.{part}.process_group")


def watch(model: torch.nn.Module) -> Watch:
    """Collect every module's state once; return what looks for signs of an update under way.

    A flat parameter's gradient is no such sign: with `use_orig_params` it stays
    set until the next backward. An unfinished forward graph leaves no sign at
    all, which is why only a boundary declared by the caller counts.
    """
    modules = [(path, vars(module)) for path, module in _modules(model)]
    parameters = list(model.named_parameters())

    def violations() -> Iterator[str]:
        for path, own in modules:
            yield from _module_violations(path, own)
        for path, parameter in parameters:
            if parameter.grad is not None:
                yield f"{path}: has a gradient that no optimizer step has consumed and cleared"

    return violations


def _module_violations(path: str, own: dict[str, Any]) -> Iterator[str]:
    state = own["training_state"]
    if state is not TrainingState.IDLE:
        yield f"{path}: training_state is {state.name}, not IDLE"
    if own.get("_post_backward_callback_queued"):
        yield f"{path}: a post-backward callback is queued"
    handle = own.get("_handle")
    if handle is None:
        return
    state = vars(handle)["_training_state"]
    if state is not HandleTrainingState.IDLE:
        yield f"{path}: the flat parameter's state is {state.name}, not IDLE"
    if vars(handle.flat_param).get("_saved_grad_shard") is not None:
        yield f"{path}: a reduced gradient shard waits to be accumulated"
