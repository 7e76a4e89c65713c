"""How one object on the heap names another: by which key, and how to say so to a person.

Reads objects without running any code of theirs: no properties, no `__getattr__`, no `__eq__`, no
`__repr__`. What is read are the interpreter's own structures, which every object has.
"""

from __future__ import annotations

import enum
import functools
import gc
import inspect
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


_T = TypeVar("_T")


class Kind(enum.Enum):
    """How an owner names what it names."""

    ATTRIBUTE = "attribute"
    """Of an object, a class, a function or a module; `key` is its name."""
    ENTRY = "entry"
    """Value in a mapping; `key` is its key."""
    KEY = "key"
    """Key of a mapping; `key` is None, so as not to name it once more."""
    ITEM = "item"
    """Of a list, tuple, deque or set; `key` is the index, None in a set."""
    CELL = "cell"
    """Variable that functions share; the owner is the cell."""
    LOCAL = "local"
    """Local variable; the owner is the frame or the suspended generator, `key` the name."""
    BOUND = "bound"
    """`self` of a bound method; `key` is the name of the method."""
    UNKNOWN = "unknown"
    """The owner's C code knows."""


class Place(NamedTuple):
    """One key under which an owner names something."""

    kind: Kind
    key: Any
    text: str
    """What to append to the owner's own path."""


_GENERATORS: dict[type, str] = {
    types.GeneratorType: "gi",
    types.CoroutineType: "cr",
    types.AsyncGeneratorType: "ag",
}
_CONTAINER_MODULES = frozenset(
    ("_collections", "builtins", "collections", "functools", "itertools", "operator", "types")
)
_NAMED = (types.ModuleType, types.FunctionType, types.FrameType, type, *_GENERATORS)
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_MAX_KEY = 60
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_FUNCTION_PARTS = ("__closure__", "__defaults__", "__kwdefaults__")
_WORLD = "torch.distributed.distributed_c10d"
_MODULE_OF = type.__dict__["__module__"]
_NAMESPACE_OF = type.__dict__["__dict__"]


def is_a(owner: object, kinds: type[_T] | tuple[type[_T], ...]) -> TypeGuard[_T]:
    """Whether `owner` is of one of `kinds`; `isinstance` would ask it for its `__class__`."""
    return issubclass(type(owner), kinds)


def is_container(owner: object) -> bool:
    """Whether `owner` has no name of its own and is called after what holds it."""
    return not is_a(owner, _NAMED) and module_of(type(owner)) in _CONTAINER_MODULES


def module_of(kind: type) -> str:
    """Return the name of the module that defines the class `kind`."""
    return str(_MODULE_OF.__get__(kind))


def namespace(kind: type) -> Any:
    """Return the attributes of the class `kind` itself, as a read-only mapping."""
    return _NAMESPACE_OF.__get__(kind)


def attributes(owner: object) -> dict[str, Any] | None:
    """Return the instance dictionary of `owner`, past any property of that name."""
    for kind in type(owner).__mro__:
        descriptor = namespace(kind).get("__dict__")
        if isinstance(descriptor, _DESCRIPTORS):
            found = descriptor.__get__(owner)
            return found if isinstance(found, dict) else None
    return None


def places(owner: object, target: object) -> list[Place]:
    """Return the keys under which `owner` names `target`; one UNKNOWN if none is to be seen."""
    found = [*_structure(owner, target), *_items(owner, target)]
    return found or [Place(Kind.UNKNOWN, None, "")]


def holds_as_attributes(owner: object, target: object) -> bool:
    """Whether `target` is the dictionary of the attributes of `owner`."""
    return type(target) is dict and (
        is_a(owner, type) or (type(owner) is not dict and attributes(owner) is target)
    )


def _structure(owner: object, target: object) -> list[Place]:
    """Keys in the fixed parts of an object."""
    if is_a(owner, types.CellType):
        return [Place(Kind.CELL, None, "")]
    if is_a(owner, (types.MethodType, types.BuiltinMethodType)):
        name = _function_name(owner)
        return [Place(Kind.BOUND, name, f" (bound method {name})")]
    if is_a(owner, types.FrameType):
        return [_local(name) for name in local_names(owner, target)]
    if type(owner) in _GENERATORS:
        frame = getattr(owner, f"{_GENERATORS[type(owner)]}_frame")
        return [_local(name) for name in local_names(frame, target)] if frame else []
    if is_a(owner, type):
        members: Iterable[tuple[Any, Any]] = namespace(owner).items()
    elif type(owner) is types.FunctionType:
        parts = [(part, getattr(owner, part)) for part in _FUNCTION_PARTS]
        members = [*_copied(vars(owner)), *parts]
    else:
        members = [*_copied(attributes(owner) or {}), *_slots(owner)]
    return [Place(Kind.ATTRIBUTE, k, f".{k}") for k, value in members if value is target]


def is_namespace(owner: object) -> bool:
    """Whether `owner` is a dictionary of global variables, of a module or without one."""
    return type(owner) is dict and "__builtins__" in owner and type(owner.get("__name__")) is str


def global_variable(owner: object, name: str) -> Place:
    """Return the place of a global variable, under the name by which people know it."""
    text = f".{name}"
    if title(owner) == _WORLD and name.startswith(("_pg_", "_tags_")):
        text = f"._world.{name[1:]}"  # what `_world` shows of the module's maps (2.13, 2.14.1)
    return Place(Kind.ATTRIBUTE, name, text)


