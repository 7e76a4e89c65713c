"""Everything on the heap that names an object, and the path of each.

`gc.get_referrers` does not do it: it looks at tracked objects only, and a dictionary or tuple that
holds nothing but process groups, which are not tracked, is itself not tracked. So this walks
forward, from every tracked object and every running frame through what is not tracked.

One pass over the heap finds what names the targets; containers among that are the targets of the
next pass, until all are called after something that has a name.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import types
from typing import Any

from accelpact._places import (
    Kind,
    Place,
    belongs_to_torch,
    global_variable,
    holds_as_attributes,
    is_a,
    is_container,
    is_namespace,
    places,
    read_locals,
    title,
    untracked,
)

_CHUNK = 2000
"""Objects between two offers of the interpreter's lock to the training thread, some 2 ms. A thread
that computes in Python keeps it for 5 ms each time."""
_MAX_NESTING = 8
"""Untracked containers within each other."""
_MAX_PASSES = 6
"""Containers within each other, until one that has a name."""
_MAX_PARENTS = 32
"""Of one container that are looked at; of a target itself, all are."""
_OWN_MODULES = frozenset((__name__, "accelpact._audit", "accelpact._places"))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Holder:
    """One place on the heap that names a target."""

    owner: object
    """What has the reference: an object, a class or a function if it is an attribute of that, else
    the mapping, list, cell, frame or bound method itself."""
    key: Any
    """Under which key; see `Kind`."""
    kind: Kind
    path: str
    """For people, from something that has a name: `__main__.Trainer.groups['data']`."""
    chain: tuple[object, ...] = ()
    """What holds the owner, if that is a container: the nearest first, up to what has a name."""
    of_torch: bool = False
    """Whether an object or a module of torch's own holds it, be it among others."""
    target: int = 0
    """Index of the target that is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a walk has found."""

    holders: list[Holder]
    references: int
    """References that the holders have to the first target."""


class _Step:
    """One object that names the one `below` it, which leads to a target.

    Linked, and in lists of their own type only: a list or tuple of owners would itself be found
    to hold them.
    """

    __slots__ = ("below", "num_parents", "owner", "place", "rank", "target")

    def __init__(self, owner: object, place: Place, below: _Step | None, target: int) -> None:
        self.owner = owner
        self.place = place
        self.below = below
        self.target = target
        self.num_parents = 0
        self.rank = 0
        """How good a name it begins with: module, object or function, frame, none."""

    def contains(self, owner: object) -> bool:
        """Whether `owner` is on the way to the target already."""
        step: _Step | None = self
        while step is not None:
            if step.owner is owner:
                return True
            step = step.below
        return False

    def direct(self) -> _Step:
        """The step that names the target itself."""
        step = self
        while step.below is not None and step.below.below is not None:
            step = step.below
        return step


class _Edge:
    """An object found to name what `below` has come to."""

    __slots__ = ("below", "owner")

    def __init__(self, owner: object, below: _Step) -> None:
        self.owner = owner
        self.below = below


def find_holders(targets: list[Any], *, end: float) -> Found:
    """Find every place that names one of `targets`.

    Args:
        targets: strong references; the list is emptied, so as not to be found itself.
        end: of `time.monotonic`. Holders whose names are not found by then have paths that begin
            with the type of the outermost container known.

    Raises:
        TimeoutError: the first pass over the heap did not end by then.
    """
    nothing = Place(Kind.UNKNOWN, None, "")
    level = [_Step(target, nothing, None, i) for i, target in enumerate(targets)]
    targets.clear()
    modules = _modules()
    named: list[_Step] = []
    edges = _pass(level, end=end)
    references = sum(_num_references(edge) for edge in edges if edge.below.target == 0)
    for _ in range(_MAX_PASSES):
        level = _climb(level, edges, modules, named)
        if not level:
            break
        try:
            edges = _pass(level, end=end)
        except TimeoutError:
            break
    named += [_orphan(step) for step in level]
    return Found(_best(named), references)


