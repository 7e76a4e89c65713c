"""torchft's Manager: every update is voted on, and the next quorum connects the replicas anew.

Each replica has a launcher of its own. One whose ranks were started again waits for the next quorum
like the others, and gets the state that they have committed from one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelpact._state import clean_name
from strategies._base import Groups, Outcome, Strategy, connect_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor

    from strategies._base import Attempt, Failure, Job, Layout, Settings, Timeouts

_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_HOST = "127.0.0.1"
_QUIET = {"RUST_LOG": "error"}
"""It logs several lines per update otherwise."""

_NOTES = (
    (
        "lighthouse in the supervisor; one launcher and one store per replica, which is started "
        "again alone and gets its state from another; every replica is needed to commit"
    ),
    "a replica that comes back first loads its last checkpoint: all could have ended",
    "a collective that fails between updates is given up: torchft goes on to the next update",
    (
        "no other replica has a rank's random state and buffers: each keeps its own in the "
        "supervisor's store, before every vote"
    ),
)


class TorchftManager(Strategy):
    """A failed update is discarded on every rank and done again under a new quorum."""

    name = "torchft_manager"
    summary = "torchft's Manager and lighthouse: failed updates are discarded and done again"
    distribution = "torchft"
    expected_inside = "pass"
    expected_killed = "pass"
    expected_step = "pass"
    gates_updates = True
    variants = {
        "sync quorum": {"async_quorum": False, "report": True, "keep_own": True},
        "async quorum": {"async_quorum": True, "report": True, "keep_own": True},
        "sync quorum, failures between updates not reported": {
            "async_quorum": False,
            "report": False,
            "keep_own": True,
        },
        "sync quorum, own state not kept": {
            "async_quorum": False,
            "report": True,
            "keep_own": False,
        },
    }

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Bound votes by the soft deadline, and quorums by what a replica takes to come back."""
        base = super().settings(timeouts, num_faults=num_faults, backend=backend)
        return dataclasses.replace(
            base,
            environment={**base.environment, **_QUIET},
            options={
                **self.options,
                "vote_timeout_s": timeouts.soft,
                "quorum_timeout_s": max(timeouts.barrier, timeouts.world),
            },
            # An asynchronous quorum has the state read in the middle of an update: parameters are
            # gathered then and the cursor has moved, so nobody could be healed with it.
            launchers="world" if self.options["async_quorum"] else "replica",
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
        self._failure: Exception | None = None
        self._meeting = attempt.store()
        import torch.distributed as dist
        from torchft.process_group import ManagedProcessGroup

        class ReplicateGroup(ManagedProcessGroup):
            """Has its size before the first quorum, which is when FSDP1 asks for it."""

            def size(self) -> int:
                return layout.num_replicas

        self._manager = self._make_manager(attempt)
        group = ReplicateGroup(self._manager)
        group.register("replicate")
        if layout.shard_size > 1:
            return Groups(replicate=group, shard=shard)
        return Groups(replicate=group, shard=shard, ddp=dist.group.WORLD, ddp_hook=(self, _average))

    def average(self, gradients: Tensor) -> None:
        """Average over the replicas; before training begins there is no quorum that could."""
        if self._job is not None:
            self._manager.allreduce(gradients).wait()

    def _make_manager(self, attempt: Attempt) -> Any:
        layout, options = attempt.layout, attempt.settings.options
        from torchft import Manager
        from torchft.checkpointing import HTTPTransport
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        kind = ProcessGroupNCCL if attempt.backend == "nccl" else ProcessGroupGloo

        class Communicator(kind):  # type: ignore[valid-type, misc]
            """Counts how often a quorum has connected it."""

            num_connected = 0

            def configure(self, *arguments: Any) -> None:
                self.num_connected += 1
                super().configure(*arguments)

        class Transport(HTTPTransport[Any]):
            """Has an address that resolves without the machine's name."""

            def address(self) -> str:
                return f"http://{_HOST}:{super().address().rsplit(':', 1)[1]}"

        self._communicator = Communicator(timeout=timedelta(seconds=attempt.settings.group_timeout))
        vote_timeout = timedelta(seconds=options["vote_timeout_s"])
        return Manager(
            pg=self._communicator,
            state_dict=self._state,
            load_state_dict=self._load,
            min_replica_size=layout.num_replicas,
            use_async_quorum=options["async_quorum"],
            timeout=vote_timeout,
            quorum_timeout=timedelta(seconds=options["quorum_timeout_s"]),
            connect_timeout=vote_timeout,
            rank=layout.shard,
            world_size=layout.shard_size,
            store_addr=_HOST,
            store_port=self._serve_store(attempt),
            lighthouse_addr=os.environ[_LIGHTHOUSE],
            replica_id=f"replica{layout.replica}",
            hostname=_HOST,
            checkpoint_transport=Transport(timeout=vote_timeout, num_chunks=0),
            init_sync=False,
            max_retries=5,
        )

    def _serve_store(self, attempt: Attempt) -> int:
        """Give each replica group a store of its own, as the manager wants it."""
        import torch.distributed as dist

        key = f"torchft/{attempt.index}/{attempt.layout.replica}"
        if attempt.layout.shard == 0:
            self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            self._meeting.set(key, str(self._store.port))
        return int(self._meeting.get(key))

    def attach(self, job: Job) -> None:
        """Tell the manager where training is."""
        self._job = job
        self._manager.load_state_dict({"step": job.frontier, "batches_committed": 0})

    def _state(self) -> dict[str, Tensor | int]:
        """What a replica that fell behind gets from one that did not: all but random states."""
        assert self._job is not None
        return {
            name: value if isinstance(value, int) else _local(value).clone()
            for name, value in self._job.state().items()
            if not _is_own(name)
        }

    def _load(self, state: Mapping[str, Tensor | int]) -> None:
        """Take what another replica's `_state` gave, and this rank's own random state."""
        job = self._job
        assert job is not None
        _allocate(job, state)
        own = job.state()
        for name, value in state.items():
            if not isinstance(value, int):
                _local(own[name]).copy_(value)
        job.loader.load_state_dict({"cursor": state["cursor"]})
        job.frontier = self._manager.current_step()
        complete = self._take_own(job)
        tensors = [value for value in state.values() if not isinstance(value, int)]
        job.emit(
            "healed",
            update=job.frontier,
            bytes=sum(value.numel() * value.element_size() for value in tensors),
            reason=None
            if complete
            else "this rank's random state and buffers at that update are lost",
        )

    def _keep_own(self, job: Job) -> None:
        """Keep what no other rank has, for the life of this rank that may have to follow."""
        if not job.attempt.settings.options["keep_own"]:
            return
        update = job.frontier + 1
        own = {
            name: _local(value).cpu()
            for name, value in job.state().items()
            if _is_own(name) and not isinstance(value, int)
        }
        self._meeting.set(_own_key(job, update), pickle.dumps((update, own)))

    def _take_own(self, job: Job) -> bool:
        """Go on with what the life before this one has kept; say if it is there."""
        import torch

        key = _own_key(job, job.frontier)
        if not self._meeting.check([key]):
            return False
        update, kept = pickle.loads(self._meeting.get(key))  # noqa: S301  our own
        if update != job.frontier:
            return False
        state = job.state()
        for name, value in kept.items():
            if name == "rng/cpu":
                torch.set_rng_state(value)
            elif name == "rng/cuda":
                torch.cuda.set_rng_state(value)
            else:
                _local(state[name]).copy_(value)
        return True

    def begin(self, job: Job) -> None:
        """Start the quorum of the next update; a failure since the last one spoils it."""
        before = self._communicator.num_connected
        self._manager.start_quorum()
        if self._failure is not None:
            self._manager.wait_quorum()
            if self._communicator.num_connected == before:  # else what failed is gone
                self._manager.report_error(self._failure)
            self._failure = None

    def swallowed(self, job: Job) -> BaseException | None:
        """Look at the manager: a collective that fails returns normally."""
        found = self._manager.errored()
        return None if found is None else found.original_exception

    def may_commit(self, job: Job) -> bool:
        """Have the replica group vote."""
        self._keep_own(job)  # before: a rank that ends after the vote has committed all the same
        return bool(self._manager.should_commit())

    def recover(self, job: Job, failure: Failure) -> Outcome:
        """Go on: the next quorum connects anew. What raised inside an update ends this replica.

        Its launcher starts it again, and another replica's state brings it to where the others are.
        """
        if failure.phase != "boundary":
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


def _local(value: Tensor | int) -> Tensor:
    """Return what this rank holds of a tensor, without its autograd history."""
    from torch.distributed.tensor import DTensor

    assert not isinstance(value, int)
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _allocate(job: Job, state: Mapping[str, Tensor | int]) -> None:
    """Give the optimizer the state that its first step would, where `state` has some."""
    import torch

    own = job.state()
    parameters = {clean_name(name): value for name, value in job.model.named_parameters()}
    for name, value in state.items():
        if name not in own and not isinstance(value, int):
            kind, _, path = name.partition("/")
            alike = value.shape == _local(parameters[path]).shape
            new = torch.zeros_like(parameters[path] if alike else value)
            job.optimizer.state[parameters[path]][kind] = new.detach()


def _is_own(name: str) -> bool:
    """Whether a part of S_app differs between ranks that hold the same shard."""
    return name.startswith(("rng/", "buffer/"))


def _own_key(job: Job, update: int) -> str:
    # Two are kept: what a vote is about, and what is there if it fails.
    return f"torchft/own/{job.attempt.layout.rank}/{update % 2}"


def _average(strategy, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP would read annotations
    """Average one bucket of DDP's gradients over the replicas that take part.

    The future is completed by hand: the manager's own can hang in DDP.
    """
    import torch

    gradients = bucket.buffer()
    strategy.average(gradients)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
