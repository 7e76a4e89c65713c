"""What `accelpact qualify` was asked for, checked, and done."""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from harness import environment, options
from harness.progress import Progress
from harness.qualify import evidence, running, trials
from harness.spec import SpecError
from strategies import Platform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def qualify(
    *,
    out: Path | None,
    rows: Sequence[str],
    faults: Sequence[str],
    num_trials: int,
    limit_s: float,
    workload: str,
    device: str,
    records: Path | None,
    refuse: Callable[[str], Exception],
) -> list[str]:
    """Run the trials and write `out`; return what did not go as its policy promises.

    Raises:
        SpecError: an option is wrong.
    """
    if out is None or out.is_dir() or not out.absolute().parent.is_dir():
        raise SpecError(f"out: expected a file in a folder that exists; found {out or 'none'}")
    if num_trials < 1:
        raise SpecError(f"trials: expected at least 1; found {num_trials}")
    if not 0 < limit_s < math.inf:
        raise SpecError(f"limit: expected minutes above 0; found {limit_s / 60:g}")
    chosen = trials.chosen_rows(rows)
    struck = trials.chosen_faults(faults)
    base = options.make_spec(workload=workload, device=device)
    base = options.check_machine(base, refuse=refuse)
    if base.own is not None:
        for row in chosen:  # each asks something else of the user's model
            options.check_machine(trials.spec_of(base, row), refuse=refuse)
    backend = environment.backend_for(device, world_size=base.mesh.world_size)
    with _records(records) as folder:
        found = running.run(
            base,
            rows=chosen,
            faults=struck,
            num_trials=num_trials,
            limit_s=limit_s,
            platform=Platform(device=device, backend=backend),
            records=folder,
            out=out,
            progress=Progress(),
        )
    return [
        f"{entry.key.profile}, {entry.key.phase}, {trial.policy}: {trial.verdict}: {trial.reason}"
        for entry in found.entries
        for trial in entry.trials
        if not evidence.is_as_promised(trial)
    ]


@contextlib.contextmanager
def _records(asked: Path | None) -> Iterator[Path]:
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="accelpact-qualify-") as name:
            yield Path(name)
        return
    folder = options.output_folder(asked, "qualify")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
