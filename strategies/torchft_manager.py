"""torchft's Manager: every update is voted on, and the next quorum connects the replicas anew."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from strategies._base import Groups, Outcome, Strategy, connect_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from strategies._base import Attempt, Failure, Job, Layout, Settings, Timeouts

_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_HOST = "127.0.0.1"
_QUIET = {"RUST_LOG": "error"}
"""It logs several lines per update otherwise."""

_NOTES = (
    "lighthouse in the supervisor, one store per replica group; every replica is needed to commit",
    "a collective that fails between updates is given up: torchft goes on to the next update",
)


class TorchftManager(Strategy):
    """A failed update is discarded on every rank and done again under a new quorum."""

    name = "torchft_manager"
    summary = "torchft's Manager and lighthouse: failed updates are discarded and done again"
    distribution = "torchft"
    expected_inside = "pass"
    gates_updates = True
    variants = {
        "sync quorum": {"async_quorum": False, "report": True},
        "async quorum": {"async_quorum": True, "report": True},
        "sync quorum, failures between updates not reported": {
            "async_quorum": False,
            "report": False,
        },
    }

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Bound the votes by the soft deadline and quorums by the barrier's."""
        base = super().settings(timeouts, num_faults=num_faults, backend=backend)
        return dataclasses.replace(
            base,
            environment={**base.environment, **_QUIET},
            options={
                **self.options,
                "vote_timeout_s": timeouts.soft,
                "quorum_timeout_s": timeouts.barrier,
            },
            notes=_NOTES,
        )

    @contextlib.contextmanager
    def services(self, layout: Layout) -> Iterator[Mapping[str, str]]:
        """Run the lighthouse, which finds out who takes part."""
        with _environment(_QUIET):  # read when torchft is imported
            from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(
            bind=f"{_HOST}:0",
            min_replicas=layout.num_replicas,
            join_timeout_ms=1000,
            quorum_tick_ms=10,
            heartbeat_timeout_ms=2000,
        )
        try:
            # The address that it gives has the machine's name, which need not resolve.
            yield {_LIGHTHOUSE: f"http://{_HOST}:{lighthouse.address().rsplit(':', 1)[1]}"}
        finally:
            lighthouse.shutdown()

    def connect(self, attempt: Attempt) -> Groups:
        """Use torch's groups for the shards and the manager's for the replicas."""
        shard = connect_shards(attempt)
        layout = attempt.layout
        self._job: Job | None = None
        self._failure: BaseException | None = None
        import torch.distributed as dist
        from torchft.process_group import ManagedProcessGroup

        self._manager = self._make_manager(attempt)
        group = ManagedProcessGroup(self._manager)
        group.register("replicate")
        self._manager.start_quorum()  # FSDP1 asks for the group's size, which is 0 before
        self._manager.wait_quorum()
        if layout.shard_size > 1:
            return Groups(replicate=group, shard=shard)
        hook = (self._manager, _average)
        return Groups(replicate=group, shard=shard, ddp=dist.group.WORLD, ddp_hook=hook)

    def _make_manager(self, attempt: Attempt) -> Any:
        layout, options = attempt.layout, attempt.settings.options
        from torchft import Manager
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        kind = ProcessGroupNCCL if attempt.backend == "nccl" else ProcessGroupGloo
        return Manager(
            pg=kind(timeout=timedelta(seconds=attempt.settings.group_timeout)),
            state_dict=self._state,
            load_state_dict=self._load,
            min_replica_size=layout.num_replicas,
            use_async_quorum=options["async_quorum"],
            timeout=timedelta(seconds=options["vote_timeout_s"]),
            quorum_timeout=timedelta(seconds=options["quorum_timeout_s"]),
            connect_timeout=timedelta(seconds=options["vote_timeout_s"]),
            rank=layout.shard,
            world_size=layout.shard_size,
            store_addr=_HOST,
            store_port=self._serve_store(attempt),
            lighthouse_addr=os.environ[_LIGHTHOUSE],
            replica_id=f"replica{layout.replica}",
            hostname=_HOST,
            init_sync=False,
            max_retries=5,
        )

    def _serve_store(self, attempt: Attempt) -> int:
        """Give each replica group a store of its own, as the manager wants it."""
        import torch.distributed as dist

        meeting = attempt.store()
        key = f"torchft/{attempt.index}/{attempt.layout.replica}"
        if attempt.layout.shard == 0:
            self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            meeting.set(key, str(self._store.port))
        return int(meeting.get(key))

    def attach(self, job: Job) -> None:
        """Tell the manager where training is."""
        self._job = job
        self._manager.load_state_dict({"step": job.frontier, "batches_committed": 0})

    def _state(self) -> dict[str, Tensor | int]:
        """What a replica that fell behind gets from one that did not: all but random states."""
        assert self._job is not None
        state = {name: value for name, value in self._job.state().items() if _is_shared(name)}
        return {name: value if isinstance(value, int) else value.detach().clone()
                for name, value in state.items()}  # fmt: skip

    def _load(self, state: Mapping[str, Tensor | int]) -> None:
        assert self._job is not None
        own = self._job.state()
        for name, value in state.items():
            mine = own[name]
            if not isinstance(mine, int):
                mine.detach().copy_(value)
        self._job.loader.load_state_dict({"cursor": state["cursor"]})
        self._job.frontier = self._manager.current_step()
        self._job.emit("healed", update=self._job.frontier)

    def begin(self, job: Job) -> None:
        """Start the quorum of the next update; a failure since the last one spoils it."""
        self._manager.start_quorum()
        if self._failure is not None:
            self._manager.report_error(self._failure)
            self._failure = None

    def swallowed(self, job: Job) -> BaseException | None:
        """Look at the manager: a collective that fails returns normally."""
        found = self._manager.errored()
        return None if found is None else found.original_exception

    def may_commit(self, job: Job) -> bool:
        """Have the replica group vote."""
        return bool(self._manager.should_commit())

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Go on: the next quorum connects anew. What raised inside an update is the launcher's."""
        if failure.phase != "boundary":
            job.emit("reject", reason="an exception left the update; the manager cannot undo it")
            return Outcome.EXIT
        # Starting a quorum forgets the failure, and the update would wait out the timeout again.
        if job.attempt.settings.options["report"] and isinstance(failure.error, Exception):
            self._failure = failure.error
        return Outcome.FORGONE

    def close(self, job: Job) -> None:
        """End the manager's threads and servers."""
        self._manager.shutdown(wait=False)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set, for a while: other contenders' runs must not inherit it."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _is_shared(name: str) -> bool:
    """Whether a part of S_app is the same on the ranks that hold the same shard."""
    return not name.startswith("rng/")


def _average(manager, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP would read annotations
    """Average one bucket of DDP's gradients over the replicas that take part.

    The future is completed by hand: the manager's own can hang in DDP.
    """
    import torch

    gradients = bucket.buffer()
    manager.allreduce(gradients).wait()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
