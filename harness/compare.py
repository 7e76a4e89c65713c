"""A comparison: runs block after block, then the records that the report is made of."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness import drift, environment, plan, report, summarize, supervisor
from harness.integration import integration_lines
from harness.launching import torchrun
from harness.layout import CHECKSUMS, COMPARISON, DRIFT, ENVIRONMENT, REPORTED, RUNS, STATE
from harness.records import SCHEMA_VERSION, Contender, Digests, read_lines, write_json
from harness.redact import redact
from harness.tuning import tried
from harness.workload import chosen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.launching import Launch
    from harness.plan import Entry
    from harness.progress import Progress
    from harness.records import RunSummary, Summary
    from harness.spec import RunSpec, Spec
    from strategies import Availability, Platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """`comparison.json`: what was asked and who took part. A record like the others."""

    schema_version: int
    title: str
    spec: dict[str, Any]
    contenders: list[Contender]
    complete: bool
    """Whether every planned run took place."""


def run(
    spec: Spec,
    entries: Sequence[Entry],
    *,
    platform: Platform,
    folder: Path,
    title: str,
    progress: Progress,
    launch: Launch = torchrun,
) -> Summary:
    """Run every block into `folder`, which is new or empty, and write report and summary.

    An interrupt leaves the records of the runs so far, and no process.
    """
    able, unable = plan.availability(entries, platform)
    folder.mkdir(parents=True, exist_ok=True)
    described = describe(spec, able, unable, platform=platform, title=title)
    blocks = [
        plan.block_runs(spec, able, block=block, backend=platform.backend)
        for block in range(spec.blocks)
    ]
    record(described, blocks, platform=platform, folder=folder, progress=progress, launch=launch)
    return finish(folder)


def record(
    described: Comparison,
    blocks: Sequence[Sequence[RunSpec]],
    *,
    platform: Platform,
    folder: Path,
    progress: Progress,
    launch: Launch,
) -> None:
    """Run `blocks` into `folder`, beside a description of them and of this machine."""
    write_json(
        folder / ENVIRONMENT,
        environment.describe(device=platform.device, backend=platform.backend),
    )
    write_json(folder / COMPARISON, described)
    with progress.over(sum(len(block) for block in blocks)):
        for block in blocks:
            _run_block(block, folder, progress, launch)
    write_json(folder / COMPARISON, dataclasses.replace(described, complete=True))
    redact(folder)  # runs are redacted as they end


def finish(folder: Path) -> Summary:
    """Write summary, report, figures and checksums from the records in `folder`."""
    found = summarize.summarize(folder)
    write_json(folder / REPORTED, found)
    (folder / CHECKSUMS).write_text(checksums(folder))
    report.write(folder)
    return found


def checksums(folder: Path) -> str:
    """SHA-256 of every record, in the form that `sha256sum --check` reads."""
    return checksums_of(
        [folder / ENVIRONMENT, folder / COMPARISON, *(folder / RUNS).rglob("*")], folder
    )


def checksums_of(records: Sequence[Path], folder: Path) -> str:
    """SHA-256 of those of `records` that are files, named from `folder` on."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}"
        for path in records
        if path.is_file()
    ]
    return "\n".join(sorted(lines, key=lambda line: line[66:])) + "\n"


def check(folder: Path) -> list[str]:
    """Names of what differs from what the records give; empty if nothing does."""
    wrong = report.check(folder)
    stored = folder / CHECKSUMS
    if not stored.is_file() or stored.read_text() != checksums(folder):
        wrong.append(CHECKSUMS)
    rebuilt = msgspec.json.format(msgspec.json.encode(summarize.summarize(folder)), indent=1)
    if (folder / REPORTED).read_bytes() != rebuilt + b"\n":
        wrong.append(REPORTED)
    return wrong


def as_expected(summary: Summary) -> bool:
    """Whether every run that took place has the verdict that was expected of it."""
    return all(run.verdict in (run.expected, "not_run") for run in summary.runs)


def unexpected(summary: Summary) -> list[RunSummary]:
    """Runs whose verdict is another than expected."""
    return [run for run in summary.runs if run.verdict not in (run.expected, "not_run")]


def _run_block(block: Sequence[RunSpec], folder: Path, progress: Progress, launch: Launch) -> None:
    runs = folder / RUNS
    for planned in block:
        with progress.run(planned) as watch:
            status = supervisor.execute(
                planned, runs / planned.name, on_event=watch.event, launch=launch
            )
            watch.ended(status)
    _compare_block(block, runs)


def _compare_block(block: Sequence[RunSpec], runs: Path) -> None:
    """Compare final tensors where digests differ, then drop tensors and needless digests."""
    reference = runs / f"{block[0].block}-reference"
    expected = read_lines(reference / "digests.jsonl", Digests)
    for planned in block:
        own = runs / planned.name
        frontier, size = planned.spec.schedule.updates, planned.spec.mesh.world_size
        records = read_lines(own / "digests.jsonl", Digests)
        found = drift.compare(records, expected, frontier=frontier, world_size=size)
        numbers = None
        if found.equal is False:
            numbers = drift.measure_numbers(own, reference, world_size=size)
        write_json(own / DRIFT, {"reference": reference.name, "numbers": numbers})
        if own != reference:
            drift.prune(own / "digests.jsonl", expected, frontier=frontier)
    drift.prune(reference / "digests.jsonl", expected, frontier=block[0].spec.schedule.updates)
    for planned in block:
        shutil.rmtree(runs / planned.name / STATE, ignore_errors=True)


def describe(
    spec: Spec,
    able: Sequence[Entry],
    unable: Sequence[tuple[Entry, Availability]],
    *,
    platform: Platform,
    title: str,
) -> Comparison:
    """Say what is asked for and who takes part."""
    return Comparison(
        schema_version=SCHEMA_VERSION,
        title=title,
        spec={**chosen.describe(spec), "envelope": _envelope(spec)},
        contenders=[
            *(
                _contender(entry, entry.strategy.availability(platform), spec, platform)
                for entry in able
            ),
            *(_contender(entry, answer, spec, platform) for entry, answer in unable),
        ],
        complete=False,
    )


def _envelope(spec: Spec) -> dict[str, str] | None:
    """Say which file decides, without its path."""
    if spec.envelope is None:
        return None
    path = Path(spec.envelope)
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _contender(entry: Entry, answer: Availability, spec: Spec, platform: Platform) -> Contender:
    strategy = entry.strategy
    settings = strategy.settings(
        spec.timeouts, num_faults=len(spec.schedule.faults), backend=platform.backend
    )
    return Contender(
        name=strategy.name,
        summary=strategy.summary,
        available=answer.available,
        reason=answer.reason,
        version=answer.version,
        variant=strategy.variant,
        settings=msgspec.to_builtins(settings),
        integration_lines=integration_lines(strategy.name),
        tried=tried(strategy.name),
    )
