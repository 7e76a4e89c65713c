"""What every contender is held to: checks over the records of a run and of its reference."""

from harness.conformance.checks import CHECKS, Finding, run_checks
from harness.conformance.evidence import Evidence

__all__ = ["CHECKS", "Evidence", "Finding", "run_checks"]
