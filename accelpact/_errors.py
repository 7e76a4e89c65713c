"""Why a repair was refused."""

from __future__ import annotations

import enum

EXIT_STATUS = 75
"""Exit status of a rank that a refused or failed repair ended (sysexits' EX_TEMPFAIL):
the state on this rank is safe to discard and the launcher should restart from a checkpoint."""


class Reason(enum.Enum):
    """Machine-readable reasons of `Rejected`."""

    UNCOMMITTED_BOUNDARY = "reject_uncommitted_boundary"
    """An update is under way: gradients or framework state are not those of a boundary."""
    FRONTIER_MISMATCH = "reject_frontier_mismatch"
    """The ranks have not committed the same updates."""
    DEADLINE = "reject_deadline"
    """A rank did not answer in time."""
    UNSUPPORTED = "reject_unsupported"
    """The group or the backend is not one that can be replaced here."""
    STALE_REFERENCE = "reject_stale_reference"
    """A known reference still names the retired group (Eq. 5 of the paper does not hold)."""
    PROBE_FAILED = "reject_probe_failed"
    """The replacement group did not compute the right sum."""
    ONE_SIDED = "reject_one_sided"
    """Some members have completed the collective that failed on others, and went on."""
    RANK_SILENT = "reject_rank_silent"
    """A rank that is needed has given no heartbeat for longer than `silence`."""
    RANK_GONE = "reject_rank_gone"
    """A rank that is needed has said farewell."""
    UNQUALIFIED = "reject_unqualified"
    """The envelope does not hold what would have to be done: other versions, no such trial, or a
    file that cannot be read."""
    PEER_ABORTED = "reject_peer_aborted"
    """Another rank refused or failed during this repair."""


class UpdateInterrupted(RuntimeError):
    """The update under way must be taken back, since it failed on another rank.

    Raised where this rank would have gone on with it: at its next collective or optimizer step.
    """


class Rejected(RuntimeError):
    """A repair that was refused; the job must be restarted from a checkpoint.

    Attributes:
        reason: the machine-readable reason.
        detail: what was expected and what was found, for a person.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        """Keep reason and detail apart, and join them in the message."""
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
