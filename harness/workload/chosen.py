"""The workload that a specification asks for: a built-in one, or the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.workload import own as users
from harness.workload.corpus import Corpus
from harness.workload.presets import find_workload, memory_needed

if TYPE_CHECKING:
    from harness.spec import Spec
    from harness.workload.training import Given, Training


def maker(spec: Spec) -> Callable[[Given], Training]:
    """Return the function that builds it on a rank.

    Raises:
        SpecError: the user's file is not what it was, or not what it should be.
    """
    if spec.own is not None:
        return users.load(spec.own)
    from harness.workload import decoder

    return decoder.maker(find_workload(spec.workload), spec.data)


def describe(spec: Spec) -> dict[str, Any]:
    """Return the specification as it is published: with what identifies model and data."""
    import msgspec

    if spec.own is None:
        workload = find_workload(spec.workload)
        data = Corpus.load(spec.data).record(workload.seq_len)
        model = dataclasses.asdict(workload)
        shown = dataclasses.replace(spec, data=data["name"])
    else:
        found = {key: each for key, each in spec.own.found.items() if key != "memory"}
        data = found.pop("data")
        model = {"name": spec.workload, "file_sha256": spec.own.sha256, **found}
        bare = dataclasses.replace(spec.own, path=Path(spec.own.path).name, found={})
        shown = dataclasses.replace(spec, own=bare)
    return {**msgspec.to_builtins(shown), "data": data, "model": model}


def needs(spec: Spec) -> int:
    """Estimate the bytes that all ranks need together."""
    if spec.own is not None:
        from harness.workload.memory import Measured, needed

        measured = Measured(**spec.own.found["memory"])
        return needed(measured, ranks=spec.mesh.world_size, shards=spec.mesh.shard)
    return memory_needed(
        find_workload(spec.workload),
        spec.mesh.world_size,
        spec.mesh.shard,
        spec.dtype,
        activation_checkpointing=spec.activation_checkpointing,
    )
