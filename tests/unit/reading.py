"""Reads a report as a person would: its first screen, a section, a row of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.records import Summary, write_json
from harness.report import render

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"report.md", "figures/goodput.svg", "figures/phases.svg", "figures/ratios.svg"}
"""What a report consists of."""


def text_of(folder: Path, summary: Summary) -> str:
    """Write the records and return the report made from them, without its figures."""
    write_json(folder / "summary.json", summary)
    return render.render(render.read(folder))


def section(text: str, title: str) -> str:
    """The text under one heading."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_screen(text: str) -> str:
    """Everything before the first heading under the title."""
    return text.partition("\n## ")[0]


def row(text: str, *begins: str) -> list[str]:
    """Cells of the first table row whose first cells are `begins`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if tuple(cells[: len(begins)]) == begins:
            return cells
    raise AssertionError(f"no row {begins} in:\n{text}")
