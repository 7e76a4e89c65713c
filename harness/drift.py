"""How far the state of a run is from its reference's: digests first, numbers where they differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.layout import STATE
from harness.records import Digests, Drift, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

_NAMED = 20
STATE_LIMIT_BYTES = 64 * 2**20
"""A rank keeps its final tensors for a numeric comparison only up to this size."""


def final(records: Iterable[Digests]) -> dict[tuple[int, int], Digests]:
    """The digest that counts for every (rank, update): after a replay, the last."""
    return {(record.rank, record.update): record for record in records}


def compare(
    own: Iterable[Digests],
    reference: Iterable[Digests],
    *,
    frontier: int,
    world_size: int,
    numbers: tuple[float, float] | None = None,
) -> Drift:
    """Compare every rank's S_app at `frontier` with the reference's, bit by bit.

    Args:
        own: digests of the run.
        reference: digests of the uninterrupted run of the same block.
        frontier: last update of the schedule.
        world_size: number of ranks.
        numbers: (largest absolute difference, L2 norm of the difference) over
            all floating-point tensors of all ranks, if they were measured.
    """
    mine, theirs = final(own), final(reference)
    common = mine.keys() & theirs.keys()
    at_frontier = [(rank, frontier) for rank in range(world_size)]
    if not all(key in common for key in at_frontier):
        return Drift(level="not_compared", equal=None, ranks=world_size)
    equal = sum(mine[key].root == theirs[key].root for key in at_frontier)
    differing = sorted(update for rank, update in common
                       if mine[rank, update].root != theirs[rank, update].root)  # fmt: skip
    same = equal == world_size and not differing
    return Drift(
        level="bitwise" if same else "differs",
        equal=same,
        ranks_equal=equal,
        ranks=world_size,
        max_abs=0.0 if same else (numbers or (None, None))[0],
        l2=0.0 if same else (numbers or (None, None))[1],
        first_update=differing[0] if differing else None,
        tensors=[] if same else _differing_tensors(mine, theirs, at_frontier),
    )


def _differing_tensors(
    mine: Mapping[tuple[int, int], Digests],
    theirs: Mapping[tuple[int, int], Digests],
    keys: Iterable[tuple[int, int]],
) -> list[str]:
    names: list[str] = []
    for key in keys:
        own, other = mine[key].tensors or {}, theirs[key].tensors or {}
        names += [
            f"rank {key[0]}: {name}"
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
    return names[:_NAMED]


def prune(path: Path, reference: Iterable[Digests], *, frontier: int) -> None:
    """Drop digests per tensor where they say nothing: roots equal, and not the last frontier."""
    theirs = final(reference)
    kept = []
    for record in read_lines(path, Digests):
        other = theirs.get((record.rank, record.update))
        if record.update != frontier and other is not None and other.root == record.root:
            record.tensors = None
        kept.append(record)
    import msgspec

    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in kept))


def save_state(state: Mapping[str, torch.Tensor | int], folder: Path, *, rank: int) -> None:
    """Keep what a rank holds of the final floating-point tensors, if it is small enough."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = {
        # Who compares has no process groups, which a distributed tensor would bring with it.
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if sum(tensor.nbytes for tensor in tensors.values()) <= STATE_LIMIT_BYTES:
        (folder / STATE).mkdir(exist_ok=True)
        torch.save(tensors, folder / STATE / f"rank{rank}.pt")


def measure_numbers(own: Path, reference: Path, *, world_size: int) -> tuple[float, float] | None:
    """Largest absolute difference and L2 norm of the difference of two runs' final tensors.

    None unless every rank of both runs kept its tensors and they have the same
    names and shapes.
    """
    import torch

    largest, squares = 0.0, 0.0
    for rank in range(world_size):
        paths = [folder / STATE / f"rank{rank}.pt" for folder in (own, reference)]
        if not all(path.exists() for path in paths):
            return None
        mine, theirs = (torch.load(path, weights_only=True) for path in paths)
        if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in theirs.items()}:
            return None
        for name, tensor in mine.items():
            difference = (tensor.double() - theirs[name].double()).abs()
            if difference.numel():
                # Not Python's max, which loses a NaN.
                largest = float(difference.max().clamp_min(largest))
                squares += float(difference.square().sum())
    return largest, math.sqrt(squares)