# -- passes over the heap --------------------------------------------------------------


def _pass(level: list[_Step], *, end: float) -> list[_Edge]:
    """Find what names the owners of `level`."""
    wanted: dict[int, list[_Step]] = {}
    for step in level:
        wanted.setdefault(id(step.owner), []).append(step)
    found: dict[tuple[int, int], list[_Edge]] = {}
    _scan(_scan_frames(wanted, found), wanted, found)
    objects = gc.get_objects()
    objects += _frozen(end)
    objects.reverse()  # the youngest first, to let go soon of what would not live long
    while objects:
        chunk = objects[-_CHUNK:]
        del objects[-_CHUNK:]
        _scan(chunk, wanted, found)
        del chunk
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0)
    return [edge for edges in found.values() for edge in edges]


def _scan(
    objects: list[Any],
    wanted: dict[int, list[_Step]],
    found: dict[tuple[int, int], list[_Edge]],
) -> None:
    """Note which of `objects`, and of what is untracked in them, names anything wanted."""
    for _ in range(_MAX_NESTING):
        referents = gc.get_referents(*objects)
        if not wanted.keys().isdisjoint(map(id, referents)):
            for owner in objects:
                if type(owner) not in _OURS:
                    _note(owner, gc.get_referents(owner), wanted, found)
        objects = untracked(referents)
        if not objects:
            break


def _note(
    owner: object,
    referents: list[Any],
    wanted: dict[int, list[_Step]],
    found: dict[tuple[int, int], list[_Edge]],
) -> None:
    for key in wanted.keys() & map(id, referents):
        if (id(owner), key) in found:
            continue
        edges = []
        for step in wanted[key]:
            step.num_parents += 1
            if step.below is None or step.num_parents <= _MAX_PARENTS:
                edges.append(_Edge(owner, step))
        if edges:
            found[id(owner), key] = edges


def _scan_frames(
    wanted: dict[int, list[_Step]], found: dict[tuple[int, int], list[_Edge]]
) -> list[Any]:
    """Note running frames that name anything wanted; return what is untracked in them."""
    hidden: list[Any] = []
    for frame in running_frames():
        values = [value for _, value in read_locals(frame)]
        _note(frame, values, wanted, found)
        hidden += untracked(values)
    return hidden


def running_frames() -> list[types.FrameType]:
    """Return the frames of all threads, without those of the audit itself."""
    frames = []
    for innermost in sys._current_frames().values():
        frame: types.FrameType | None = innermost
        while frame is not None:
            if frame.f_globals.get("__name__") not in _OWN_MODULES:
                frames.append(frame)
            frame = frame.f_back
    # One of them is this very frame: together with its own variable it would be a cycle, which
    # keeps the frames of the audit and what they name.
    del innermost
    return frames


def _frozen(end: float) -> list[Any]:
    """Return what can be reached from modules, if the program has called `gc.freeze`.

    What was frozen is in no list of the collector's.
    """
    if not gc.get_freeze_count():
        return []
    reached: dict[int, Any] = {}
    level: list[Any] = list(sys.modules.values())
    while level:
        if time.monotonic() > end:
            raise TimeoutError
        chunk = level[-_CHUNK:]
        del level[-_CHUNK:]
        for each in gc.get_referents(*chunk):
            if gc.is_tracked(each) and type(each) not in _OURS and id(each) not in reached:
                reached[id(each)] = each
                level.append(each)
        time.sleep(0)
    return list(reached.values())


def _num_references(edge: _Edge) -> int:
    """Number of references that the owner itself has; those in cells are the cells'."""
    owner, target = edge.owner, edge.below.owner
    if is_a(owner, types.FrameType):
        own = frozenset(owner.f_code.co_varnames) - frozenset(owner.f_code.co_cellvars)
        names = [name for name, value in read_locals(owner) if value is target]
        return sum(name in own for name in names)
    return sum(each is target for each in gc.get_referents(owner))


# -- from what was found to names ----------------------------------------------------------


