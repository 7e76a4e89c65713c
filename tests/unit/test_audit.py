"""The audit finds every holder of a group, by its path and class, and leaves none of its own."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accelpact import _audit, _native
from accelpact._audit import Audit, Finding, Holder, Kind

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


@pytest.fixture(scope="module")
def new() -> dist.ProcessGroup:
    return make_group()


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the audit leaves behind must not be cleared away for it."""
    monkeypatch.setattr(_audit, "_GRACE_S", 0.02)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


class TestHolders:
    """One holder at a time."""

    @pytest.mark.parametrize("case", REDIRECTED)
    def test_of_the_script_is_redirected(self, case: str, new: Any) -> None:
        """Found once, by its path, and by no other."""
        make, path = REDIRECTED[case]

        finding, reference = audit(in_global(make), new)

        if case == "iterator":
            assert 1 == len(finding.redirected)
        else:
            assert expected(path) == finding.redirected
        assert ((), ()) == (finding.left, finding.adopted)
        assert "held by a variable" == finding.native
        assert 0 == finding.unseen
        if case in ("attribute of a class", "kept exception"):  # cycles of their own
            gc.collect()
        assert reference() is None

    @pytest.mark.parametrize("case", LEFT)
    def test_of_torch_or_past_it_is_left(self, case: str, new: Any) -> None:
        """What torch reads, and what calls the group itself, is no variable."""
        make, path = LEFT[case]

        finding, reference = audit(in_global(make), new)

        assert expected(path) == finding.left
        assert ((), ()) == (finding.redirected, finding.adopted)
        assert not finding.clean
        assert 0 == finding.unseen
        assert reference() is None

    def test_several_at_once(self, new: Any) -> None:
        """Each is found, none twice."""
        cases = ["attribute", "closure", "dict value", "slot", "generator"]
        finding, _ = audit(in_global(lambda g: [REDIRECTED[case][0](g) for case in cases]), new)
        paths = sorted(
            REDIRECTED[case][1] if case != "dict value" else f"{HERE}.held[2]['data']"
            for case in cases
        )

        assert tuple(paths) == finding.redirected
        assert 0 == finding.unseen

    def test_world_maps_are_named_as_torch_does(self, new: Any) -> None:
        """The maps of torch.distributed, whose keys are groups."""
        keep = [make_group()]
        examination = Audit(keep[0], label="replicate")
        c10d._pg_names[keep[0]] = "x"
        try:
            finding = examination.run(refuse, new, keep=keep)
        finally:
            c10d._pg_names.popitem()

        assert ("torch.distributed.distributed_c10d._world.pg_names[key]",) == finding.left

    def test_function_that_was_replaced_is_left(
        self, new: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A partial of the original function does not pass the redirect."""
        original = c10d.all_reduce

        @functools.wraps(original)
        def stand_in(*_: Any, **__: Any) -> None: ...

        make = in_global(lambda g: functools.partial(original, group=g))
        before, _ = audit(make, new)
        monkeypatch.setattr(c10d, "all_reduce", stand_in)
        after, _ = audit(make, new)

        assert ((), 1) == (before.left, len(before.redirected))
        assert (1, ()) == (len(after.left), after.redirected)


class TestFrames:
    """Functions that run meanwhile, in any thread."""

    def run(self, body: Callable[..., Any], new: Any) -> Finding:
        """Audit while a thread is inside `body`."""
        keep = [make_group()]
        examination = Audit(keep[0], label="replicate")
        inside, leave = threading.Event(), threading.Event()
        arguments: list[Any] = [keep[0]]
        thread = threading.Thread(target=lambda: body(arguments.pop(), inside.set, leave.wait))
        thread.start()
        try:
            assert inside.wait(10)
            return examination.run(refuse, new, keep=keep)
        finally:
            leave.set()
            thread.join()

    def test_local_variable(self, new: Any) -> None:
        """By the function's name and its own."""

        def train(replicate: Any, ready: Any, wait: Any) -> None:
            ready()
            wait()
            del replicate

        finding = self.run(train, new)

        assert ("frame train() local 'replicate'",) == finding.redirected
        assert 0 == finding.unseen
        assert not finding.collected

    def test_container_that_only_a_variable_names(self, new: Any) -> None:
        """The collector does not know a dict with nothing but a group."""

        def train(replicate: Any, ready: Any, wait: Any) -> None:
            groups = {"data": replicate}
            del replicate
            ready()
            wait()
            del groups

        finding = self.run(train, new)

        assert ("frame train() local 'groups'['data']",) == finding.redirected

    def test_variable_that_an_inner_function_shares(self, new: Any) -> None:
        """Named by both, and its cell has no third name."""

        def train(replicate: Any, ready: Any, wait: Any) -> None:
            def reduce() -> Any:
                return replicate

            ready()
            wait()
            del reduce

        finding = self.run(train, new)

        assert "frame train() local 'replicate'" in finding.redirected
        assert 2 == len(finding.redirected)
        assert 0 == finding.unseen

    def test_leaves_no_copy_of_the_variables(self, new: Any) -> None:
        """Before Python 3.13, a frame whose variables are read keeps what they were."""
        seen = []

        def train(replicate: Any, ready: Any, wait: Any) -> None:
            activation = torch.ones(1)
            reference = weakref.ref(activation)
            ready()
            wait()
            del activation, replicate
            seen.append(reference())

        self.run(train, new)

        assert [None] == seen

    def test_argument_of_a_call_under_way_is_counted(self, new: Any) -> None:
        """No place names it, and the finding says that there is one."""

        def call(groups: list[Any], wait: Any) -> None:
            wait()
            del groups

        def train(replicate: Any, ready: Any, wait: Any) -> None:
            ready()
            max([1, 2], key=lambda _: wait() or 0, default=replicate)

        finding = self.run(train, new)

        assert any("local 'replicate'" in path for path in finding.redirected)
        assert 1 <= finding.unseen

    def test_script_without_a_module(self, new: Any) -> None:
        """Its variables are globals, as in a module, and named once."""
        keep = [make_group()]
        examination = Audit(keep[0], label="replicate")
        script = {"__name__": "train", "group": keep[0], "audit": examination.run}
        script |= {"adopt": refuse, "new": new, "keep": keep}
        exec("def use(): return group\nfinding = audit(adopt, new, keep=keep)", script)  # noqa: S102

        assert ("train.group",) == script["finding"].redirected


class TestAdoption:
    """A framework that knows a place has it rebound."""

    def test_place_is_rebound(self, new: Any) -> None:
        """The holder has owner and key of the attribute, and the group goes."""
        seen: list[tuple[type, Any, Kind]] = []

        class Place:
            label = "root.pg"

            def __init__(self, owner: Any) -> None:
                self.owner = owner

            def point_at(self, group: Any) -> None:
                object.__setattr__(self.owner, "_pg", group)

        def adopt(holder: Holder) -> Any:
            seen.append((type(holder.owner), holder.key, holder.kind))
            return Place(holder.owner)

        finding, reference = audit(in_global(torch_attribute), new, adopt=adopt)

        assert [(torch.nn.Linear, "_pg", Kind.ATTRIBUTE)] == seen
        assert (("root.pg",), (), ()) == (finding.adopted, finding.left, finding.redirected)
        assert finding.dead
        assert "released" == finding.native
        assert reference() is None


class TestGroupThatNothingHolds:
    """The usual case, in which the group goes when the audit lets go of it."""

    def test_is_proof_without_a_walk(self, new: Any) -> None:
        """Its weak reference is dead and the threads and descriptors of its backend have gone."""
        keep = [make_group(backend=True)]
        before = _native.threads()
        examination = Audit(keep[0], label="replicate")

        finding = examination.run(refuse, new, keep=keep)

        assert (True, "released", False) == (finding.dead, finding.native, finding.walked)
        assert finding.clean
        assert 3 == len(before - _native.threads())

    def test_in_a_cycle_is_collected(self, new: Any) -> None:
        """References that no running function or module has may wait for the collector."""
        keep = [make_group()]
        examination = Audit(keep[0], label="replicate")
        cycle: list[Any] = [keep[0]]
        cycle.append(cycle)
        del cycle

        finding = examination.run(refuse, new, keep=keep)

        assert (True, True, False) == (finding.dead, finding.collected, finding.walked)
        assert ((), ()) == (finding.left, finding.redirected)

    def test_frozen_objects_are_walked(self, new: Any) -> None:
        """After `gc.freeze` the collector lists no object that was there."""
        make = in_global(lambda g: Trainer({"a": g}))

        def frozen(group: Any) -> Any:
            context = make(group)
            del group
            context.__enter__()
            gc.freeze()
            return context

        keep = [make_group()]
        examination = Audit(keep[0], label="replicate")
        context = frozen(keep[0])
        try:
            finding = examination.run(refuse, new, keep=keep)
        finally:
            gc.unfreeze()
            context.__exit__(None, None, None)

        assert (f"{HERE}.Trainer.dp_group['a']",) == finding.redirected


class TestNative:
    """What Python does not see."""

    def test_backend_object_is_left(self, new: Any) -> None:
        """Whoever holds the backend itself uses it past torch.distributed."""
        keep = [make_group(backend=True)]
        examination = Audit(keep[0], label="replicate")
        with as_global([keep[0]._get_backend(torch.device("cpu"))]):
            finding = examination.run(refuse, new, keep=keep)

        assert (f"{HERE}.held[0]",) == finding.left
        assert "held by what is left" == finding.native

    def test_threads_of_another_group_do_not_count(self) -> None:
        """Two groups of which one ends: its threads are proof for one audit only."""
        first, second = make_group(backend=True), make_group(backend=True)
        footprints = [
            _native.Footprint(_native.backends(first)),
            _native.Footprint(_native.backends(second)),
        ]
        for each in footprints:
            each.settle()
        del second
        found = [each.wait(0.2) for each in footprints]

        assert 1 == found.count("")
        del first
        assert ["", ""] == [each.wait(5) for each in footprints]

    def test_new_groups_do_not_hide_that_an_old_one_ended(self) -> None:
        """Threads are told apart by identity: a replacement is built before the old group goes."""
        old = make_group(backend=True)
        footprint = _native.Footprint(_native.backends(old))
        replacement = make_group(backend=True)
        footprint.settle()
        still = footprint.wait(0.05)
        del old

        assert "1 gloo_tcp_loop, 2 pt_gloo_runloop threads still run" in still
        assert "" == footprint.wait(5)
        del replacement


class TestChangingHeap:
    """Training goes on meanwhile."""

    def test_is_walked_while_threads_allocate(self, new: Any) -> None:
        """Containers grow and go; the audit neither fails nor finds what is not there."""
        stop = threading.Event()

        def churn() -> None:
            held: dict[int, Any] = {}
            while not stop.is_set():
                held = {i: [held.get(i - 1), (i,), {"i": i}] for i in range(50)}

        threads = [threading.Thread(target=churn) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            finding, reference = audit(in_global(lambda g: {"data": g}), new)
        finally:
            stop.set()
            for thread in threads:
                thread.join()

        assert (f"{HERE}.held['data']",) == finding.redirected
        assert reference() is None

    def test_cost(self, new: Any, record_property: Any) -> None:
        """Recorded at 300,000 objects; the longest time that another thread had to wait, too."""
        ballast = [[i] for i in range(max(0, 300_000 - len(gc.get_objects())))]
        waits: list[float] = []
        stop = threading.Event()

        def tick() -> None:
            before = time.perf_counter()
            while not stop.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                waits.append(now - before)
                before = now

        thread = threading.Thread(target=tick)
        thread.start()
        finding, _ = audit(in_global(lambda g: {"data": g}), new)
        stop.set()
        thread.join()
        record_property("audit_seconds", finding.seconds)
        record_property("longest_wait_seconds", max(waits))
        sys.stderr.write(
            f"{len(gc.get_objects())} objects: {finding.seconds:.3f} s, "
            f"longest wait {max(waits):.3f} s\n"
        )
        del ballast

        assert (f"{HERE}.held['data']",) == finding.redirected
