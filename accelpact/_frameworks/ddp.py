"""DistributedDataParallel: the group is held by the module and, in C++, by its Reducer.

`reducer._update_process_group` sets the latter in place; seen in torch 2.13.0 and 2.14.1
(`torch/nn/parallel/distributed.py`). Setting the attribute alone leaves the Reducer with the old
group, which Python does not show. `DistributedDataParallel._update_process_group` sets both, but
has the buckets laid out anew too: with more than two ranks and a static graph, sums are then
rounded elsewhere than without the failure.

The Reducer keeps a communication hook and its state too, one pair for good. A state that has the
group in an attribute or an entry can be rebound, and so can a variable, a default argument or the
object of the hook. A state that is the group, a tuple with it, and the hooks that are built into
the Reducer cannot: while one of them names a group, that is only reconfigured in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from accelpact._errors import Reason, Rejected
from accelpact._frameworks import Attribute, adopt_nothing, set_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
class _Hooks:
    """A group in what a communication hook and its state can reach, whenever the hook came."""

    module: DistributedDataParallel
    label: str

    def names(self, group: object) -> bool:
        return any(value is group for value, _ in self._places())

    def point_at(self, group: ProcessGroup) -> None:
        """Replace the group of this name."""
        for value, put in self._places():
            if isinstance(value, type(group)) and value.group_name == group.group_name:
                put(group)

    def _places(self) -> list[_Place]:
        pairs = _hooks(self.module)
        return [place for hook, state in pairs for place in (*_in_state(state), *_in_hook(hook))]


@dataclasses.dataclass(frozen=True, slots=True)
class _KeptByReducer:
    """A group that is a hook's state itself, or that of a hook in C++: nobody can rebind it."""

    module: DistributedDataParallel
    label: str
    advice: str = (
        "DDP's Reducer keeps it in C++: register the hook with state None (for the default group) "
        "or with an object that has the group in an attribute, or have groups reconfigured in "
        "place (torch 2.14 or later, replacement='auto')"
    )

    def names(self, group: object) -> bool:
        if vars(self.module).get("process_group") is group and _is_builtin(self.module):
            return True
        states = [state for _, state in _hooks(self.module)]
        tuples = [state for state in states if isinstance(state, tuple)]
        return any(each is group for each in itertools.chain(states, *tuples))

    def point_at(self, group: ProcessGroup) -> None:
        """Do nothing: it goes on to name the old group."""


_Place: TypeAlias = "tuple[Any, Callable[[Any], None]]"
"""What is there, and what puts something else there."""


def _hooks(module: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the hooks of `module` with their states: `_comm_hooks`, kept beside the Reducer's."""
    return list(vars(module).get("_comm_hooks") or ())


def _is_builtin(module: DistributedDataParallel) -> bool:
    """Whether the hook is one of the Reducer's own, of which Python sees the name alone."""
    return "BuiltinCommHookType" in str(module._get_ddp_logging_data().get("comm_hook"))


def _in_state(state: Any) -> Iterator[_Place]:
    """Yield the entries of a mapping or list, or the attributes of an object, slots included."""
    if isinstance(state, dict | list):
        for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
            yield value, functools.partial(state.__setitem__, key)
        return
    slots = [each.__dict__.get("__slots__", ()) for each in type(state).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    for key in {**dict.fromkeys(names), **getattr(state, "__dict__", {})}:
        if hasattr(state, key):
            yield getattr(state, key), functools.partial(object.__setattr__, state, key)


def _in_hook(hook: Any, depth: int = 3) -> Iterator[_Place]:
    """Yield the variables and default arguments of a hook, of those it wraps, and its object's."""
    if isinstance(hook, types.MethodType):
        yield from _in_state(hook.__self__)
        hook = hook.__func__
    if not isinstance(hook, types.FunctionType) or depth == 0:
        return
    for cell in hook.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            yield from _in_hook(cell.cell_contents, depth - 1)
    for number, value in enumerate(hook.__defaults__ or ()):
        yield value, functools.partial(_put_default, hook, number)
    keywords = hook.__kwdefaults__ or {}
    yield from ((v, functools.partial(keywords.__setitem__, k)) for k, v in keywords.items())


def _put_default(function: types.FunctionType, number: int, value: Any) -> None:
    before = function.__defaults__ or ()
    function.__defaults__ = (*before[:number], value, *before[number + 1 :])


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield path or "root", module


def references(model: torch.nn.Module) -> Iterator[Reference]:
    """Yield the group of every DDP module, and those in the states of its hooks."""
    for path, module in _modules(model):
        yield _Module(module, f"{path}.process_group")
        yield _Hooks(module, f"{path}._comm_hooks")
        yield _KeptByReducer(module, f"{path}._comm_hooks, kept by the Reducer")
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


def undo(model: torch.nn.Module) -> None:
    """Have every Reducer forget the backward pass that it expects to finish.

    `_reset_state` (torch 2.13.0 and 2.14.1) keeps the buckets as they are; the next update notes
    the order of gradients anew and finds the same.
    """
    for path, module in _modules(model):
        if not hasattr(module.reducer, "_reset_state"):
            raise Rejected(
                Reason.UNSUPPORTED,
                f"{path}: torch {torch.__version__} cannot reset DDP's Reducer inside an update",
            )
        module.reducer._reset_state()


adopt = adopt_nothing
