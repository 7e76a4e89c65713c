"""Is what the runtime is about to do proven here? Asked before anything is retired."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact import _envelope
from accelpact._errors import Reason, Rejected
from accelpact._frameworks import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.nn import Module

    from accelpact._events import EventLog
    from accelpact._frameworks import Framework

_DAMAGED = "damaged"


def demand_none(objection: str | None) -> None:
    """Refuse what there is an objection to.

    Raises:
        Rejected: `reject_unqualified`.
    """
    if objection is not None:
        raise Rejected(Reason.UNQUALIFIED, f"handed over to a restart: {objection}")


class Admission:
    """The envelope of one rank, if one was given.

    Attributes:
        given: whether there is one; without, everything is admitted.
        digest: what tells whether all ranks have read the same.
    """

    def __init__(
        self, path: str | None, model: Module, *, frameworks: Sequence[Framework], log: EventLog
    ) -> None:
        """Read the file; what is wrong with it is said when something fails."""
        path = path or os.environ.get(_envelope.VARIABLE)
        self.given = bool(path)
        self.digest = ""
        self._envelope: _envelope.Envelope | None = None
        self._objection: str | None = None
        self._model = model
        self._frameworks = frameworks
        self._log = log
        if not path:
            return
        try:
            self._envelope = _envelope.read(path)
            self.digest = self._envelope.digest
        except _envelope.EnvelopeError as error:
            self._objection = str(error)
            self.digest = _DAMAGED

    @property
    def objection(self) -> str | None:
        """Why the file admits nothing, whatever fails."""
        return self._objection

    def agree(self, digests: Iterable[str]) -> None:
        """Admit nothing unless all ranks have read the same."""
        found = set(digests)
        if len(found) > 1:
            self.given = True
            self._objection = f"expected one envelope on all ranks; found {len(found)} different"

    def ask(self, phase: str, action: str, steps: Iterable[str]) -> str | None:
        """Say why `action` is not proven for a failure in `phase`, if it is not; record it.

        Args:
            phase: where it struck, one of the envelope's `PHASES`.
            action: what is to be done.
            steps: in which ways groups are to be replaced; more than one is a profile of its own.
        """
        if not self.given and not self._log.kept:
            return None
        stack, key = self._observe(phase, steps)
        objection = self._objection
        if objection is None and self._envelope is not None:
            objection = self._envelope.objection(stack, key, action)
        self._log.write(
            "admission", action=action, key=dataclasses.asdict(key), stack=stack, reason=objection
        )
        return objection

    def _observe(self, phase: str, steps: Iterable[str]) -> tuple[dict[str, str], _envelope.Key]:
        parameters = list(self._model.parameters())
        device = parameters[0].device.type if parameters else "cpu"
        stack = _envelope.stack_of(backend=str(dist.get_backend()), device=device)
        key = _envelope.Key(
            platform=_envelope.title(stack),
            profile=_envelope.profile_of(
                self._wrapper(),
                compiled=compiled.is_compiled(self._model),
                replacement="+".join(sorted(set(steps))),
            ),
            phase=phase,
        )
        return stack, key

    def _wrapper(self) -> str:
        """Name what keeps the model in step; several, or none, are a profile of their own."""
        found = (
            each.name
            for each in self._frameworks
            if each.synchronizes and any(True for _ in each.references(self._model))
        )
        return "+".join(sorted(found)) or "none"
