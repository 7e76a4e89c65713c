"""The bare cost of a repair: what no implementation of the same steps can avoid."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact import _communicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from accelpact._communicator import Description


def measure_floor(
    group: ProcessGroup, *, store: Store, rank: int, repeats: int = 5, idle_s: float = 0.0
) -> list[float]:
    """Time two control round trips, one group build and one probe, without any protocol.

    Every member of `group` calls this at the same time; `group` itself is only
    described. A control round trip is one key set and all members' keys read.

    Args:
        group: the group whose like is built.
        store: a prefix nobody else uses.
        rank: this rank's global rank.
        repeats: how often.
        idle_s: seconds of doing nothing before each, as a failure is preceded by a wait in
            which caches and cores go cold.

    Returns:
        Milliseconds on this rank, one value per repeat; the first includes what
        only a first call pays.
    """
    description = _communicator.describe(group)
    times = []
    for repeat in range(repeats):
        scope = dist.PrefixStore(f"floor/{repeat}/", store)
        time.sleep(idle_s)
        _round_trip(scope, "ready", rank, description.ranks)
        start = time.perf_counter()
        built = bare_repair(description, store=scope, rank=rank)
        times.append((time.perf_counter() - start) * 1e3)
        del built
    return times


def bare_repair(description: Description, *, store: Store, rank: int) -> ProcessGroup:
    """Do the unavoidable once; return the group that was built, for the caller to drop."""
    _round_trip(store, "first", rank, description.ranks)
    built = _communicator.connect(description, store=store, rank=rank)
    _communicator.probe(built, description)
    _round_trip(store, "second", rank, description.ranks)
    return built


def _round_trip(store: Store, name: str, rank: int, members: tuple[int, ...]) -> None:
    store.set(f"{name}/{rank}", "1")
    store.multi_get([f"{name}/{member}" for member in members])
