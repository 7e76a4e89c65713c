"""What contenders that rest on NVIDIA's package hand to it, whichever version it is."""

from __future__ import annotations

import datetime as dt
import os
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import strategies
from harness import launcher, plan
from strategies import Attempt, Layout, Settings, Timeouts
from strategies.nvrx import _wrapper

TIMEOUTS = Timeouts()


def attempt(device: str = "cpu") -> Attempt:
    options = {"intervals": {"soft_timeout": 10.0, "heartbeat_interval": 0.2}, "max_iterations": 2}
    return Attempt(
        index=1,
        layout=Layout(rank=0, num_replicas=2, shard_size=2),
        device=torch.device(device),
        backend="gloo",
        settings=Settings(options=options),
        store=dist.HashStore,
        store_address=("127.0.0.1", 1234),
    )


class Mixin:
    """NVRx's store methods; torch's own stores have one of the same name."""

    def barrier(self) -> str:
        return "nvrx"


class Stored(Mixin):
    def barrier(self) -> str:
        return "torch"


class Older:
    """The Wrapper of 0.4.1, as far as its arguments go."""

    def __init__(
        self,
        *,
        store_factory: Any = None,
        store_kwargs: Any = None,
        initialize: Any = None,
        rank_filter: Any = None,
        soft_timeout: Any = None,
        heartbeat_interval: Any = None,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if value is not None}


class Newer:
    """The Wrapper of 0.6: `rank_filter` is gone, `monitor_process_pidfile` has come."""

    def __init__(
        self,
        *,
        store_factory: Any = None,
        store_kwargs: Any = None,
        initialize: Any = None,
        monitor_process_pidfile: Any = None,
        soft_timeout: Any = None,
        heartbeat_interval: Any = None,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if value is not None}


class Narrow:
    """A Wrapper that takes no intervals."""

    def __init__(self, store_factory: Any, store_kwargs: Any, initialize: Any) -> None:
        self.given = (store_factory, store_kwargs, initialize)


def package(wrapper: type) -> Any:
    stores = types.SimpleNamespace(
        StoreMixin=Mixin,
        TCPStore=type("TCPStore", (Stored,), {}),
        PrefixStore=type("PrefixStore", (Stored,), {}),
    )
    initialize = types.SimpleNamespace(RetryController=lambda **given: given)
    return types.SimpleNamespace(Wrapper=wrapper, store=stores, initialize=initialize)


class TestNvrx:
    @pytest.mark.parametrize("wrapper", [Older, Newer])
    def test_serves_both_versions(self, wrapper: type) -> None:
        """What both take is given to both; what only one has is left to it."""
        given = _wrapper(package(wrapper), attempt()).given

        assert dt.timedelta(seconds=10) == given["soft_timeout"]
        assert dt.timedelta(seconds=0.2) == given["heartbeat_interval"]
        assert {"max_iterations": 2, "min_world_size": 4} == given["initialize"]
        assert {"host_name": "127.0.0.1", "port": 1234, "life": 1} == given["store_kwargs"]
        assert not {"rank_filter", "monitor_process_pidfile"} & given.keys()

    def test_what_is_not_taken_is_said(self) -> None:
        """A deadline that does not apply must not go unnoticed."""
        with pytest.warns(UserWarning, match="takes no heartbeat_interval, soft_timeout"):
            _wrapper(package(Narrow), attempt())

    def test_stores_have_nvrx_barrier(self) -> None:
        """The method of torch that has their name would be found first."""
        found = package(Newer)
        _wrapper(found, attempt())

        assert "nvrx" == found.store.TCPStore().barrier()
        assert "nvrx" == found.store.PrefixStore().barrier()

    @pytest.mark.parametrize(("device", "kept"), [("cpu", []), ("cuda", ["0"])])
    def test_checks_of_the_gpu(
        self, monkeypatch: pytest.MonkeyPatch, device: str, kept: list[str]
    ) -> None:
        """They run where LOCAL_RANK is set and fail without a GPU."""
        monkeypatch.setenv("LOCAL_RANK", "0")
        _wrapper(package(Newer), attempt(device))

        assert kept == [value for name, value in os.environ.items() if name == "LOCAL_RANK"]


class TestColdFt:
    def test_on_request_only(self) -> None:
        """It is known, and takes part where it is named."""
        assert "cold_ft" in strategies.names()
        assert "cold_ft" not in [entry.label for entry in plan.contenders(())]
        assert ["cold_ft"] == [entry.label for entry in plan.contenders(["cold_ft"])]

    def test_heartbeats_outlast_collectives(self) -> None:
        """A rank that waits for its slowest collective is not taken for one that hangs."""
        settings = strategies.find("cold_ft")().settings(TIMEOUTS, num_faults=2, backend="gloo")

        assert 2 == settings.max_restarts
        assert "--ft-rank-heartbeat-timeout=63" in settings.options["launcher_arguments"]

    def test_launcher_is_the_one_that_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With its own arguments before those that all launchers take."""
        seen: list[str] = []
        fake = types.ModuleType("some_launcher")
        fake.main = seen.extend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "some_launcher", fake)
        monkeypatch.setattr(launcher, "die_with_parent", lambda: None)
        launcher.main(["4", "1", "0.1", "folder", "some_launcher", "--ft-own=1"])

        assert ["--ft-own=1", "--nnodes=1", "--nproc-per-node=4"] == seen[:3]
        assert ["-m", "harness.worker", "folder"] == seen[-3:]
