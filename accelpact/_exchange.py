"""One group on its way to its replacement: retired, rebuilt, rebound, tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpact import _communicator, _replacement
from accelpact._errors import Reason, Rejected
from accelpact._rebind import rebind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accelpact._frameworks import Reference
    from accelpact._pact import Pact


class Exchange:
    """The replacement of one group on this rank; every member makes one and takes the same steps.

    Attributes:
        old: the group that failed.
        description: what it was.
        step: how it is replaced.
        holders: references that name it, from `retire` on.
        new: the replacement, from `rebuild` on: another object, or the same one in place.
    """

    def __init__(self, pact: Pact, group: ProcessGroup) -> None:
        """Look at `group` and choose how to replace it.

        Raises:
            Rejected: `reject_unsupported`, if it cannot be replaced here.
        """
        self._pact = pact
        self.old = group
        self.description = _communicator.describe(group)
        self.step = _replacement.choose(
            pact.settings.replacement, group, self.description, pact.index.obstacles(group)
        )
        self.holders: list[Reference] = []
        self.new: ProcessGroup = group

    def retire(self) -> None:
        """Give up the old communicator, once all members have come."""
        self.holders = self._pact.index.holders(self.old)
        if self.step.retires:
            self._pact.audits.take(self.old)
        self.step.retire(self.old, self.description, deadline=self._pact.settings.deadline)

    def rebuild(self, generation: int) -> None:
        """Connect the members again; they meet under a prefix of the generation."""
        self.new = self.step.build(
            self.old,
            self.description,
            store=self._pact.control.rendezvous(generation, self.description.name),
            rank=self._pact.rank,
            generation=generation,
            deadline=self._pact.settings.deadline,
        )

    def rebind(self) -> None:
        """Point every reference at the replacement.

        Raises:
            Rejected: `reject_stale_reference`, if one still names the old group (Eq. 5).
        """
        if self.new is self.old:
            self.holders = []
            return
        rebind(self.holders, self.new)
        left = [reference.label for reference in self._pact.index.holders(self.old)]
        if left:
            raise Rejected(
                Reason.STALE_REFERENCE,
                f"expected no reference to the retired group; found {', '.join(left)}",
            )
        self._pact.redirects.add(self.old, self.new)

    def validate(self) -> None:
        """Have the replacement compute.

        Raises:
            Rejected: `reject_probe_failed`, if it does not compute the right sum.
        """
        _communicator.probe(self.new, self.description, deadline=self._pact.settings.deadline)
