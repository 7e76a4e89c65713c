"""AccelPact: keep the state of sharded training through a communication failure.

`attach` protects a job: an optimizer step commits an update, and a collective that
fails between two updates is repaired and issued again. The group is replaced, every
reference to it is rebound, and an audit proves that none is left.
"""

from accelpact._attach import attach
from accelpact._capture import Capture, Capturing
from accelpact._communicator import num_registered_groups
from accelpact._digest import StateDigest, tensor_digest, tree_digest
from accelpact._discard import Discard
from accelpact._errors import EXIT_STATUS, Reason, Rejected, UpdateInterrupted
from accelpact._floor import measure_floor
from accelpact._frameworks import ALL as FRAMEWORKS
from accelpact._pact import Pact
from accelpact._protocol import Repair
from accelpact._rebind import ReferenceIndex
from accelpact._settings import Settings
from accelpact._state import application_state
from accelpact._updates import Update

__all__ = [
    "EXIT_STATUS",
    "FRAMEWORKS",
    "Capture",
    "Capturing",
    "Discard",
    "Pact",
    "Reason",
    "ReferenceIndex",
    "Rejected",
    "Repair",
    "Settings",
    "StateDigest",
    "Update",
    "UpdateInterrupted",
    "application_state",
    "attach",
    "measure_floor",
    "num_registered_groups",
    "tensor_digest",
    "tree_digest",
]
