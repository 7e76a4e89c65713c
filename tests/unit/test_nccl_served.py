"""Which groups and settings are refused when the runtime is attached, and what a group leaves."""

from __future__ import annotations

import os
from typing import Any

import pytest

from accelpact import _communicator
from accelpact._communicator._backends import BACKENDS, _nccl_settings
from accelpact._errors import Reason
from accelpact._native import Footprint
from accelpact._replacement import Rebuild, Reconfigure
from tests.unit import nccl_fakes as fakes
from tests.unit.nccl_fakes import refusal

NCCL = BACKENDS["nccl"]
CUDA = [fakes.CUDA]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fakes.Device:
    """A device that is not there, and settings that are right."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    return fakes.Device(monkeypatch)


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
