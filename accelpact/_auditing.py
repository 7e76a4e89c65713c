"""Letting go of retired groups, away from the training thread, and proving that they go.

The destructor of a Gloo group joins its threads, which takes 15 to 20 ms, and with an operation
in flight it blocks until that operation times out. So a thread holds the last reference.

That thread begins a moment after the repair. What it does is Python, and would have the
interpreter's lock for milliseconds when the training thread comes back from its first collective.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NoReturn

from accelpact._audit import Audit, Finding
from accelpact._communicator import Reaper
from accelpact._errors import Reason, Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accelpact._audit import Holder
    from accelpact._frameworks import Reference
    from accelpact._pact import Pact
    from accelpact._protocol import Repair

_PATIENCE_S = 30.0
_DELAY_S = 0.1
"""From the end of a repair to its audit: enough for the collective that is issued again, and less
than it takes to notice the next failure."""


class Auditing:
    """What becomes of the groups that one pact retires.

    Attributes:
        findings: what the audits found, in the order of the repairs.
    """

    def __init__(self, pact: Pact) -> None:
        """Hold nothing yet."""
        self.findings: list[Finding] = []
        self._pact = pact
        self._reaper = Reaper()
        self._kept: dict[str, ProcessGroup] = {}
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def drop(self, group: ProcessGroup) -> None:
        """Let go of a group that nobody else knows."""
        keep = [group]
        del group
        self._reap(keep)

    def take(self, group: ProcessGroup) -> None:
        """Keep a group that is about to be retired."""
        self._kept[group.group_name] = group

    def abandon(self) -> None:
        """Let go of what was taken, since its repair failed and the process ends."""
        keep = list(self._kept.values())
        self._kept.clear()
        self._reap(keep)

    def begin(self, done: Repair) -> None:
        """Let go of the group that `done` has retired, prove that it goes, and record it all.

        Returns at once; a thread does it, after a short delay.
        """
        retired = self._kept.pop(done.group.group_name, None)
        keep = [] if retired is None else [retired]
        del retired
        if keep and self._pact.settings.audit:
            self._thread = threading.Thread(
                target=self._run,
                args=(done, keep, self._thread, time.monotonic() + _DELAY_S),
                name="accelpact-audit",
                daemon=True,
            )
            self._thread.start()
            return
        self._reap(keep)
        self._record(done, None)

    def join(self) -> None:
        """Wait a bounded time until everything retired is gone."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join(_PATIENCE_S)
            self._hurry.clear()
        self._reaper.join()

    def _reap(self, keep: list[ProcessGroup]) -> None:
        """Empty `keep`, whose groups go without an audit."""
        while keep:
            self._reaper.take(keep.pop())
        self._reaper.release()

    def _run(
        self, done: Repair, keep: list[ProcessGroup], before: threading.Thread | None, due: float
    ) -> None:
        if before is not None:
            before.join()
        self._hurry.wait(max(0.0, due - time.monotonic()))
        audit = Audit(keep[0], label=keep[0].group_name)
        finding = audit.run(self._adopt, done.group, keep=keep)
        self.findings.append(finding)
        self._record(done, finding)
        if not finding.clean:
            self._refuse(done, finding)

    def _adopt(self, holder: Holder) -> Reference | None:
        for framework in self._pact.frameworks:
            reference = framework.adopt(holder)
            if reference is not None:
                return reference
        return None

    def _record(self, done: Repair, finding: Finding | None) -> None:
        self._pact.log.write(
            "repair",
            generation=done.generation,
            group=done.group.group_name,
            ranks=list(done.ranks),
            frontier=done.frontier,
            trigger=done.trigger,
            phases_ms=done.phases_ms,
            holders={
                "rebound": [*done.holders, *(finding.adopted if finding else ())],
                "redirected": list(finding.redirected) if finding else [],
                "left": list(finding.left) if finding else [],
            },
            replacement=done.replacement,
            audit=finding.native if finding else "nothing retired" if done.in_place else "off",
        )

    def _refuse(self, done: Repair, finding: Finding) -> NoReturn:
        """End this process and all that depend on it: a stale reference corrupts in silence."""
        rejection = Rejected(
            Reason.STALE_REFERENCE,
            f"rank {self._pact.rank}: expected nothing to reach the retired group "
            f"{finding.label}; found {', '.join(finding.left)}",
        )
        self._pact.refuse(rejection, finding.label, done.ranks, trigger="audit")
