"""Packages that look installed, for what is found by entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, name: str, module: str, points: dict[str, str]) -> Path:
    """Make of `folder` one into which a package `name` with contenders was installed.

    Args:
        folder: does not exist yet.
        name: of the package.
        module: that has the contenders' classes.
        points: name of a contender -> its class in `module`.
    """
    about = folder / f"{name}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{point} = {module}:{kind}\n" for point, kind in points.items()]
    (about / "entry_points.txt").write_text("[accelpact.strategies]\n" + "".join(lines))
    return folder
