"""The audit finds every holder of a group, by its path and class, and leaves none of its own."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accelpact import _audit, _native
from accelpact._audit import Audit, Finding, Holder, Kind
from tests.unit.holders import (
    HERE,
    LEFT,
    REDIRECTED,
    Trainer,
    as_global,
    audit,
    expected,
    in_global,
    make_group,
    refuse,
    torch_attribute,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
