"""Phase 4: describe, retire and rebuild a process group under its old name.

Only the members of the group take part. Because the replacement has the old
name, everything that resolves groups by name (device meshes, DTensor,
functional collectives, compiled graphs) finds it without being told.

`new_group` cannot do this: called by a subset it leaves the ranks with
different group counters, and with `use_local_synchronization` a second
replacement meets the store keys of the first.

`_world` holds what is known of torch.distributed's maps, `_backends` what differs between
backends, `_cutting` and `_interrupt` how a thread is got out of a collective.
"""

from accelpact._communicator._backends import has_watchdog
from accelpact._communicator._build import connect, probe, rebuild, rehearse, retire, stop
from accelpact._communicator._cutting import (
    failure,
    interrupt,
    interrupt_by_name,
    is_asynchronous,
)
from accelpact._communicator._describe import (
    Description,
    backend_objection,
    describe,
    require_served,
)
from accelpact._communicator._interrupt import prepare
from accelpact._communicator._reaper import Reaper
from accelpact._communicator._world import find, num_registered_groups, registered

__all__ = [
    "Description",
    "Reaper",
    "backend_objection",
    "connect",
    "describe",
    "failure",
    "find",
    "has_watchdog",
    "interrupt",
    "interrupt_by_name",
    "is_asynchronous",
    "num_registered_groups",
    "prepare",
    "probe",
    "rebuild",
    "registered",
    "rehearse",
    "require_served",
    "retire",
    "stop",
]
