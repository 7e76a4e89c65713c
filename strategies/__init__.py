"""The contenders, one file each, behind the interface of `_base`."""

from strategies._base import (
    Attempt,
    Availability,
    Failure,
    Groups,
    Job,
    Layout,
    Outcome,
    Platform,
    Settings,
    Strategy,
    Timeouts,
    root_cause,
)
from strategies._registry import by_default, find, names

__all__ = [
    "Attempt",
    "Availability",
    "Failure",
    "Groups",
    "Job",
    "Layout",
    "Outcome",
    "Platform",
    "Settings",
    "Strategy",
    "Timeouts",
    "by_default",
    "find",
    "names",
    "root_cause",
]
