"""`matrix`, `compiled`, `qualify` and `checkpoints`: one question each, over many runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness import options
from harness.commands._app import (
    EXIT_UNEXPECTED,
    CannotRunHere,
    app,
    fail,
    guarded,
    in_a_path,
    names_in,
)
from harness.spec import WRAPPERS, Spec, SpecError


@app.command()
@guarded
def matrix(
    strategies: options.Strategies = "",
    workload: options.Workload = "tiny",
    wrappers: Annotated[str, typer.Option(help="Comma-separated; default all.")] = "",
    faults: Annotated[str, typer.Option(help="KIND@PHASE, comma-separated; default all.")] = "",
    out: options.MatrixOut = options.REPORTS / "verdicts",
) -> None:
    """Judge every contender under every wrapper and phase of a fault, on 4 CPU ranks.

    Verdicts only: ranks are forks, and nothing is timed. A folder can hold several torch versions.

    Example: accelpact matrix --strategies accelpact,cold --out reports/verdicts
    """
    from harness import matrix as verdicts

    _judge(
        options.make_spec(workload=workload),
        names_in(strategies),
        wrappers=wrappers,
        strikes=names_in(faults) or verdicts.STRIKES,
        out=out,
        table=verdicts.MATRIX,
    )


@app.command()
@guarded
def compiled(
    strategies: Annotated[
        str, typer.Option(help="Contenders, comma-separated; default one for each kind of group.")
    ] = "",
    wrappers: Annotated[str, typer.Option(help="Comma-separated; default all.")] = "",
    out: options.MatrixOut = options.REPORTS / "compiled",
) -> None:
    """Count graphs, graph breaks and recompilations before and after a recovery, on 4 CPU ranks.

    By default of every kind of group: native, reconfigured, torchft's wrapper, and new processes.

    Example: accelpact compiled --wrappers fsdp2 --out reports/compiled
    """
    from harness import compiling

    # All ranks compile at once, which takes any of them its time: so longer deadlines.
    spec = options.make_spec(
        group_timeout=10.0,
        soft_timeout=20.0,
        hard_timeout=40.0,
        barrier_timeout=60.0,
        world_timeout=120.0,
    )
    _judge(
        dataclasses.replace(spec, compiled=True, count_compiled=True),
        names_in(strategies) or list(compiling.CONTENDERS),
        wrappers=wrappers,
        strikes=(compiling.STRIKE,),
        out=out,
        table=compiling.TABLE,
    )


def _judge(
    spec: Spec,
    names: list[str],
    *,
    wrappers: str,
    strikes: Sequence[str],
    out: Path,
    table: str,
) -> None:
    """Run contenders under wrappers on forked ranks, and print the table that this gives."""
    from harness import environment, plan
    from harness import matrix as verdicts
    from harness.progress import Progress
    from strategies import Platform

    found = verdicts.run(
        spec,
        plan.contenders(names),
        wrappers=names_in(wrappers) or list(WRAPPERS),
        strikes=strikes,
        platform=Platform(device="cpu", backend=environment.backend_for("cpu", world_size=4)),
        folder=out,
        progress=Progress(),
        check=functools.partial(options.check_machine, refuse=CannotRunHere),
    )
    typer.echo((out / table).read_text())
    if verdicts.unexpected(found):
        raise typer.Exit(EXIT_UNEXPECTED)


@app.command()
@guarded
def qualify(  # noqa: PLR0917  as above
    out: Annotated[Path | None, typer.Option(help="The envelope file to write.")] = None,
    rows: Annotated[
        str, typer.Option(help="Comma-separated; default all: ddp,fsdp2,fsdp1,compiled.")
    ] = "",
    faults: Annotated[str, typer.Option(help="KIND@PHASE, comma-separated; default all.")] = "",
    trials: Annotated[int, typer.Option(help="How often every policy is tried.")] = 1,
    limit: Annotated[float, typer.Option(help="Minutes; what is left then is not tried.")] = 10.0,
    workload: options.Workload = "tiny",
    device: options.Device = "cpu",
    records: Annotated[
        Path | None, typer.Option(help="Folder to keep the runs' records in; default none.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Run nothing; set out what this file holds.")
    ] = None,
) -> None:
    """Try on this machine what recovers from which failure, and write what was proven to a file.

    With that file (`ACCELPACT_ENVELOPE`, or `--envelope` of `compare` and of the runtime) nothing
    else is done about a failure.

    Example: accelpact qualify --out envelope.json
    """
    from accelpact import _envelope
    from harness import qualify as qualification
    from harness.qualify import command

    if report is not None:
        try:
            typer.echo(qualification.render(_envelope.read(report)), nl=False)
        except _envelope.EnvelopeError as error:
            raise SpecError(f"report: {error}") from None
        return
    wrong = command.qualify(
        out=out,
        rows=names_in(rows),
        faults=names_in(faults),
        num_trials=trials,
        limit_s=60 * limit,
        workload=workload,
        device=device,
        records=records,
        refuse=CannotRunHere,
    )
    assert out is not None
    typer.echo(qualification.render(_envelope.read(out)), nl=False)
    for line in wrong:
        typer.echo(f"unexpected: {line}")
    if wrong:
        raise typer.Exit(EXIT_UNEXPECTED)


@app.command()
@guarded
def checkpoints(  # noqa: PLR0917  as above
    workload: options.Workload = "tiny",
    rounds: Annotated[int, typer.Option(help="How often every mode has its turn.")] = 6,
    saves: Annotated[int, typer.Option(help="Saves in one turn.")] = 4,
    mesh: options.MeshOption = None,
    wrapper: options.Wrapper = "fsdp1",
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    seed: options.Seed = 1,
    data: options.Data = None,
    out: options.Out = None,
) -> None:
    """Measure what a checkpoint costs in every mode, in one run that takes the modes in turn.

    Example: accelpact checkpoints --workload decoder-32l --out reports/checkpoints
    """
    from harness import checkpoint_costs, environment
    from harness.progress import Progress
    from strategies import Platform

    spec = options.make_spec(
        workload=workload,
        mesh=mesh,
        wrapper=wrapper,
        device=device,
        dtype=dtype,
        seed=seed,
        data=data,
        checkpoint_mode=",".join(checkpoint_costs.MODES),
    )
    spec = options.check_machine(spec, refuse=CannotRunHere)
    backend = environment.backend_for(device, world_size=spec.mesh.world_size)
    planned = checkpoint_costs.planned(spec, rounds=rounds, saves=saves, backend=backend)
    folder = options.output_folder(out, f"checkpoints-{in_a_path(spec.workload)}-{device}")
    try:
        found = checkpoint_costs.run(
            planned,
            platform=Platform(device=device, backend=backend),
            folder=folder,
            progress=Progress(),
        )
    except checkpoint_costs.RunFailed as error:
        fail(str(error), EXIT_UNEXPECTED)
    typer.echo((folder / checkpoint_costs.TABLE).read_text())
    if any(row.failed for row in found.rows):
        raise typer.Exit(EXIT_UNEXPECTED)
