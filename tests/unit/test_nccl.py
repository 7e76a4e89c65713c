"""NCCL's place in the runtime, with stand-ins for torch's classes and for the device."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelpact import _communicator
from accelpact._communicator._backends import BACKENDS, Members
from accelpact._errors import Reason
from tests.unit import nccl_fakes as fakes
from tests.unit.nccl_fakes import refusal

NCCL = BACKENDS["nccl"]
CUDA = [fakes.CUDA]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fakes.Device:
    """A device that is not there, and settings that are right."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    return fakes.Device(monkeypatch)


def members(**changes: Any) -> Members:
    """Two ranks that meet in time."""
    given = {
        "name": "pair",
        "ranks": (4, 6),
        "position": 1,
        "timeout": timedelta(seconds=7),
        "deadline": timedelta(seconds=3),
        "bound": None,
    }
    return Members(**(given | changes))


class TestAbort:
    """Cutting a communicator, and waiting until it is gone."""

    def test_returns_at_once_and_is_done_once(self, device: fakes.Device) -> None:
        """However often it is asked for, and from whichever thread."""
        assert device
        group = fakes.group()
        backend = group._get_backend(fakes.CUDA)
        backend.may_abort.clear()
        start = time.monotonic()
        threads = [
            threading.Thread(target=_communicator.interrupt, args=(group,)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 1
        backend.may_abort.set()
        _communicator.stop([group], deadline=3)

        assert 1 == backend.aborts

    def test_deadline(self, device: fakes.Device) -> None:
        """An abort that does not return is a refusal, with its reason."""
        assert device
        group = fakes.group()
        backend = group._get_backend(fakes.CUDA)
        backend.may_abort.clear()
        found = refusal(lambda: _communicator.stop([group], deadline=0.1))
        backend.may_abort.set()

        assert Reason.DEADLINE is found.reason
        assert "expected the NCCL communicator to abort within" in found.detail

    def test_its_own_error(self, device: fakes.Device) -> None:
        """Torch gives up at the timeout of the group, and says so."""
        assert device
        group = fakes.group()
        group._get_backend(fakes.CUDA).abort_error = dist.DistBackendError("timed out\nand more")
        found = refusal(lambda: _communicator.stop([group], deadline=3))

        assert Reason.DEADLINE is found.reason
        assert "group pair to abort; timed out" in found.detail
        assert "more" not in found.detail

    def test_device_that_stays_busy(self, device: fakes.Device) -> None:
        """The device must have let go as well."""
        device.idle.clear()
        found = refusal(lambda: _communicator.stop([fakes.group()], deadline=0.1))
        device.idle.set()

        assert Reason.DEADLINE is found.reason
        assert "expected the device to become idle within" in found.detail

    def test_all_are_cut_before_one_is_waited_for(self, device: fakes.Device) -> None:
        """Where one abort waits for another, the order of the groups must not matter."""
        assert device
        first, second = fakes.group(name="first"), fakes.group(name="second")
        waiting = first._get_backend(fakes.CUDA)
        waiting.may_abort = threading.Event()
        other = second._get_backend(fakes.CUDA)
        finish = other.abort
        other.abort = lambda: (finish(), waiting.may_abort.set())
        _communicator.stop([first, second], deadline=3)

        assert (1, 1) == (waiting.aborts, other.aborts)

    def test_no_context_on_another_device(self, device: fakes.Device) -> None:
        """A thread that waits for the device does so for the one that its caller uses."""
        _communicator.stop([fakes.group()], deadline=3)

        assert [("accelpact-aside", 1)] == device.current


class TestFailure:
    """What nobody raises."""

    def test_none(self, device: fakes.Device) -> None:
        """A group in order."""
        assert device
        assert _communicator.failure(fakes.group()) is None

    def test_after_an_abort(self, device: fakes.Device) -> None:
        """What waited for a collective returns as if that had completed."""
        assert device
        group = fakes.group()
        _communicator.interrupt(group)

        assert "NCCL group pair was aborted" == _communicator.failure(group)

    def test_what_the_watchdog_saw(self, device: fakes.Device) -> None:
        """It tells the backend object, and nobody else."""
        assert device
        group = fakes.group()
        group._get_backend(fakes.CUDA).error = fakes.Error.TIMEOUT

        assert "NCCL group pair has failed: TIMEOUT" == _communicator.failure(group)


class TestCreate:
    """Building a communicator by hand."""

    @pytest.mark.parametrize("kind", [fakes.ProcessGroupNCCL, fakes.ProcessGroupNCCL2])
    def test_same_class_and_options(self, kind: type[fakes.Fake], device: fakes.Device) -> None:
        """The replacement is of the class that the group had, with NCCL's settings."""
        assert device
        old = fakes.make(kind)
        old.options.is_high_priority_stream = True
        old.options.config.min_ctas = 4
        old.options.config.net_name = "Socket"
        new = NCCL.create(dist.HashStore(), members(), NCCL.details(old))
        config = new.options.config

        assert kind is type(new)
        assert (1, 2, [4, 6]) == (new.rank, new.size, new.options.global_ranks_in_group)
        assert ("pair", timedelta(seconds=7)) == (new.options.group_name, new.options._timeout)
        assert new.options.is_high_priority_stream
        assert (4, fakes.UNDEFINED, "Socket") == (config.min_ctas, config.blocking, config.net_name)

    def test_never_split(self, device: fakes.Device) -> None:
        """Not even where the old one was: that is collective over all ranks."""
        assert device
        old = fakes.make()
        old.options.split_from = fakes.make()
        new = NCCL.create(dist.HashStore(), members(), NCCL.details(old))

        assert new.options.split_from is None
        assert new.options is not old.options

    @pytest.mark.parametrize(
        ("bound", "expected"), [(None, "cuda:1"), (torch.device("cuda", 3), "cuda:3")]
    )
    def test_device(self, bound: torch.device | None, expected: str, device: fakes.Device) -> None:
        """It connects on the device that the group was bound to, or the current one."""
        assert device
        new = NCCL.create(dist.HashStore(), members(bound=bound), NCCL.details(fakes.make()))

        assert [torch.device(expected)] == new.connected

    def test_store_waits_as_long_as_before(self, device: fakes.Device) -> None:
        """NCCL waits as long as the store does, which others use afterwards."""
        assert device
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=99))
        seen = []
        old = fakes.make()
        details = NCCL.details(old)

        class Seeing(fakes.Fake):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                seen.append(store.timeout)

        NCCL.create(
            store,
            members(),
            type(details)(kind=Seeing, is_high_priority_stream=False, config=details.config),
        )

        assert [timedelta(seconds=3)] == seen
        assert timedelta(seconds=99) == store.timeout

    def test_deadline(self, device: fakes.Device) -> None:
        """A member that hangs while it connects is a refusal."""
        assert device
        fakes.Fake.connects.clear()
        limit = timedelta(seconds=0.1)
        found = refusal(
            lambda: NCCL.create(
                dist.HashStore(), members(deadline=limit), NCCL.details(fakes.make())
            )
        )
        fakes.Fake.connects.set()

        assert Reason.DEADLINE is found.reason
        assert "expected the members of group pair to connect by NCCL within" in found.detail


