"""The command line: `accelpact`, or `python -m harness`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from tabulate import tabulate

from harness import options
from harness.spec import FAULT_KINDS, WRAPPERS, SpecError, choose

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compare how sharded training survives a communication failure.",
)

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130


class CannotRunHere(RuntimeError):
    """This machine cannot do what was asked; says what to do."""


def guarded(command: F) -> F:
    """Turn a user's mistake, a machine's limit and Ctrl-C into one line and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except SpecError as error:
            _fail(str(error), EXIT_USAGE)
        except CannotRunHere as error:
            _fail(str(error), EXIT_ENVIRONMENT)
        except OSError as error:
            _fail(f"the machine refused: {error}", EXIT_ENVIRONMENT)
        except KeyboardInterrupt:
            _fail("interrupted; every process is ended, records so far are kept", EXIT_INTERRUPTED)

    return wrapped  # type: ignore[return-value]


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"accelpact: {message}", err=True)
    raise typer.Exit(status)


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
    _compare(options.make_spec(**given), _names(strategies), out=out)


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
    from harness import environment, plan
    from harness import matrix as verdicts
    from harness.progress import Progress
    from strategies import Platform

    found = verdicts.run(
        options.make_spec(workload=workload),
        plan.contenders(_names(strategies)),
        wrappers=_names(wrappers) or list(WRAPPERS),
        strikes=_names(faults) or verdicts.STRIKES,
        platform=Platform(device="cpu", backend=environment.backend_for("cpu", world_size=4)),
        folder=out,
        progress=Progress(),
        check=functools.partial(options.check_machine, refuse=CannotRunHere),
    )
    typer.echo((out / verdicts.MATRIX).read_text())
    if verdicts.unexpected(found):
        raise typer.Exit(EXIT_UNEXPECTED)


@app.command()
@guarded
def compiled(
    strategies: options.Strategies = "",
    wrappers: Annotated[str, typer.Option(help="Comma-separated; default all.")] = "",
    out: options.MatrixOut = options.REPORTS / "compiled",
) -> None:
    """Count graphs, graph breaks and recompilations before and after a recovery, on 4 CPU ranks.

    By default of every kind of group: native, reconfigured, torchft's wrapper, and new processes.

    Example: accelpact compiled --wrappers fsdp2 --out reports/compiled
    """
    from harness import compiling, environment, plan
    from harness import matrix as verdicts
    from harness.progress import Progress
    from strategies import Platform

    found = verdicts.run(
        dataclasses.replace(
            # All ranks compile at once, which takes any of them its time: so longer deadlines.
            options.make_spec(
                group_timeout=10.0,
                soft_timeout=20.0,
                hard_timeout=40.0,
                barrier_timeout=60.0,
                world_timeout=120.0,
            ),
            compiled=True,
            count_compiled=True,
        ),
        plan.contenders(_names(strategies) or list(compiling.CONTENDERS)),
        wrappers=_names(wrappers) or list(WRAPPERS),
        strikes=(compiling.STRIKE,),
        platform=Platform(device="cpu", backend=environment.backend_for("cpu", world_size=4)),
        folder=out,
        progress=Progress(),
        check=functools.partial(options.check_machine, refuse=CannotRunHere),
    )
    typer.echo((out / compiling.TABLE).read_text())
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
        rows=_names(rows),
        faults=_names(faults),
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
    folder = options.output_folder(out, f"checkpoints-{_in_a_path(spec.workload)}-{device}")
    try:
        found = checkpoint_costs.run(
            planned,
            platform=Platform(device=device, backend=backend),
            folder=folder,
            progress=Progress(),
        )
    except checkpoint_costs.RunFailed as error:
        _fail(str(error), EXIT_UNEXPECTED)
    typer.echo((folder / checkpoint_costs.TABLE).read_text())
    if any(row.failed for row in found.rows):
        raise typer.Exit(EXIT_UNEXPECTED)


