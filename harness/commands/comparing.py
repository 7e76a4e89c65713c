"""`compare`, `run` and `tune`: contenders beside one another, timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from tabulate import tabulate

from harness import options
from harness.commands._app import (
    EXIT_UNEXPECTED,
    CannotRunHere,
    app,
    guarded,
    in_a_path,
    names_in,
)


@app.command()
@guarded
def compare(  # noqa: PLR0917  typer reads the options off the signature
    preset: options.Preset = "quick",
    workload: options.Workload = "tiny",
    strategies: options.Strategies = "",
    blocks: options.Blocks = None,
    mesh: options.MeshOption = None,
    wrapper: options.Wrapper = "fsdp1",
    updates: options.Updates = None,
    checkpoint_at: options.CheckpointAt = None,
    checkpoint_mode: options.CheckpointMode = "sync",
    checkpoint_every: options.CheckpointEvery = None,
    fault: options.Faults = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    activation_checkpointing: options.ActivationCheckpointing = None,
    seed: options.Seed = 1,
    data: options.Data = None,
    compiled: options.Compiled = False,
    envelope: options.Envelope = None,
    group_timeout: options.GroupTimeout = 3.0,
    soft_timeout: options.SoftTimeout = 10.0,
    hard_timeout: options.HardTimeout = 20.0,
    barrier_timeout: options.BarrierTimeout = 30.0,
    world_timeout: options.WorldTimeout = 60.0,
    out: options.Out = None,
) -> None:
    """Run the contenders on one workload and write a report.

    Example: accelpact compare --preset paper --blocks 6 --out reports/mine
    """
    given = _given(locals())
    _compare(options.make_spec(**given), names_in(strategies), out=out)


@app.command()
@guarded
def run(  # noqa: PLR0917  as above
    strategy: Annotated[str, typer.Argument(help="A contender's name; see `accelpact list`.")],
    preset: options.Preset = "quick",
    workload: options.Workload = "tiny",
    blocks: options.Blocks = None,
    mesh: options.MeshOption = None,
    wrapper: options.Wrapper = "fsdp1",
    updates: options.Updates = None,
    checkpoint_at: options.CheckpointAt = None,
    checkpoint_mode: options.CheckpointMode = "sync",
    checkpoint_every: options.CheckpointEvery = None,
    fault: options.Faults = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    activation_checkpointing: options.ActivationCheckpointing = None,
    seed: options.Seed = 1,
    data: options.Data = None,
    compiled: options.Compiled = False,
    envelope: options.Envelope = None,
    group_timeout: options.GroupTimeout = 3.0,
    soft_timeout: options.SoftTimeout = 10.0,
    hard_timeout: options.HardTimeout = 20.0,
    barrier_timeout: options.BarrierTimeout = 30.0,
    world_timeout: options.WorldTimeout = 60.0,
    out: options.Out = None,
) -> None:
    """Run one contender, with the references it is judged by.

    Example: accelpact run accelpact --updates 6 --checkpoint-at 2 --fault absent@boundary:4
    """
    _compare(options.make_spec(**_given(locals())), [strategy], out=out)


@app.command()
@guarded
def tune(
    strategy: Annotated[str, typer.Argument(help="A contender's name; see `accelpact list`.")],
    blocks: options.Blocks = 3,
    out: options.Out = None,
) -> None:
    """Run every variant of a contender's settings with the fault, and record what each gives.

    Example: accelpact tune nvrx --blocks 3 --out tuning/nvrx
    """
    from harness import compare as comparison
    from harness import plan, tuning
    from harness.records import write_json

    spec = options.make_spec(preset="quick", blocks=blocks)
    entries = plan.variants(strategy)
    folder = options.output_folder(out, f"tune-{strategy}")
    summary = _run(spec, entries, folder, f"Variants of {strategy}")
    found = tuning.from_summary(summary)
    write_json(folder / tuning.FILE, found)
    rows = [
        (each.variant, each.n, each.recovery_s, each.update_s, ", ".join(each.verdicts))
        for each in found.get(strategy, [])
    ]
    headers = ("variant", "runs", "recovery s", "update s", "verdicts")
    typer.echo(tabulate(rows, headers=headers, tablefmt="github", floatfmt=".4g"))
    typer.echo(f"records: {folder}")
    if not comparison.as_expected(summary):
        raise typer.Exit(EXIT_UNEXPECTED)


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options that make a Spec, as they were given."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("out", "strategies", "strategy", "names")
    }


def _compare(spec: Any, names: list[str], *, out: Path | None) -> None:
    from harness import compare as comparison
    from harness import plan

    entries = plan.contenders(names)
    folder = options.output_folder(out, f"{spec.preset}-{in_a_path(spec.workload)}-{spec.device}")
    summary = _run(spec, entries, folder, _title(spec))
    typer.echo((folder / "report.md").read_text().split("\n## ", 2)[0].rstrip())
    typer.echo(f"\nreport: {folder / 'report.md'}")
    for wrong in comparison.unexpected(summary):
        typer.echo(
            f"unexpected: {wrong.name} is {wrong.verdict}, expected {wrong.expected}: "
            f"{wrong.reason}"
        )
    if not comparison.as_expected(summary):
        raise typer.Exit(EXIT_UNEXPECTED)


def _run(spec: Any, entries: list[Any], folder: Path, title: str) -> Any:
    from harness import compare as comparison
    from harness import environment
    from harness.progress import Progress
    from strategies import Platform

    spec = options.check_machine(spec, refuse=CannotRunHere)
    backend = environment.backend_for(spec.device, world_size=spec.mesh.world_size)
    platform = Platform(device=spec.device, backend=backend)
    return comparison.run(
        spec, entries, platform=platform, folder=folder, title=title, progress=Progress()
    )


def _title(spec: Any) -> str:
    return f"Recovery strategies on {spec.workload}, {spec.wrapper} {spec.mesh}, {spec.device}"
