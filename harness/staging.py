"""What asynchronous checkpoints need of torch, and a copy of the state that outlives an update.

Known of torch 2.13 and 2.14: `StateDictStager` cannot copy FSDP1's ShardedTensors, and what a rank
pickles of them cannot be read in a process whose default group is another; DTensors can be both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import torch

from harness.spec import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strategies import Groups

ASYNC = ("async-thread", "async-process", "async-cached")
IN_A_PROCESS = ("async-process", "async-cached")
_CHECKPOINT = "torch.distributed.checkpoint"
_NEEDED = {
    "async-thread": [("state_dict_saver", "async_save")],
    "async-process": [("state_dict_saver", "AsyncCheckpointerType")],
    "async-cached": [
        ("state_dict_saver", "AsyncCheckpointerType"),
        ("staging", "DefaultStager"),
        ("staging", "StagingOptions"),
    ],
}


def check(modes: Sequence[str]) -> None:
    """Refuse modes that this torch does not have.

    Raises:
        SpecError: names the mode and what is missing.
    """
    for mode in modes:
        for module, name in _NEEDED.get(mode, []):
            if not hasattr(importlib.import_module(f"{_CHECKPOINT}.{module}"), name):
                raise SpecError(
                    f"checkpoint-mode: {mode} needs {_CHECKPOINT}.{module}.{name}; "
                    f"found torch {torch.__version__} without it; use sync"
                )


def portable(state: Any, *, groups: Groups, device: str) -> Any:
    """Return `state` with a DTensor in place of every ShardedTensor: the same shard, not copied.

    FSDP1 cuts a parameter along its first dimension as `torch.chunk` does, and so does DTensor.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh: DeviceMesh | None = None

    def convert(value: Any) -> Any:
        nonlocal mesh
        if isinstance(value, dict):
            return {key: convert(each) for key, each in value.items()}
        if not isinstance(value, ShardedTensor):
            return value
        if mesh is None:
            mesh = DeviceMesh.from_group(groups.shard, device)
        size, shards = value.size(), value.local_shards()
        nothing = torch.empty((0, *size[1:]), dtype=value.dtype, device=device)
        local = shards[0].tensor if shards else nothing
        whole = torch.empty(size, device="meta")
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    return convert(state)


class BufferedStager:
    """Copies every state into the buffers that the first one was copied into.

    torch's own stager keeps its buffers by the storages that it copies from, and those of a state
    that is gathered for the save are others each time. Satisfies torch's `AsyncStager`.
    """

    _synchronize_after_execute = False  # a part of torch's protocol

    def __init__(self, *, pinned: bool) -> None:
        """Share the buffers with other processes; `pinned` where a device copies into them."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._buffers: dict[str, Any] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether training must wait for the copy: `stage` has waited."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy `state_dict`, completely, and return the copy; the one before is overwritten."""
        if self._buffers is None or not _overwrite(self._buffers, state_dict):
            self._buffers = cast("dict[str, Any]", self._stager.stage(state_dict))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._buffers

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has waited."""

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers = None
        self._stager.close()


@torch.no_grad()
def _overwrite(buffers: dict[str, Any], state: dict[str, Any]) -> bool:
    """Copy `state` over `buffers`; False where they are not of one form."""
    if buffers.keys() != state.keys():
        return False
    for key, value in state.items():
        kept = buffers[key]
        if isinstance(value, dict):
            if not isinstance(kept, dict) or not _overwrite(kept, value):
                return False
        elif isinstance(value, torch.Tensor):
            source, target = _local(value), _local(kept)
            if target is None or source is None or not _alike(source, target):
                return False
            target.copy_(source, non_blocking=target.is_pinned())
        else:
            buffers[key] = value
    return True


def _local(value: Any) -> torch.Tensor | None:
    to_local = getattr(value, "to_local", None)
    found = value if to_local is None else to_local()
    return found if isinstance(found, torch.Tensor) else None


def _alike(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (source.shape, source.dtype) == (target.shape, target.dtype)
