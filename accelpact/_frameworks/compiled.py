"""`torch.compile`: copies of a module's attributes, and what tracing a call with a group leaves.

Seen in torch 2.13.0 and 2.14.1 (`torch/_dynamo/eval_frame.py`, `external_utils.py`,
`torch/_library/fake_class_registry.py`):

* `torch.compile(model)` of a module whose `forward` is torch's own (DDP, FSDP1) puts two functions
  around it with `functools.wraps`, which copies every attribute of the module, groups included,
  into those of the functions. Nobody reads them; they keep the group's communicator alive.
* A group that a compiled function is given is represented while it is traced by a
  `FakeScriptObject`, whose `real_obj` is the group.

Compiled code itself has the name of a group and no object, so a rebuilt group needs no new graph.
`Module.compile` copies nothing.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import TYPE_CHECKING, Any

from accelpact._discover import living
from accelpact._frameworks import no_watch, undo_nothing
from accelpact._places import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._audit import Holder
    from accelpact._frameworks import Reference

name = "compiled"
synchronizes = False

_COMPILER = "torch._dynamo"
_HOME = f"{_COMPILER}.eval_frame"
_FAKES = "torch._library.fake_class_registry"


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """Attributes of one function, some of which are copies of a module's."""

    attributes: dict[str, Any]
    label: str

    def names(self, group: object) -> bool:
        return any(value is group for value in self.attributes.values())

    def point_at(self, group: ProcessGroup) -> None:
        """Set every attribute that is a group which has been replaced under this name."""
        for key, value in self.attributes.items():
            if isinstance(value, type(group)) and value.group_name == group.group_name:
                self.attributes[key] = group


@dataclasses.dataclass(frozen=True, slots=True)
class _Stand:
    """Attributes of what has represented a group in a trace: the group, and methods of it."""

    attributes: dict[str, Any]
    label: str

    def names(self, group: object) -> bool:
        values = self.attributes.values()
        return any(v is group or getattr(v, "__self__", None) is group for v in values)

    def point_at(self, group: ProcessGroup) -> None:
        """Represent `group`."""
        for key, value in self.attributes.items():
            if isinstance(value, type(group)):
                self.attributes[key] = group
            elif isinstance(getattr(value, "__self__", None), type(group)):
                self.attributes[key] = getattr(group, key)


def references(model: torch.nn.Module) -> Iterator[Reference]:  # noqa: ARG001
    """Yield the copies around every module of this process that was compiled so far.

    The script may hand over the compiled module, or the one inside it.
    """
    for item in living(_HOME, "OptimizedModule"):
        for function in _around(vars(item).get("forward")):
            yield _Copy(vars(function), f"{_title(function)}.__dict__")


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether any part of `model` goes through the compiler.

    The script may have compiled it and still hand over the module inside.
    """
    modules = set(model.modules())
    return any(vars(module).get("_compiled_call_impl") is not None for module in modules) or any(
        item in modules or vars(item)["_modules"].get("_orig_mod") in modules
        for item in living(_HOME, "OptimizedModule")
    )


def _around(function: object) -> Iterator[types.FunctionType]:
    """Yield a function of the compiler's and those that it wraps, which ends at the module."""
    while type(function) is types.FunctionType:
        yield function
        function = vars(function).get("__wrapped__")


def adopt(holder: Holder) -> Reference | None:
    """Take what compiling has made since the references were collected."""
    fakes = sys.modules.get(_FAKES)
    for each in (holder.owner, *holder.chain):
        if fakes is not None and issubclass(type(each), fakes.FakeScriptObject):
            return _Stand(vars(each), holder.path)
    owner = holder.owner
    if type(owner) is types.FunctionType and holder.kind is Kind.ATTRIBUTE:
        module = str(owner.__globals__.get("__name__"))
        if module.startswith(_COMPILER) and holder.key in vars(owner):
            return _Copy(vars(owner), holder.path)
    return None


def _title(function: types.FunctionType) -> str:
    return f"{function.__globals__.get('__name__')}.{function.__code__.co_name}()"


watch = no_watch
undo = undo_nothing
