"""NVIDIA's resiliency extension: the training function restarts inside the living processes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import os
import warnings
from typing import TYPE_CHECKING, Any

from strategies._base import Outcome, Settings, Strategy, raising_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategies._base import Attempt, Failure, Job, Timeouts

_FAST = {
    "monitor_thread_interval": 1.0,
    "monitor_process_interval": 0.05,
    "last_call_wait": 0.05,
    "heartbeat_interval": 0.2,
    "heartbeat_timeout": 15.0,
    "termination_grace_time": 0.5,
}

_NOTES = (
    (
        "stock abort, which cannot release a rank that waits in a Gloo collective: where shard "
        "groups are bounded they have the replicate groups' timeout, so that ranks come out of it"
    ),
    "the store is hosted by the supervisor, so no rank's end takes it away",
)


class Nvrx(Strategy):
    """`inprocess.Wrapper` around the training function; the last DCP checkpoint is loaded."""

    name = "nvrx"
    summary = "NVRx inprocess.Wrapper restarts in process, the last DCP checkpoint is loaded"
    distribution = "nvidia-resiliency-ext"
    expected_inside = "pass"
    expected_step = "pass"
    variants = {
        "fast, shards bounded": {"intervals": _FAST, "bound_shards": True},
        "fast, shards bounded, monitor thread 0.25 s": {
            "intervals": {**_FAST, "monitor_thread_interval": 0.25},
            "bound_shards": True,
        },
        "default intervals, shards bounded": {"intervals": {}, "bound_shards": True},
        "fast": {"intervals": _FAST, "bound_shards": False},
    }

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Take the deadlines from `timeouts`, the intervals from the variant."""
        bounded = self.options["bound_shards"]
        intervals = {
            **self.options["intervals"],
            "soft_timeout": timeouts.soft,
            "hard_timeout": timeouts.hard,
            "barrier_timeout": timeouts.barrier,
            "completion_timeout": timeouts.barrier,
        }
        if intervals.get("heartbeat_timeout", 30.0) >= timeouts.barrier:
            intervals["heartbeat_timeout"] = timeouts.barrier / 2
        return Settings(
            environment=raising_environment(backend),
            max_restarts=num_faults,  # a dead rank: the wrapper replaces no process
            group_timeout=timeouts.group,
            shard_timeout=timeouts.group if bounded else timeouts.world,
            options={"intervals": intervals, "max_iterations": num_faults + 1},
            notes=_NOTES,
        )

    def enter(self, body: Callable[[Attempt], None], attempt: Attempt) -> None:
        """Wrap `body`; every restart is an attempt of its own."""
        from nvidia_resiliency_ext import inprocess

        # The store outlives the ranks: no restart of either kind may use another's keys.
        first = attempt.index * (attempt.settings.options["max_iterations"] + 1)

        def train(call_wrapper: inprocess.CallWrapper = None) -> None:
            iteration = call_wrapper.iteration
            body(dataclasses.replace(attempt, index=first + iteration))

        train.__annotations__["call_wrapper"] = inprocess.CallWrapper
        _wrapper(inprocess, attempt)(train)()

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Let the exception reach the wrapper."""
        return Outcome.RERAISE


def _wrapper(inprocess: Any, attempt: Attempt) -> Any:
    """Build the Wrapper from what its signature takes (0.4.1 and 0.6 differ)."""
    options = attempt.settings.options
    seconds = {name: dt.timedelta(seconds=value) for name, value in options["intervals"].items()}
    host, port = attempt.store_address
    arguments = {
        "store_factory": _client_store(inprocess),
        "store_kwargs": {"host_name": host, "port": port, "life": attempt.index},
        "initialize": inprocess.initialize.RetryController(
            max_iterations=options["max_iterations"],
            min_world_size=attempt.layout.world_size,
        ),
        **seconds,
    }
    # Health checks of the GPU run where LOCAL_RANK is set, and fail every restart on CPU.
    if attempt.device.type == "cpu":
        os.environ.pop("LOCAL_RANK", None)
    accepted = inspect.signature(inprocess.Wrapper).parameters
    wrapper = inprocess.Wrapper(
        **{name: value for name, value in arguments.items() if name in accepted}
    )
    left_out = sorted(arguments.keys() - accepted.keys())
    if left_out:
        warnings.warn(f"nvrx: this version takes no {', '.join(left_out)}", stacklevel=2)
    return wrapper


def _client_store(inprocess: Any) -> Any:
    """A store class whose server lives in the supervisor.

    torch 2.13's `Store.barrier` would shadow NVRx's method of the same name,
    in PrefixStore too.
    """
    import torch.distributed as dist

    class ClientStore(inprocess.store.StoreMixin, dist.PrefixStore):
        def __init__(self, host_name: str, port: int, life: int) -> None:
            client = dist.TCPStore(
                host_name,
                port,
                world_size=None,
                is_master=False,
                timeout=dt.timedelta(seconds=60),
                wait_for_workers=False,
            )
            dist.PrefixStore.__init__(self, f"life{life}", client)

    for name in ("TCPStore", "PrefixStore"):  # those that this version has
        store = getattr(inprocess.store, name, None)
        if store is not None:
            store.barrier = inprocess.store.StoreMixin.barrier
    return ClientStore
