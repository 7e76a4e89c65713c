"""Is what the runtime is about to do proven here? Asked before anything is retired."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact import _envelope
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

_DAMAGED = "damaged"


class Admission:
    """The envelope of one rank, if one was given.

    Attributes:
        given: whether there is one; without, everything is admitted.
        digest: what tells whether all ranks have read the same.
    """

    def __init__(self, path: str | None, model: Module, *, replacement: str) -> None:
        """Read the file; what is wrong with it is said when something fails."""
        path = path or os.environ.get(_envelope.VARIABLE)
        self.given = bool(path)
        self.digest = ""
        self._envelope: _envelope.Envelope | None = None
        self._objection: str | None = None
        self._model = model
        self._replacement = replacement
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

    def require(self, phase: str, action: str) -> None:
        """Refuse `action` for a failure in `phase` unless it is proven here.

        Raises:
            Rejected: `reject_unqualified`.
        """
        if not self.given:
            return
        objection = self._objection
        if objection is None and self._envelope is not None:
            stack, key = self._observe(phase)
            objection = self._envelope.objection(stack, key, action)
        if objection is not None:
            raise Rejected(Reason.UNQUALIFIED, f"handed over to a restart: {objection}")

    def _observe(self, phase: str) -> tuple[dict[str, str], _envelope.Key]:
        parameters = list(self._model.parameters())
        device = parameters[0].device.type if parameters else "cpu"
        stack = _envelope.stack_of(backend=str(dist.get_backend()), device=device)
        key = _envelope.Key(
            platform=_envelope.title(stack),
            profile=_envelope.profile_of(
                wrapper_of(self._model),
                compiled=is_compiled(self._model),
                replacement=self._replacement,
            ),
            phase=phase,
        )
        return stack, key


def wrapper_of(model: Module) -> str:
    """Name what spreads `model` over the ranks; several, or none, are a profile of their own."""
    found = set()
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in names:
            found.add("fsdp1")
        if "FSDPModule" in names:
            found.add("fsdp2")
        if "DistributedDataParallel" in names:
            found.add("ddp")
    return "+".join(sorted(found)) or "none"


def is_compiled(model: Module) -> bool:
    """Whether any part of `model` goes through the compiler."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