@app.command()
@guarded
def report(
    folder: Annotated[Path, typer.Argument(help="A comparison's folder.")],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if anything differs.")
    ] = False,
) -> None:
    """Rebuild report and figures from the records.

    Example: accelpact report reports/mine --check
    """
    from harness import checkpoint_costs
    from harness import compare as comparison
    from harness import matrix as verdicts

    if not folder.is_dir():
        raise SpecError(f"folder: expected a comparison's folder; found none at {folder}")
    kind: Any = comparison
    written = "report.md"
    if verdicts.is_matrix(folder):
        kind, written = verdicts, verdicts.MATRIX
    elif checkpoint_costs.is_costs(folder):
        kind, written = checkpoint_costs, checkpoint_costs.TABLE
    if not check:
        kind.finish(folder)
        typer.echo(folder / written)
        return
    wrong = kind.check(folder)
    for name in wrong:
        typer.echo(f"differs from its records: {name}")
    if wrong:
        raise typer.Exit(EXIT_UNEXPECTED)
    typer.echo(f"{folder}: report, figures, summary and checksums are what the records give")


@app.command()
@guarded
def breakeven(  # noqa: PLR0917  as above
    overhead: Annotated[str, typer.Option(help="Cost of the guard per update, as in 0.2%.")],
    age: Annotated[float, typer.Option(help="Updates that a restart executes again.")],
    update: Annotated[str, typer.Option(help="Time of an update, as in 220s.")],
    repair: Annotated[str, typer.Option(help="Time of a repair, as in 770ms.")],
    eligible: Annotated[
        float, typer.Option(help="Failures per window that a repair answers.")
    ] = 0.0,
    other: Annotated[float, typer.Option(help="Failures per window that are refused.")] = 0.0,
    reject: Annotated[str, typer.Option(help="Time lost by a refusal, as in 100ms.")] = "0s",
    window: Annotated[str, typer.Option(help="Training time looked at, as in 1d.")] = "1d",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Say from how many failures on the runtime pays for itself (the paper's Eq. 4).

    Times are numbers with a unit: ms, s, min, h or d.

    Example: accelpact breakeven --overhead 0.2% --age 5 --update 220s --repair 770ms
    --eligible 0.776
    """
    from harness import quantities as model

    found = model.make(
        overhead=overhead,
        age=age,
        update=update,
        repair=repair,
        eligible=eligible,
        other=other,
        reject=reject,
        window=window,
    )
    if as_json:
        typer.echo(json.dumps(model.record(found), indent=1))
    else:
        typer.echo(tabulate(model.rows(found), tablefmt="plain", disable_numparse=True))


@app.command()
@guarded
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Say what this machine can run, and why not the rest.

    Example: accelpact doctor
    """
    from harness.doctor import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    contenders = found.pop("contenders")
    for name, value in found.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        typer.echo(f"{name.replace('_', ' ')}: {shown}")
    for row in contenders.values():
        state = f"available, {row['version']}" if row["available"] else f"no: {row['reason']}"
        typer.echo(f"contender {row['name']}: {state}")


@app.command(name="list")
@guarded
def list_(
    kind: Annotated[str, typer.Argument(help="strategies, workloads or faults.")],
    as_json: Annotated[bool, typer.Option("--json", help="As a list of JSON objects.")] = False,
) -> None:
    """List strategies, workloads or faults, one line each.

    Example: accelpact list strategies
    """
    from harness.doctor import list_strategies
    from harness.workload.presets import WORKLOADS, num_parameters

    listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "strategies": list_strategies,
        "workloads": lambda: [
            {
                "name": workload.name,
                "parameters": num_parameters(workload),
                "layers": workload.model.num_layers,
                "summary": workload.summary,
            }
            for workload in WORKLOADS.values()
        ],
        "faults": lambda: [
            {"name": name, "kinds": [name], "phases": list(phases)}
            for name, phases in FAULT_KINDS.items()
        ],
    }
    rows = listings[choose("kind", kind, listings)]()
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        typer.echo(tabulate(rows, headers="keys", tablefmt="plain", intfmt=","))


def _names(text: str) -> list[str]:
    """The names in a comma-separated option."""
    return [name for name in text.split(",") if name]


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
    folder = options.output_folder(out, f"{spec.preset}-{_in_a_path(spec.workload)}-{spec.device}")
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


def _in_a_path(text: str) -> str:
    """`mine.py:build` as part of a folder's name."""
    return re.sub(r"[^\w.-]+", "-", text)


def _title(spec: Any) -> str:
    return f"Recovery strategies on {spec.workload}, {spec.wrapper} {spec.mesh}, {spec.device}"


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch says so where NVRx brought pynvml along, and an error is to be one line.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    signal.signal(signal.SIGTERM, _terminated)
    app()


def _terminated(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    """Leave like Ctrl-C does, so that every child is ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
