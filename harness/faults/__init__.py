"""Planned faults: which there are, how they strike, and the evidence that they did."""

from harness.faults.absent import Boundary, CollectiveFailed
from harness.faults.inside import halting
from harness.faults.notices import Notices

__all__ = ["Boundary", "CollectiveFailed", "Notices", "halting"]
