"""Everything that can hold a group, made for the test that asks whether the audit finds it."""

from __future__ import annotations

import functools
import time
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelpact._audit import Audit, Finding, Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = __name__
NAMED_S = 0.05
"""A thread gives itself its name after it has started."""


def make_group(*, backend: bool = False) -> dist.ProcessGroup:
    """A process group of this process alone, a C++ object without peers."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    if backend:
        gloo = dist.ProcessGroupGloo(store, 0, 1)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        time.sleep(NAMED_S)
    return group


def refuse(_: Holder) -> None:
    """Adopt nothing."""


def audit(make: Callable[[Any], Any], new: Any, *, adopt: Any = refuse) -> tuple[Finding, Any]:
    """Audit a group that only what `make` returns holds; return the finding and a weak reference.

    The holder is handed to a generator on the stack of this module, which gives it no name.
    """
    keep = [make_group()]
    reference = weakref.ref(keep[0])
    examination = Audit(keep[0], label="replicate")
    with make(keep[0]):
        finding = examination.run(adopt, new, keep=keep)
    return finding, reference


class Trainer:
    """A class as scripts have."""

    def __init__(self, group: Any = None) -> None:
        self.dp_group = group


class Slotted:
    __slots__ = ("empty", "group")


class Guarded:
    """Whose code must not run."""

    def __init__(self, group: Any) -> None:
        vars(self)["group"] = group

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise AssertionError


class Mine(torch.nn.Module):
    """A module of the script's own."""


class Fake:
    """Stands for a class of torch."""


Fake.__module__ = "torch.distributed.fake"
Fake.__qualname__ = "FakeWrapper"


@contextmanager
def as_global(value: Any) -> Iterator[None]:
    """Make `value` a global of this module."""
    globals()["held"] = value
    del value
    try:
        yield
    finally:
        del globals()["held"]


def with_attribute(owner: Any, name: str, value: Any) -> Any:
    object.__setattr__(owner, name, value)
    return owner


def slotted(group: Any) -> Slotted:
    made = Slotted()
    made.group = group
    return made


def guarded(group: Any) -> Guarded:
    made = Guarded.__new__(Guarded)
    object.__getattribute__(made, "__dict__")["group"] = group
    return made


def closure(group: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return group

    return inner


def suspended(group: Any) -> Any:
    def produce(replicate: Any) -> Iterator[int]:
        yield 1
        del replicate

    made = produce(group)
    next(made)
    return made


class Never:
    """Something to wait for."""

    def __await__(self) -> Iterator[None]:
        yield


async def wait_for(replicate: Any) -> None:
    """Hold an argument."""
    await Never()
    del replicate


def coroutine(group: Any) -> Any:
    made = wait_for(group)
    made.send(None)  # one that never ran would be kept by the warning about it
    return made


def kept_exception(group: Any) -> BaseException:
    def fails(replicate: Any) -> None:
        raise ValueError(str(replicate is None))

    try:
        fails(group)
    except ValueError as error:
        del group
        return error
    raise AssertionError


def function_attribute(group: Any) -> Any:
    def step() -> None: ...

    step.group = group  # type: ignore[attr-defined]
    return step


def default(group: Any) -> Any:
    def step(pg: Any = group) -> Any:
        return pg

    return step


def class_attribute(group: Any) -> type:
    return type("Config", (), {"__module__": "script", "pg": group})


def module_attribute(group: Any) -> torch.nn.Module:
    return with_attribute(Mine(), "pg", group)


def torch_attribute(group: Any) -> torch.nn.Module:
    return with_attribute(torch.nn.Linear(1, 1), "_pg", group)


def tensor_attribute(group: Any) -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.pg = group  # type: ignore[attr-defined]
    return tensor


REDIRECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "global": (lambda g: g, "held"),
    "list": (lambda g: [0, g], "held[1]"),
    "tuple": (lambda g: (g, 0), "held[0]"),
    "untracked tuple in untracked dict": (lambda g: {"pair": (1, g)}, "held['pair'][1]"),
    "set": (lambda g: {g}, "held{...}"),
    "dict value": (lambda g: {"data": g}, "held['data']"),
    "dict key": (lambda g: {g: 1}, "held[key]"),
    "dict under a key of a class": (lambda g: {guarded(None): g}, "held[<Guarded>]"),
    "deque": (lambda g: deque([g]), "held[0]"),
    "defaultdict": (lambda g: defaultdict(list, a=g), "held['a']"),
    "ordered dict": (lambda g: OrderedDict(a=g), "held['a']"),
    "namespace": (lambda g: types.SimpleNamespace(pg=g), "held.pg"),
    "attribute": (Trainer, f"{HERE}.Trainer.dp_group"),
    "attribute of a list's item": (lambda g: [Trainer(g)], f"{HERE}.Trainer.dp_group"),
    "dict in an attribute": (lambda g: Trainer({"a": g}), f"{HERE}.Trainer.dp_group['a']"),
    "slot": (slotted, f"{HERE}.Slotted.group"),
    "object whose code must not run": (guarded, f"{HERE}.Guarded.group"),
    "attribute of a class": (class_attribute, "script.Config.pg"),
    "attribute of a function": (
        function_attribute,
        f"{HERE}.function_attribute.<locals>.step().group",
    ),
    "default argument": (default, f"{HERE}.default.<locals>.step().__defaults__[0]"),
    "closure": (closure, f"{HERE}.closure.<locals>.inner() variable 'group'"),
    "generator": (suspended, "generator suspended.<locals>.produce() local 'replicate'"),
    "coroutine": (coroutine, "generator wait_for() local 'replicate'"),
    "kept exception": (kept_exception, "frame fails() local 'replicate'"),
    "partial's argument": (
        lambda g: functools.partial(print, g),
        "held.args[0]",
    ),
    "partial's keyword": (
        lambda g: functools.partial(print, group=g),
        "held.keywords['group']",
    ),
    "iterator": (lambda g: iter([g]), "<list>[0]"),
    "module of the script": (module_attribute, f"{HERE}.Mine.pg"),
}
"""What holds the group, made of it and put into a global of this module; and its path."""

LEFT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute of torch": (torch_attribute, "Linear._pg"),
    "attribute of a tensor": (tensor_attribute, "Tensor.pg"),
    "dict in an attribute of torch": (
        lambda g: with_attribute(Fake(), "state", {"pg": g}),
        "FakeWrapper.state['pg']",
    ),
    "bound method": (lambda g: g.allreduce, "held (bound method allreduce)"),
    "bound method in an attribute": (
        lambda g: Trainer(g.allreduce),
        f"{HERE}.Trainer.dp_group (bound method allreduce)",
    ),
    "partial of a bound method": (
        lambda g: functools.partial(g.allreduce, []),
        "held.func (bound method allreduce)",
    ),
}


def in_global(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Put what `make` returns into a global, and keep no variable with the group."""

    def enter(group: Any) -> Any:
        made = make(group)
        del group
        return as_global(made)

    return enter


def expected(path: str) -> tuple[str, ...]:
    return (f"{HERE}.{path}" if path.startswith("held") else path,)
