"""What ten and a hundred repairs leave behind in one process: nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact import _communicator, _native, _replacement
from accelpact._communicator import _interrupt
from tests.distributed import ranks, trainee
from tests.distributed.replacing import both

if TYPE_CHECKING:
    from accelpact import Pact
    from harness.job import TrainingJob
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

LOOKS = (5, 10, 20, 100)
"""After how many repairs; the first ones pay what only first ones pay."""
UPDATES_BETWEEN = 2
MEMBERS = (0, 2)
"""Ranks whose replicate group fails, again and again; ranks 1 and 3 only answer."""
GROWTH_BYTES = 16 * 2**20
"""Of the resident memory from repair 20 to repair 100; about 1 MiB is usual, and once 7 were seen,
of which the allocator gives each thread its own share; a group that stays is found by its threads
and descriptors."""


class Found(NamedTuple):
    """What one rank says."""

    root: str
    """Digest of its whole state at the end."""
    looks: list[dict[str, int]]
    """What it held after every count of `LOOKS`."""
    clean: int
    """Audits that found nothing left."""


@pytest.fixture(scope="module")
def uninterrupted() -> list[str]:
    """Digests of a run with as many updates and no failure."""

    def one(rank: Rank) -> str:
        job = trainee.make(rank)
        for _ in range(UPDATES_BETWEEN * len(LOOKS)):
            trainee.update(job)
        dist.barrier()
        return str(job.digest().root)

    return ranks.values(ranks.run(one))


class TestManyRepairs:
    """A replicate group of 2x2 ranks that fails a hundred times between updates."""

    @both
    def test_nothing_accumulates_and_state_is_kept(
        self, step: str, uninterrupted: list[str]
    ) -> None:
        """All that a process or the store can hold stays as it was; training goes on bitwise."""
        found: list[Found] = ranks.values(ranks.run(_repair_often, step, deadline=100))
        audited = LOOKS[-1] if step == "rebuild" else 0

        assert uninterrupted == [each.root for each in found]
        assert [audited, 0, audited, 0] == [each.clean for each in found]
        for each in found:
            memory = [look.pop("memory") for look in each.looks]
            assert [each.looks[0]] * len(LOOKS) == each.looks
            assert memory[3] - memory[2] < GROWTH_BYTES, memory


def _repair_often(rank: Rank, step: str) -> Found:
    job = trainee.make(rank)
    pact = trainee.protect(rank, job, replacement=step)
    store = rank.store()
    looks: list[dict[str, int]] = []
    for number in range(1, LOOKS[-1] + 1):
        if rank.number in MEMBERS:
            _fail_and_repair(job, pact)
        # The members may be at the next one by the time that a bystander looks.
        ranks.wait_until(lambda: number <= pact.generation)  # noqa: B023  it is waited for here
        assert number <= pact.generation
        if number in LOOKS:
            for _ in range(UPDATES_BETWEEN):
                trainee.update(job, pact)
            pact.audits.join()
            dist.barrier()
            looks.append(_held(pact, store, before=looks[0] if looks else None))
            dist.barrier()
    pact.close()
    return Found(job.digest().root, looks, sum(each.clean for each in pact.audits.findings))


def _fail_and_repair(job: TrainingJob, pact: Pact) -> None:
    """Break the group's connections, have a collective fail by that, and repair it."""
    _communicator.interrupt(job.groups.replicate)
    try:
        dist.all_reduce(torch.ones(4), group=job.groups.replicate)
    except RuntimeError:
        trainee.repair(job, pact)
        return
    raise AssertionError("expected the collective to fail")


def _held(pact: Pact, store: dist.Store, *, before: dict[str, int] | None) -> dict[str, int]:
    """Count what this process and the store hold; what is ending gets a moment to do so."""
    process, world, audits = psutil.Process(), c10d._world, pact.audits
    if before is not None:
        ranks.wait_until(lambda: process.num_threads() <= before["threads"], patience=5.0)
    return {
        "threads": ranks.num_threads(),
        "python threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "keys": store.num_keys(),
        **{
            f"world.{name}": len(getattr(world, name))
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
        },
        "world.tags_to_pg": sum(map(len, world.tags_to_pg.values())),
        "kept by audits": len(audits._kept) + len(audits._reaper._held),
        "redirects": len(pact.redirects._current),
        "addresses": len(_interrupt._addresses),
        "numbers of reconfigurations": len(_replacement._previous),
        "claimed threads": len(_native._CLAIMED),
        "memory": process.memory_info().rss,
    }
