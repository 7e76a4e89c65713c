"""Build the report of a run folder, and compare it with what lies there."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec

from harness.records import SCHEMA_VERSION, Summary
from harness.report import about, breakeven, figures, headline, tables, targets
from harness.report._view import View, workload_text
from harness.spec import SpecError

if TYPE_CHECKING:
    from pathlib import Path

REPORT = "report.md"
FIGURES = "figures"
SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"


def build(folder: Path) -> dict[str, bytes]:
    """Return relative file name -> content of the report and its figures.

    A pure function of `summary.json` and, where it is there, `environment.json`.

    Raises:
        SpecError: the folder has no records, or none of this schema version.
    """
    view = read(folder)
    made = {REPORT: render(view).encode()}
    for name, content in figures.draw(view).items():
        made[f"{FIGURES}/{name}"] = content
    return made


def write(folder: Path) -> None:
    """Write the report and its figures; figures of an older report are removed.

    Raises:
        SpecError: as `build`.
    """
    made = build(folder)
    for name, content in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name in _figures_there(folder) - made.keys():
        if name.endswith(".svg"):
            (folder / name).unlink()


def check(folder: Path) -> list[str]:
    """Return the names of files that differ, are missing, or are extra among the figures.

    Raises:
        SpecError: as `build`.
    """
    made = build(folder)
    wrong = {
        name
        for name, content in made.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content
    }
    return sorted(wrong | (_figures_there(folder) - made.keys()))


def _figures_there(folder: Path) -> set[str]:
    there = folder / FIGURES
    if not there.is_dir():
        return set()
    return {path.relative_to(folder).as_posix() for path in there.rglob("*") if path.is_file()}


def read(folder: Path) -> View:
    """Read the records of a run folder.

    Raises:
        SpecError: a file is missing or is not what it should be; it is named.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise SpecError(f"folder: expected {SUMMARY} in {folder}; found none; give a run folder")
    content = path.read_bytes()
    try:
        version = msgspec.json.decode(content, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise SpecError(
                f"{path}: expected schema_version {SCHEMA_VERSION}; found {version}; report it "
                "with the version that wrote it"
            )
        summary = msgspec.json.decode(content, type=Summary)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: expected the records of a comparison; {error}") from None
    return View(summary=summary, environment=_environment(folder, summary))


class _Version(msgspec.Struct):
    schema_version: int


def _environment(folder: Path, summary: Summary) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    if not path.is_file():
        return summary.environment
    try:
        found = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: expected JSON; {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path}: expected an object; found {type(found).__name__}")
    return found


def render(view: View) -> str:
    """Fill the template; the text ends in exactly one newline."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - markdown; cells are escaped where tables are made
    )
    source = resources.files(__package__).joinpath("template.md.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(_sections(view)).rstrip() + "\n"


def _sections(view: View) -> dict[str, object]:
    """Everything the template names."""
    return {
        "title": view.summary.title,
        "bullets": headline.bullets(view),
        "workload": workload_text(view),
        "screen": headline.screen(view),
        "verdicts": tables.verdicts(view),
        "wall": tables.per_block(view, lambda run: run.wall_s, "s"),
        "goodput": tables.goodput(view),
        "unit": view.unit,
        "reading": about.reading(view),
        "ratios": tables.ratios(view),
        "phases": tables.phases(view),
        "updates": tables.updates(view),
        "drift": tables.drift(view),
        "ledger": tables.ledger(view),
        "references": tables.references(view),
        "stale": tables.stale(view),
        "overhead": tables.overhead(view),
        "breakeven": breakeven.breakeven(view),
        "shares": tables.shares(view),
        "shares_sentence": tables.shares_sentence(view),
        "floors": tables.floors(view),
        "targets": targets.targets(view),
        "min_blocks": targets.MIN_BLOCKS,
        "integration": about.integration(view),
        "settings": about.settings(view),
        "tried": about.tried(view),
        "resources": about.resources(view),
        "published": about.published(view),
        "faults": about.faults(view),
        "specification": about.specification(view),
        "environment": about.environment(view),
        "limits": about.limits(view),
    }