def _local(name: str) -> Place:
    return Place(Kind.LOCAL, name, f" local {name!r}")


def _slots(owner: object) -> list[tuple[str, Any]]:
    """Members that a class keeps in its C structure: `__slots__`, and those of builtin types."""
    found = []
    for kind in type(owner).__mro__:
        for name, member in namespace(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found.append((name, member.__get__(owner)))
                except AttributeError:
                    continue
    return found


def _items(owner: object, target: object) -> list[Place]:
    """Keys in a container, whatever methods its class may have overridden."""
    if is_a(owner, dict):
        found = []
        for key, value in _copied(owner):
            if value is target:
                found.append(Place(Kind.ENTRY, key, f"[{brief(key)}]"))
            if key is target:
                found.append(Place(Kind.KEY, None, "[key]"))
        return found
    for kind in (list, tuple, deque):
        if is_a(owner, kind):
            copy: list[Any] = [*kind.__iter__(owner)]  # type: ignore[arg-type]
            return [Place(Kind.ITEM, i, f"[{i}]") for i, item in enumerate(copy) if item is target]
    if is_a(owner, (set, frozenset)):
        return [Place(Kind.ITEM, None, "{...}")]
    return []


def _copied(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Copy the items of a dictionary that other threads may change."""
    while True:
        try:
            return list(dict.items(mapping))
        except RuntimeError:  # noqa: PERF203  it changed size
            continue


def brief(key: object) -> str:
    """Show a key, if that runs no code of its class."""
    if type(key) in _PLAIN_KEYS:
        text = repr(key)
        return text if len(text) <= _MAX_KEY else text[:_MAX_KEY] + "..."
    return f"<{type(key).__qualname__}>"


def local_names(frame: types.FrameType, target: object) -> list[str]:
    """Return the local variables of `frame` that are `target`."""
    return [name for name, value in read_locals(frame) if value is target]


def read_locals(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Return names and values of the local variables of `frame`, and leave no trace in it."""
    values = frame.f_locals
    if values is frame.f_globals:  # of a module, and found as such
        return []
    found = list(values.items())
    _forget(frame, values)
    return found


def _forget(frame: types.FrameType, values: Any) -> None:
    """Undo what reading `f_locals` does to a function's frame before Python 3.13.

    There the frame keeps the dictionary that was read, and with it every local variable that the
    function has had since, tensors included. Three references are the frame's, ours and the
    argument's; if there are more, the function itself has called `locals()`.
    """
    optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if type(values) is dict and optimized and sys.getrefcount(values) <= 4:
        values.clear()


def _function_name(function: object) -> str:
    """Name of a function or a method, without asking a class of somebody else's."""
    while is_a(function, types.MethodType):
        function = function.__func__
    if type(function) in (types.FunctionType, types.BuiltinFunctionType):
        return str(getattr(function, "__name__", ""))
    return type(function).__qualname__


def title(owner: object) -> str:
    """Path of what has a name of its own."""
    if is_a(owner, types.ModuleType):
        return str(vars(owner).get("__name__"))
    if type(owner) is dict and is_namespace(owner):
        return str(owner["__name__"])
    if is_a(owner, types.FunctionType):
        return f"{owner.__globals__.get('__name__')}.{owner.__qualname__}()"
    if is_a(owner, types.FrameType):
        return f"frame {owner.f_code.co_name}()"
    if type(owner) in _GENERATORS:
        return f"generator {getattr(owner, '__qualname__', '?')}()"
    kind = owner if is_a(owner, type) else type(owner)
    name = str(type.__dict__["__qualname__"].__get__(kind))
    return name if is_torch(module_of(kind)) else f"{module_of(kind)}.{name}"


def is_torch(module: str) -> bool:
    """Whether a module of that name is one of torch."""
    return module == "torch" or module.startswith("torch.")


def belongs_to_torch(owner: object) -> bool:
    """Whether `owner` is an object of torch itself and not one of the script or a third party.

    `fully_shard` gives a module of the script a class that torch makes; the attributes are still
    the script's.
    """
    if is_a(owner, types.FunctionType):
        return is_torch(str(owner.__globals__.get("__name__")))
    if is_a(owner, (types.FrameType, *_GENERATORS)):
        return False
    if is_a(owner, types.ModuleType) or is_namespace(owner):
        return is_torch(title(owner))
    kind = owner if is_a(owner, type) else type(owner)
    if not is_torch(module_of(kind)):
        return False
    own = sys.modules.get(module_of(kind))
    generated = own is None or vars(own).get(kind.__name__) is not kind
    foreign = (module_of(each) for each in kind.__mro__[1:])
    return not generated or all(
        is_torch(m) or m in _CONTAINER_MODULES or m in _NEUTRAL for m in foreign
    )


_NEUTRAL = frozenset(("abc", "typing", "pybind11_builtins", "enum"))


def partial_of(owner: object) -> object | None:
    """Return the function that a `functools.partial` calls; None for anything else."""
    return owner.func if type(owner) is functools.partial else None


def untracked(objects: list[Any]) -> list[Any]:
    """Return those of `objects` that hold others unseen by the garbage collector.

    It forgets dictionaries and tuples that hold only what cannot be part of a cycle, such as a
    process group. Only the builtin types themselves are forgotten, no subclass.
    """
    return [o for o in objects if type(o) in _FORGOTTEN and not gc.is_tracked(o)]


_FORGOTTEN = frozenset((dict, tuple))
