"""Records of a comparison -> `report.md` and figures. Knows nothing about torch."""

from harness.report.render import build, check, write

__all__ = ["build", "check", "write"]
