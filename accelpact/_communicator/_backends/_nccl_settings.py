"""Settings of torch and NCCL under which a process outlives a failed collective.

Read in the source of `ProcessGroupNCCL` and of `nccl2` (torch 2.13.0 and 2.14.1); nothing was run.

By default a collective that fails or times out ends the process: torch's watchdog throws in its own
thread, and if it does not, the monitor of the watchdog aborts the process, on all ranks, since the
watchdog has told it of the failure through the store. There are two ways out.

*A blocking wait* has neither watchdog nor monitor: the thread that waits for a collective raises
at the timeout. It costs the overlap of host and device. And a thread that waits for the device and
not for a collective, as `item()` does, is let go only when a peer tells of the failure.

*Cleaning up* (2) has the watchdog abort the communicator, which lets go of every thread, and leave
the process alone. It does so after four times the time that is set for a dump, and holds the lock
of the group meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_YES = frozenset(("y", "yes", "1", "t", "true"))
_CLEAN_UP = 2
_DUMP_WAITS = 4
"""How often the watchdog waits for the time of a dump before it does anything else."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """A variable, under the names that torch looks for, the first of which it prefers."""

    names: tuple[str, ...]
    default: str

    def found(self, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return the name and the value that count."""
        for name in self.names:
            if name in environment:
                return name, environment[name]
        return self.names[0], self.default

    def is_on(self, environment: Mapping[str, str]) -> bool:
        """Whether a switch is on."""
        return self.found(environment)[1].lower() in _YES

    def wrong(self, environment: Mapping[str, str], right: str, why: str) -> str:
        """Say what was found and what to set."""
        name, value = self.found(environment)
        found = repr(value) if name in environment else f"unset, which means {value}"
        return f"{name} is {found}: set {right} ({why})"


BLOCKING_WAIT = _Setting(("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"), "0")
_ASYNC = _Setting(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3")
_MONITORING = _Setting(("TORCH_NCCL_ENABLE_MONITORING",), "1")
_RETHROW = _Setting(("TORCH_NCCL_RETHROW_CUDA_ERRORS",), "1")
_DESYNC = _Setting(("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"), "0")
_DUMP_MS = _Setting(("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",), "15000")
_EXTRA_DUMP = _Setting(("TORCH_NCCL_EXTRA_DUMP_ON_EXEC",), "0")


def has_watchdog(environment: Mapping[str, str]) -> bool:
    """Whether groups have a thread that watches their collectives."""
    return not BLOCKING_WAIT.is_on(environment)


def wrong_settings(
    environment: Mapping[str, str], *, is_legacy: bool, deadline: float
) -> list[str]:
    """Return what is wrong for a process that is to outlive a failed collective.

    Args:
        environment: variables and values.
        is_legacy: whether there are groups of `ProcessGroupNCCL`, which has a monitor; `nccl2`
            has none, and reads no more than how to wait and how to handle an error.
        deadline: seconds within which a communicator must be gone.
    """
    wrong = []
    if is_legacy and _EXTRA_DUMP.is_on(environment):
        wrong.append(_EXTRA_DUMP.wrong(environment, "0", "an abort would write a dump first"))
    if not has_watchdog(environment):
        return wrong
    if _number(_ASYNC, environment) != _CLEAN_UP:
        wrong.append(_ASYNC.wrong(environment, str(_CLEAN_UP), _why_async(environment)))
    if not is_legacy:
        return wrong
    if _MONITORING.is_on(environment):
        why = "the monitor ends the process after any failure"
        wrong.append(_MONITORING.wrong(environment, "0", why))
    if _RETHROW.is_on(environment):
        why = "an error of the device in the watchdog's thread ends the process"
        wrong.append(_RETHROW.wrong(environment, "0", why))
    if _DESYNC.is_on(environment):
        why = "its report reads the store of the group while the failure is handled"
        wrong.append(_DESYNC.wrong(environment, "0", why))
    held_s = _DUMP_WAITS * _number(_DUMP_MS, environment) / 1e3
    if held_s > deadline / 2:
        why = f"the watchdog holds the group for {held_s:g} s before it aborts"
        most = int(deadline * 1e3 / 2 / _DUMP_WAITS)
        wrong.append(_DUMP_MS.wrong(environment, f"{most} or less", why))
    return wrong


def _why_async(environment: Mapping[str, str]) -> str:
    mode = _number(_ASYNC, environment)
    if mode == 0:
        return "nobody lets go of a thread that waits for the device"
    return "a failed collective ends the process; torchrun sets 1 where nothing is set"


def _number(setting: _Setting, environment: Mapping[str, str]) -> int:
    """Return a number; -1 for what is none, which torch refuses by itself."""
    try:
        return int(setting.found(environment)[1])
    except ValueError:
        return -1
