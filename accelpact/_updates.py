"""The two forms that executing an update again can take in Python.

An iterator of attempts, each a context whose failure is swallowed, undone and followed by another;
or a function that is called again with the arguments it had.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from accelpact._collectives import is_communication_failure
from accelpact._errors import UpdateInterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from accelpact._pact import Pact

Result = TypeVar("Result")


class Update:
    """One attempt at one update: a context around all of it, to the optimizer's step.

    Attributes:
        index: number of committed updates before this one; the same in every attempt at it.
        attempt: 0, then one more for every time that it was taken back.
        discarded: it failed and was taken back; set when the context ends.
    """

    def __init__(self, pact: Pact, *, attempt: int = 0) -> None:
        """Prepare an attempt at the update that follows the frontier."""
        self.index = pact.frontier
        self.attempt = attempt
        self.discarded = False
        self._pact = pact

    def __enter__(self) -> Update:  # noqa: PYI034  nobody derives from it
        """Capture what the update would be rewound to, and begin it."""
        self._pact.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Take the update back if a collective has failed in it, here or on a peer.

        Returns:
            Whether it was taken back, so that the failure goes no further.
        """
        self._pact.end(self)
        if error is None or not self._is_to_be_undone(error):
            return False
        self._pact.discard(error)
        self.discarded = True
        return True

    def _is_to_be_undone(self, error: BaseException) -> bool:
        """Whether `error` is a communication failure, and the update is not committed yet."""
        failed = isinstance(error, UpdateInterrupted) or is_communication_failure(error)
        return failed and self._pact.frontier == self.index


def updates(pact: Pact, total: int) -> Iterator[Update]:
    """Yield attempts until `total` updates are committed, those before `attach` included."""
    attempt = 0
    while pact.frontier < total:
        update = Update(pact, attempt=attempt)
        yield update
        attempt = attempt + 1 if update.discarded else 0


def protect(pact: Pact, step: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that executes one update by `step`, as often as that takes."""

    @functools.wraps(step)
    def protected(*args: Any, **kwargs: Any) -> Result:
        attempt = 0
        while True:
            update = Update(pact, attempt=attempt)
            with update:
                return step(*args, **kwargs)
            attempt += 1

    return protected
