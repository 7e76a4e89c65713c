"""What a workload of the user's own needs, from what one process of it was seen to need."""

from __future__ import annotations

import dataclasses

from harness.workload.presets import PROCESS_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes, of one process that holds the whole model and did one microbatch."""

    parameters: int
    trained: int
    """Of the parameters that have gradients."""
    optimizer: int
    """Its state."""
    unit: int
    """Parameters of the largest unit that is sharded by itself."""
    root: int
    """Parameters outside all units."""
    data: int
    """What building took beyond the model, the data for the most part."""
    activations: int
    """What forward and backward pass took beyond the gradients."""
    accumulates: bool
    """Whether gradients stay whole until the last microbatch."""


def needed(measured: Measured, *, ranks: int, shards: int) -> int:
    """Estimate the bytes of `ranks` ranks at the peak of an update.

    Per rank: its shard of parameters and optimizer state, the gradients (whole while they
    accumulate), what is gathered at once (root, unit and next unit, as much again to reduce their
    gradients; with one shard a second copy of the gradients, in buckets), activations, data, and
    the process itself.
    """
    whole = measured.accumulates or shards == 1
    gradients = measured.trained if whole else measured.trained // shards
    gathered = 2 * (measured.root + 2 * measured.unit) if shards > 1 else measured.trained
    state = (measured.parameters + measured.optimizer) // shards + gradients + gathered
    return ranks * (state + measured.activations + measured.data + PROCESS_BYTES)
