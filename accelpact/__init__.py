"""AccelPact: keep the state of sharded training through a communication failure.

`attach` gives a rank a `Pact`; `Pact.commit` declares each committed update and
`Pact.repair` replaces a group whose collective failed, rebinds every reference
that the framework cached, and lets the job go on from its frontier.
"""

from accelpact._communicator import num_registered_groups
from accelpact._digest import StateDigest, tensor_digest, tree_digest
from accelpact._errors import EXIT_STATUS, Reason, Rejected
from accelpact._floor import measure_floor
from accelpact._pact import FRAMEWORKS, Pact, attach
from accelpact._protocol import Repair
from accelpact._rebind import ReferenceIndex
from accelpact._state import application_state

__all__ = [
    "EXIT_STATUS",
    "FRAMEWORKS",
    "Pact",
    "Reason",
    "ReferenceIndex",
    "Rejected",
    "Repair",
    "StateDigest",
    "application_state",
    "attach",
    "measure_floor",
    "num_registered_groups",
    "tensor_digest",
    "tree_digest",
]
