"""NCCL's place in the runtime, with stand-ins for torch's classes and for the device."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from accelpact import Rejected, _communicator
from accelpact._communicator._backends import BACKENDS, Members, _nccl_settings
from accelpact._errors import Reason
from accelpact._native import Footprint
from accelpact._replacement import Rebuild, Reconfigure
from tests.unit import nccl_fakes as fakes

if TYPE_CHECKING:
    from collections.abc import Callable

NCCL = BACKENDS["nccl"]
CUDA = [fakes.CUDA]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fakes.Device:
    """A device that is not there, and settings that are right."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    return fakes.Device(monkeypatch)


def refusal(call: Callable[[], object]) -> Rejected:
    """Return why `call` refuses."""
    with pytest.raises(Rejected) as found:
        call()
    return found.value


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


class TestConnect:
    """The group around it."""

    def test_bound_before_its_backends_are_registered(
        self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A group hands its device on to a backend when that is registered, and only then."""
        assert device
        made = []

        class Recording:
            BackendType = dist.ProcessGroup.BackendType

            def __init__(self, *_: Any) -> None:
                self.bound_device_id: torch.device | None = None
                self.seen: list[Any] = []
                self._device_types = CUDA
                made.append(self)

            def _set_default_backend(self, kind: Any) -> None:
                self.seen.append(kind)

            def _register_backend(self, where: torch.device, kind: Any, backend: Any) -> None:
                self.seen.append((where, kind, type(backend), self.bound_device_id))

            def _get_backend(self, _: Any) -> Any:
                raise RuntimeError

        old = fakes.group(fakes.ProcessGroupNCCL2)
        old.bound_device_id = torch.device("cuda", 1)
        fakes.register(monkeypatch, old, "cuda:nccl2")
        description = _communicator.describe(old)
        monkeypatch.setattr(dist, "ProcessGroup", Recording)
        _communicator.connect(description, store=dist.HashStore(), rank=1, deadline=3)
        custom = Recording.BackendType.CUSTOM

        assert [
            custom,
            (fakes.CUDA, custom, fakes.ProcessGroupNCCL2, torch.device("cuda", 1)),
        ] == made[0].seen

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


class TestServed:
    """What is refused at `attach`."""

    def test_unknown_backend(self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line says what was found and what is served."""
        assert device
        group = fakes.group(name="7")
        fakes.register(monkeypatch, group, "npu:hccl")
        found = refusal(lambda: _communicator.require_served([group], deadline=30))

        assert Reason.UNSUPPORTED is found.reason
        assert (
            "expected groups of the backends gloo, nccl, nccl-legacy, nccl2; found npu:hccl for "
            "group 7" == found.detail
        )

    def test_wrong_settings(self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of them, in one line."""
        assert device
        for name in list(os.environ):
            if name.startswith(("TORCH_NCCL_", "NCCL_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        group = fakes.group()
        fakes.register(monkeypatch, group, "cuda:nccl")
        found = refusal(lambda: _communicator.require_served([group], deadline=30))

        assert Reason.UNSUPPORTED is found.reason
        assert "\n" not in found.detail
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is '1': set 2" in found.detail
        assert "TORCH_NCCL_ENABLE_MONITORING is unset, which means 1: set 0" in found.detail
        assert not _nccl_settings.BLOCKING_WAIT.is_on(os.environ)

    def test_second_backend_under_the_name_of_the_first(
        self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has no monitor, so nothing of that is asked for."""
        assert device
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
            monkeypatch.delenv(name, raising=False)
        first, second = fakes.group(), fakes.group(fakes.ProcessGroupNCCL2)
        for each in (first, second):
            fakes.register(monkeypatch, each, "cuda:nccl")
        _communicator.require_served([second], deadline=30)
        found = refusal(lambda: _communicator.require_served([first], deadline=30))

        assert "TORCH_NCCL_ENABLE_MONITORING" in found.detail

    @pytest.mark.parametrize("kind", [fakes.ProcessGroupNCCL, fakes.ProcessGroupNCCL2])
    def test_right(
        self,
        kind: type[fakes.Fake],
        device: fakes.Device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Either class, by whichever name."""
        assert device
        group = fakes.group(kind)
        fakes.register(monkeypatch, group, "cuda:nccl")
        _communicator.require_served([group], deadline=30)
        description = _communicator.describe(group)

        assert "nccl" == description.backend
        assert Rebuild().objection(group, description) is None

    def test_wrapped(self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """What debugging puts around a backend has no abort."""
        assert device
        group = fakes.Group("pair", fakes.Wrapped(fakes.make()))
        fakes.register(monkeypatch, group, "cuda:nccl")
        served: list[Any] = [group]
        found = refusal(lambda: _communicator.require_served(served, deadline=30))

        assert "found Wrapped (TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them)" in found.detail

    def test_lacking(self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """Attributes are probed, not versions."""
        assert device
        monkeypatch.delattr(fakes.Fake, "abort")

        assert "this torch's ProcessGroupNCCL lacks abort" == NCCL.objection(fakes.group(), CUDA)

    def test_made_to_be_reconfigured(self, device: fakes.Device) -> None:
        """Such a group does not work before it was."""
        assert device
        group = fakes.group(fakes.ProcessGroupNCCL2)
        group._get_backend(fakes.CUDA).options.enable_reconfigure = True
        found = NCCL.objection(group, CUDA)

        assert found is not None
        assert "made to be reconfigured" in found

    def test_in_place(self, device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch may be able to; here it is not written."""
        assert device
        from torch.distributed import distributed_c10d as c10d

        for name in ("_supports_reconfigure", "_get_reconfigure_handle", "_reconfigure"):
            monkeypatch.setattr(c10d, name, lambda *_: True, raising=False)
        group = fakes.group(fakes.ProcessGroupNCCL2)
        fakes.register(monkeypatch, group, "cuda:nccl2")
        found = Reconfigure().objection(group, _communicator.describe(group))

        assert "reconfiguring nccl2 in place is not written for here" == found


class TestFootprint:
    """Threads that prove that a communicator has gone."""

    @pytest.mark.parametrize(
        ("kind", "blocking", "expected"),
        [
            (fakes.ProcessGroupNCCL, "0", 1),
            (fakes.ProcessGroupNCCL, "1", 0),
            (fakes.ProcessGroupNCCL2, "0", 0),
        ],
    )
    def test_watchdog(
        self,
        kind: type[fakes.Fake],
        blocking: str,
        expected: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """There is none where calls wait, and the second backend's has no name."""
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", blocking)

        assert expected == Footprint([fakes.make(kind)]).threads.total()
