"""Calls that may never return, made in threads of their own so that waiting for them has an end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """One call in a thread of its own."""

    def __init__(
        self, call: Callable[[], Result], *, purpose: str, device: int | None = None
    ) -> None:
        """Begin the call.

        Args:
            call: what may hang; it must let go of the interpreter's lock meanwhile.
            purpose: of the call, for people, as in "expected ... within 3 s".
            device: number of the CUDA device that is to be current. A thread begins at 0, where
                most calls of CUDA's would make a context that nobody wants.
        """
        self._call: Callable[[], Result] | None = call
        self._purpose = purpose
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._device = device
        self._thread = threading.Thread(target=self._run, name="accelpact-aside", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._results.append(call())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._error = error

    def wait(self, seconds: float) -> Result:
        """Return what the call returned; raise what it raised.

        Raises:
            Rejected: `reject_deadline`, if it has not returned within `seconds`. It goes on.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise Rejected(
                Reason.DEADLINE, f"expected {self._purpose} within {seconds:g} s; it did not return"
            )
        if self._error is not None:
            raise self._error
        return self._results[0]


def bounded(call: Callable[[], Result], seconds: float, *, purpose: str) -> Result:
    """Make a call that may hang on the caller's device, and wait `seconds` at most. See `Aside`."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    return Aside(call, purpose=purpose, device=device).wait(seconds)


def await_idle_device(end: float) -> None:
    """Wait until the current CUDA device, if one is in use, has nothing left to do.

    Args:
        end: by the clock `time.monotonic`.

    Raises:
        Rejected: `reject_deadline`, if it still has then.
    """
    if torch.cuda.is_initialized():
        left = max(0.001, end - time.monotonic())
        bounded(torch.cuda.synchronize, left, purpose="the device to become idle")