def _modules() -> dict[int, types.ModuleType]:
    """Modules by the ids of their dictionaries."""
    modules = [each for each in list(sys.modules.values()) if type(each) is types.ModuleType]
    return {id(vars(module)): module for module in modules}


def _climb(
    level: list[_Step],
    edges: list[_Edge],
    modules: dict[int, types.ModuleType],
    named: list[_Step],
) -> list[_Step]:
    """Take one step up every edge; return the containers among what was reached."""
    upper: list[_Step] = []
    with_parents: set[int] = set()
    for edge in edges:
        if edge.below.contains(edge.owner):
            continue
        for step in _steps(edge, modules):
            with_parents.add(id(edge.below))
            (upper if step.rank < 0 else named).append(step)
    named += [_orphan(s) for s in level if s.below is not None and id(s) not in with_parents]
    return upper


def _steps(edge: _Edge, modules: dict[int, types.ModuleType]) -> list[_Step]:
    """Make a step for every key under which an owner names what is below."""
    owner, below = edge.owner, edge.below
    if below.below is not None and holds_as_attributes(owner, below.owner):
        place = Place(Kind.ATTRIBUTE, below.place.key, f".{below.place.key}")
        step = _Step(owner, place, below.below, below.target)
        step.rank = -1 if is_container(owner) else 1
        return [step]
    if type(owner) is types.FunctionType and owner.__globals__ is below.owner:
        return []
    steps = []
    for place in places(owner, below.owner):
        step = _Step(owner, place, below, below.target)
        if is_namespace(owner):
            step.owner = modules.get(id(owner), owner)
            step.place = global_variable(owner, str(place.key))
        elif is_a(owner, types.FrameType):
            step.rank = 2
        else:
            step.rank = -1 if is_container(owner) else 1
        steps.append(step)
    return steps


def _orphan(step: _Step) -> _Step:
    step.rank = 3
    return step


def _best(named: list[_Step]) -> list[Holder]:
    """Make one holder of all the steps that end at the same place, by its best name."""
    by_place: dict[tuple[int, int, str, str], list[_Step]] = {}
    for step in named:
        direct = step.direct()
        place = (direct.target, id(direct.owner), direct.place.kind.value, direct.place.text)
        by_place.setdefault(place, []).append(step)
    in_frames = {step.target for step in named if step.rank == 2 and step.direct() is step}
    holders = []
    for steps in by_place.values():
        best = min(steps, key=lambda step: (step.rank, len(path_of(step)), path_of(step)))
        if best.rank == 3 and best.place.kind is Kind.CELL and best.target in in_frames:
            continue  # a variable of a running function, found in its frame by its name
        torch = any(s.rank < 2 and belongs_to_torch(s.owner) for s in steps)
        holders.append(_holder(best, of_torch=torch))
    return sorted(holders, key=lambda holder: (holder.path, holder.kind.value))


def _holder(step: _Step, *, of_torch: bool) -> Holder:
    direct, chain = step.direct(), []
    current: _Step | None = step
    while current is not None and current is not direct:
        chain.append(current.owner)
        current = current.below
    chain.reverse()
    return Holder(
        owner=direct.owner,
        key=direct.place.key,
        kind=direct.place.kind,
        path=path_of(step),
        chain=tuple(chain),
        of_torch=of_torch,
        target=direct.target,
    )


def path_of(step: _Step) -> str:
    """Say how to get from what has a name to the target."""
    parts = [f"<{type(step.owner).__name__}>" if step.rank == 3 else title(step.owner)]
    current: _Step | None = step
    while current is not None and current.below is not None:
        if is_a(current.owner, types.FunctionType) and current.place.key == "__closure__":
            current = current.below
            index = current.place.key
            parts.append(f" variable {step.owner.__code__.co_freevars[index]!r}")  # type: ignore[attr-defined]
        else:
            parts.append(current.place.text)
        current = current.below
    return "".join(parts)


_OURS = frozenset((_Step, _Edge, Holder, Found))
