"""The options of the command line, and what they make: a checked `Spec`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from harness.spec import (
    PRESETS,
    WRAPPERS,
    Fault,
    Mesh,
    Saving,
    Schedule,
    Spec,
    SpecError,
    choose,
)
from harness.workload import chosen as workloads
from harness.workload import own as users
from harness.workload.corpus import Corpus
from harness.workload.presets import find_workload
from strategies import Timeouts

REPORTS = Path("reports")

Preset = Annotated[str, typer.Option(help="Schedule: quick (12 updates) or paper (25).")]
Workload = Annotated[
    str,
    typer.Option(help="One of `accelpact list workloads`, or your own: FILE.py:FUNCTION."),
]
Strategies = Annotated[str, typer.Option(help="Contenders, comma-separated; default all.")]
Blocks = Annotated[int | None, typer.Option(help="How often everything runs; default 1.")]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", help="Replicas x shards; default 2x2, for ddp 4x1.")
]
Wrapper = Annotated[str, typer.Option(help="How the model is spread: fsdp1, fsdp2 or ddp.")]
Updates = Annotated[int | None, typer.Option(help="Optimizer updates of a run.")]
CheckpointAt = Annotated[int | None, typer.Option(help="Update after which DCP saves.")]
CheckpointMode = Annotated[
    str,
    typer.Option(
        help="sync, async-thread, async-process or async-cached; several, comma-separated, in turn."
    ),
]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Updates between two saves; default one save only.")
]
Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", help="KIND@PHASE:UPDATE, for example absent@boundary:15."),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; default the workload's.")]
ActivationCheckpointing = Annotated[
    bool | None, typer.Option(help="Recompute activations; default the workload's.")
]
Seed = Annotated[int, typer.Option(help="Weights, data order, dropout, order of runs.")]
Data = Annotated[
    str | None, typer.Option(help="Text file or folder; default CPython's documentation.")
]
GroupTimeout = Annotated[float, typer.Option(help="Seconds; replicate groups.")]
SoftTimeout = Annotated[float, typer.Option(help="Seconds; in-process restart interrupts.")]
HardTimeout = Annotated[float, typer.Option(help="Seconds; in-process restart ends a rank.")]
BarrierTimeout = Annotated[float, typer.Option(help="Seconds; restarting ranks wait.")]
WorldTimeout = Annotated[float, typer.Option(help="Seconds; shard groups and all others.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Compile every block of the model.")]
Envelope = Annotated[
    str | None, typer.Option(help="File of `accelpact qualify`; accelpact does nothing else.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the records; default a new one in reports/.")
]
MatrixOut = Annotated[
    Path, typer.Option("--out", help="Folder; may hold other torch versions' verdicts.")
]


def make_spec(
    *,
    preset: str = "quick",
    workload: str = "tiny",
    blocks: int | None = None,
    mesh: str | None = None,
    wrapper: str = "fsdp1",
    updates: int | None = None,
    checkpoint_at: int | None = None,
    checkpoint_mode: str = "sync",
    checkpoint_every: int | None = None,
    fault: list[str] | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    activation_checkpointing: bool | None = None,
    seed: int = 1,
    data: str | None = None,
    compiled: bool = False,
    envelope: str | None = None,
    group_timeout: float = 3.0,
    soft_timeout: float = 10.0,
    hard_timeout: float = 20.0,
    barrier_timeout: float = 30.0,
    world_timeout: float = 60.0,
) -> Spec:
    """Make a Spec and check it against workload and data.

    Raises:
        SpecError: names the first option that is wrong.
    """
    if data == "":
        raise SpecError("data: expected a text file or a folder; found an empty name")
    if envelope is not None and not Path(envelope).is_file():
        raise SpecError(f"envelope: expected a file; found none at {envelope or 'an empty name'}")
    base = PRESETS[choose("preset", preset, PRESETS)]
    own = users.parse(workload)
    if own is not None and data is not None:
        raise SpecError(
            f"data: expected none, since {users.short_name(own)} brings its own; found {data}"
        )
    chosen = None if own is not None else find_workload(workload)
    schedule = Schedule(
        updates=base.updates if updates is None else updates,
        checkpoint_at=base.checkpoint_at if checkpoint_at is None else checkpoint_at,
        faults=tuple(Fault.parse(text) for text in fault) if fault else base.faults,
    )
    spec = Spec(
        preset=preset,
        schedule=schedule,
        workload=workload if own is None else users.short_name(own),
        own=own,
        wrapper=wrapper,
        mesh=Mesh.parse(WRAPPERS[choose("wrapper", wrapper, WRAPPERS)] if mesh is None else mesh),
        device=device,
        dtype=dtype or (chosen.dtype if chosen else "float32"),
        activation_checkpointing=(
            bool(chosen and chosen.activation_checkpointing)
            if activation_checkpointing is None
            else activation_checkpointing
        ),
        seed=seed,
        data=None if data is None else str(Path(data).resolve()),
        compiled=compiled,
        envelope=None if envelope is None else str(Path(envelope).resolve()),
        timeouts=Timeouts(
            group=group_timeout,
            soft=soft_timeout,
            hard=hard_timeout,
            barrier=barrier_timeout,
            world=world_timeout,
        ),
        saving=Saving(
            modes=tuple(mode.strip() for mode in checkpoint_mode.split(",")),
            every=checkpoint_every,
        ),
        blocks=1 if blocks is None else blocks,
    )
    from harness import staging
    from harness.workload import wrappers

    staging.check(spec.saving.modes)
    wrappers.find(wrapper).check_layout(spec.mesh.layout())
    if chosen is not None:
        Corpus.load(spec.data).check(
            seq_len=chosen.seq_len,
            microbatch=chosen.microbatch,
            world_size=spec.mesh.world_size,
        )
    return spec


def output_folder(out: Path | None, stem: str) -> Path:
    """Return a folder that is new or empty.

    Raises:
        SpecError: `out` is a file or below one, or a folder that holds something.
    """
    if out is None:
        stamp = dt.datetime.now(tz=dt.timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = REPORTS / f"{stamp}-{stem}"
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or (there == out and any(out.iterdir())):
        what = "a folder that is not empty" if there.is_dir() else "a file"
        raise SpecError(f"out: expected a new or empty folder; found {what}: {there}; name another")
    return out


def check_machine(spec: Spec, *, refuse: Callable[[str], Exception]) -> Spec:
    """Raise `refuse(reason)` if this machine cannot hold or start the workload.

    Returns:
        `spec`, and with a workload of the user's own what trying it has shown.

    Raises:
        SpecError: that workload is not what it should be.
    """
    import psutil

    if spec.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise refuse("device: expected a CUDA GPU; found none; use --device cpu")
    if spec.own is not None:
        from harness.workload import preflight

        spec = preflight.examine(spec)
    needed = workloads.needs(spec)
    available = _device_memory() if spec.device == "cuda" else psutil.virtual_memory().available
    if needed > available:
        raise refuse(
            f"workload: {spec.workload} on {spec.mesh} ranks needs about {needed / 2**30:.1f} GiB; "
            f"found {available / 2**30:.1f} GiB; use a smaller workload or a larger machine"
        )
    return spec


def _device_memory() -> int:
    import torch

    return sum(
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    )