class Recording:
    """In the place of torch's group."""

    BackendType = dist.ProcessGroup.BackendType

    def __init__(self, *_: Any) -> None:
        self.bound_device_id: torch.device | None = None
        self.seen: list[Any] = []
        """Its default, then what was registered, and what it was bound to then."""
        self._device_types = CUDA

    def _set_default_backend(self, kind: Any) -> None:
        self.seen.append(kind)

    def _register_backend(self, where: torch.device, kind: Any, backend: Any) -> None:
        self.seen.append((where, kind, type(backend).__name__, self.bound_device_id))

    def _get_backend(self, _: Any) -> Any:
        raise RuntimeError


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The groups that are made."""
    made: list[Recording] = []

    class Noted(Recording):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(dist, "ProcessGroup", Noted)
    return made


class TestConnect:
    """The group around it."""

    def test_bound_before_its_backends_are_registered(
        self, device: fakes.Device, recorded: list[Recording], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A group hands its device on to a backend when that is registered, and only then."""
        assert device
        old = fakes.group(fakes.ProcessGroupNCCL2)
        old.bound_device_id = torch.device("cuda", 1)
        fakes.register(monkeypatch, old, "cuda:nccl2")
        description = _communicator.describe(old)
        _communicator.connect(description, store=dist.HashStore(), rank=1, deadline=3)
        custom = Recording.BackendType.CUSTOM

        assert [
            custom,
            (fakes.CUDA, custom, "ProcessGroupNCCL2", torch.device("cuda", 1)),
        ] == recorded[0].seen

    def test_backend_per_device(
        self, device: fakes.Device, recorded: list[Recording], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each gets its own, under its own prefix; what has no device is the device's."""
        assert device
        host = torch.device("cpu")
        seen = []

        class Host:
            """In the place of Gloo's, which would look for its peer."""

            options = SimpleNamespace(_timeout=timedelta(seconds=9))

            def __init__(self, store: dist.PrefixStore) -> None:
                store.set("key", "value")

            def name(self) -> str:
                return "gloo"

        def create(_: object, store: dist.PrefixStore, who: Members, __: object) -> Host:
            seen.append(who.timeout)
            return Host(store)

        monkeypatch.setattr(type(BACKENDS["gloo"]), "create", create)
        store = dist.HashStore()
        old = fakes.group()
        on_device, on_host = old._get_backend(fakes.CUDA), Host(dist.PrefixStore("old", store))
        old._device_types = [host, fakes.CUDA]
        old._get_backend = lambda each: on_host if each.type == "cpu" else on_device
        fakes.register(monkeypatch, old, "cpu:gloo,cuda:nccl")
        description = _communicator.describe(old)
        _communicator.connect(description, store=store, rank=0, deadline=3)
        kinds = Recording.BackendType

        assert [
            kinds.NCCL,
            (host, kinds.GLOO, "Host", None),
            (fakes.CUDA, kinds.NCCL, "ProcessGroupNCCL", None),
        ] == recorded[0].seen
        assert [timedelta(seconds=9)] == seen
        assert store.check(["cpu//key"])

    def test_all_backends_are_cut(self, device: fakes.Device) -> None:
        """Whether one of them could not be is told."""
        assert device
        group = fakes.group()
        on_device = group._get_backend(fakes.CUDA)
        on_host = SimpleNamespace(name=lambda: "gloo", options=SimpleNamespace(_devices=[]))
        group._device_types = [torch.device("cpu"), fakes.CUDA]
        group._get_backend = lambda each: on_host if each.type == "cpu" else on_device

        assert not _communicator.interrupt(group)
        _communicator.stop([group], deadline=3)
        assert 1 == on_device.aborts

    def test_probe_has_a_deadline(
        self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device that never comes to the probe is a refusal."""
        assert device
        group = fakes.group()
        fakes.register(monkeypatch, group, "cuda:nccl")
        group.rank = lambda: 0
        let_go = threading.Event()
        group.allreduce = lambda *_: SimpleNamespace(wait=lambda: let_go.wait(10))
        monkeypatch.setattr(torch, "tensor", lambda *_, **__: SimpleNamespace(item=lambda: 3))
        description = _communicator.describe(group)
        found = refusal(lambda: _communicator.probe(group, description, deadline=0.1))
        let_go.set()
        _communicator.probe(group, description, deadline=3)

        assert Reason.DEADLINE is found.reason
        assert "expected the probe of the new group to end within" in found.detail
