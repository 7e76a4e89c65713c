"""Checkpoints with torch's own DCP: complete or refused, bitwise or refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness.records import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from harness.job import TrainingJob

_MANIFEST = "manifest.json"
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, truncated or not what was saved; names it."""


class Manifest(msgspec.Struct, kw_only=True):
    """What a complete checkpoint consists of."""

    update: int
    files: dict[str, int]
    """Size in bytes of every file."""
    roots: list[str]
    """Digest of every rank's S_app when it was saved."""


def scratch(folder: Path, update: int, attempt: int) -> Path:
    """Where `attempt` writes the checkpoint of `update` before it is complete.

    Attempts in one process may overlap: what writes for an earlier one can outlive it.
    """
    return folder / f"{_name(update)}.{attempt}{_PARTIAL}"


def publish(written: Path, *, update: int, roots: list[str]) -> int:
    """Give a checkpoint that every rank has written its final name; one rank calls this.

    If there is one of that name, which an earlier attempt has completed in the meantime, it stays.

    Returns:
        Size in bytes of what was written.
    """
    files = {path.name: path.stat().st_size for path in sorted(written.iterdir())}
    write_json(written / _MANIFEST, Manifest(update=update, files=files, roots=roots))
    final = written.with_name(_name(update))
    if final.exists():
        shutil.rmtree(written)
    else:
        written.rename(final)
    return sum(files.values())


def _name(update: int) -> str:
    return f"update-{update:06d}"


def chosen(folder: Path) -> Path | None:
    """Return the checkpoint that all ranks restore, None if there is none; all ranks call this.

    One may be completed while they look, so one rank looks. It removes what is not complete.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        for left in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        newest = latest(folder)
        found = [newest.name if newest is not None else None]
    dist.broadcast_object_list(found, src=0)
    return folder / found[0] if found[0] is not None else None


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder`, None if there is none."""
    found = sorted(folder.glob("update-??????")) if folder.exists() else []
    return found[-1] if found else None


def verify(checkpoint: Path) -> Manifest:
    """Check that every file is there and has its size, before anything is loaded.

    Raises:
        CheckpointError: names the checkpoint and the file.
    """
    try:
        manifest = msgspec.json.decode((checkpoint / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.name}: expected a complete checkpoint with {_MANIFEST}; "
            f"{error}; it was not loaded"
        ) from None
    for name, size in manifest.files.items():
        path = checkpoint / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            what = "it is missing" if found is None else f"found {found}"
            raise CheckpointError(
                f"checkpoint {checkpoint.name}: expected {name} of {size} bytes; {what}; "
                "the checkpoint was not loaded"
            )
    return manifest


def restore(job: TrainingJob, checkpoint: Path) -> None:
    """Load `checkpoint` into `job` and prove that it is what was saved; all ranks call this.

    Raises:
        CheckpointError: it is incomplete or unreadable, or a rank's restored state
            has another digest than the saved one. Every rank raises it.
    """
    manifest = verify(checkpoint)
    if len(manifest.roots) != dist.get_world_size():
        raise CheckpointError(
            f"checkpoint {checkpoint.name}: expected one of {dist.get_world_size()} ranks; found "
            f"{len(manifest.roots)}; it was not loaded"
        )
    state = collect(job)
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:  # the same on every rank; not an Exception
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"checkpoint {checkpoint.name}: expected files that torch can read; rank {rank} found "
            f"{type(cause).__name__}: {cause}; the checkpoint was not loaded"
        ) from None
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    own = state[_own_key()]
    with torch.no_grad():
        for name, buffer in job.model.named_buffers():
            buffer.copy_(own[f"buffer/{name}"])
    torch.set_rng_state(own["rng_cpu"])
    if "rng_cuda" in own:
        torch.cuda.set_rng_state(own["rng_cuda"])
    job.loader.load_state_dict({"cursor": int(own["cursor"])})
    job.frontier = manifest.update
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, job.digest().root)
    for rank, (root, expected) in enumerate(zip(found, manifest.roots, strict=True)):
        if root != expected:
            raise CheckpointError(
                f"checkpoint {checkpoint.name}: rank {rank} restored a state with digest "
                f"{root}; expected {expected}, the one that was saved"
            )


def _own_key() -> str:
    return f"rank{dist.get_rank()}"


def collect(job: TrainingJob) -> dict[str, Any]:
    """Return what is saved, without copies where the wrapper needs none; all ranks call this."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    # Of a buffer that every rank changes by itself, DCP would keep one rank's, and load it into the
    # buffer itself. So each rank's own are copies.
    own: dict[str, Any] = {
        **{f"buffer/{name}": buffer.clone() for name, buffer in job.model.named_buffers()},
        "rng_cpu": torch.get_rng_state(),
        "cursor": torch.tensor(job.loader.state_dict()["cursor"]),
    }
    if job.attempt.device.type == "cuda":
        own["rng_cuda"] = torch.cuda.get_rng_state()
    return {"model": model, "optimizer": optimizer, _own_key(): own}
