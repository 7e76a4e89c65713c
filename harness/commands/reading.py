"""`report`, `breakeven`, `doctor` and `list`: what runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from tabulate import tabulate

from harness.commands._app import (
    EXIT_UNEXPECTED,
    app,
    guarded,
)
from harness.spec import FAULT_KINDS, SpecError, choose


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
