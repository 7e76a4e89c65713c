"""`fully_shard` (FSDP2): groups are cached in the mesh info of every parameter group.

Attributes seen in torch 2.13.0 and 2.14.1 (`torch/distributed/fsdp/_fully_shard/`:
`_fsdp_common.py`, `_fsdp_param_group.py`, `_fsdp_state.py`); before that a state has a single
`_fsdp_param_group`:

* `mesh_info.replicate_process_group`, `.shard_process_group`, `.reduce_scatter_process_group`,
  and the same of `post_forward_mesh_info`.
* `_all_gather_comm._group`, `_reduce_scatter_comm._group`, after memory was asked of the group.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from accelpact._errors import Reason, Rejected
from accelpact._frameworks import Attribute, adopt_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelpact._frameworks import Reference

name = "fsdp2"
synchronizes = True

_HOME = "torch.distributed.fsdp._fully_shard._fully_shard"
_MESH_INFOS = ("mesh_info", "post_forward_mesh_info")
_GROUPS = ("replicate_process_group", "shard_process_group", "reduce_scatter_process_group")
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")
_UNFINISHED = ("_partial_reduce_output", "_all_gather_result", "_all_reduce_state")


def _states(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    home = sys.modules.get(_HOME)
    if home is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, home.FSDPModule):
            yield path or "root", module._get_fsdp_state()


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    single = getattr(state, "_fsdp_param_group", None)
    return [] if single is None else [single]


def references(model: torch.nn.Module) -> Iterator[Reference]:
    """Yield every cached group, of objects that modules share once."""
    seen: set[int] = set()
    for path, state in _states(model):
        for number, group in enumerate(_parameter_groups(state)):
            where = f"{path}._fsdp_param_groups[{number}]"
            for part, keys in (
                *((each, _GROUPS) for each in _MESH_INFOS),
                *((each, ("_group",)) for each in _COMMS),
            ):
                holder = getattr(group, part, None)
                if holder is None or id(holder) in seen:
                    continue
                seen.add(id(holder))
                for key in keys:
                    if hasattr(holder, key):
                        yield Attribute(holder, key, f"{where}.{part}.{key}")


class _Watch:
    """Looks for signs of an update under way."""

    def __init__(self, model: torch.nn.Module) -> None:
        states = list(_states(model))
        self._states = [(path, state) for path, state in states]
        self._contexts = list({id(s._state_ctx): (p, s._state_ctx) for p, s in states}.values())
        self._groups = [
            (path, group) for path, state in states for group in _parameter_groups(state)
        ]
        self._parameters = [
            (f"{path}.{parameter._param_fqn}", parameter)
            for path, group in self._groups
            for parameter in group.fsdp_params
        ]

    def structure(self) -> Iterator[str]:
        """Yield states and parameter groups that are not idle or hold unfinished work."""
        for path, state in self._states:
            training = state._training_state
            if training.name != "IDLE":
                yield f"{path}: training state is {training.name}, not IDLE"
        for path, context in self._contexts:
            if context.post_backward_final_callback_queued:
                yield f"{path}: a post-backward callback is queued"
        for path, group in self._groups:
            own = vars(group)
            training = own["_training_state"]
            if training.name != "IDLE":
                yield f"{path}: the parameter group's state is {training.name}, not IDLE"
            for key in _UNFINISHED:
                if own.get(key) is not None:
                    yield f"{path}: {key} waits to be used"

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield gradients of the shards, and those that are not reduced yet."""
        for path, parameter in self._parameters:
            if parameter.sharded_param.grad is not None:
                yield path, parameter.sharded_param.grad
            accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
            if accumulated is not None:
                yield f"{path} (unsharded, accumulated)", accumulated
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                yield f"{path} (unsharded)", unsharded.grad


def watch(model: torch.nn.Module) -> _Watch:
    """Collect states and parameters once."""
    return _Watch(model)


def undo(model: torch.nn.Module) -> None:
    """Drop every gradient and have the roots forget the iteration.

    `reset_iter_state` (torch 2.13.0 and 2.14.1) waits for an all-gather under way, which has
    failed, and leaves gradients of unsharded parameters, which the next backward would add to.
    Assigning `unsharded_accumulated_grad` raises where it is a property (torch 2.15).
    """
    for path, state in _states(model):
        for group in _parameter_groups(state):
            result = group._all_gather_result
            if result is not None:
                with contextlib.suppress(RuntimeError):  # it has failed
                    getattr(result.all_gather_work, "wait", _done)()
                group._all_gather_result = None
            for parameter in group.fsdp_params:
                _drop_gradients(parameter)
        if not state._is_root:  # None before the first forward pass, which resets nothing then
            continue
        if not hasattr(state, "_reset_iter_state"):
            raise Rejected(
                Reason.UNSUPPORTED,
                f"{path}: torch {torch.__version__} cannot reset fully_shard inside an update",
            )
        state._reset_iter_state()


def _done() -> None:
    """There is nothing to wait for."""


def _drop_gradients(parameter: Any) -> None:
    parameter.sharded_param.grad = None
    unsharded = getattr(parameter, "_unsharded_param", None)
    if unsharded is not None:
        unsharded.grad = None
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None


adopt = adopt_nothing
