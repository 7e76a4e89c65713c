"""Planned faults: which there are, how they strike, and the evidence that they did."""

from harness.faults.absent import Boundary, CollectiveFailed

__all__ = ["Boundary", "CollectiveFailed"]
