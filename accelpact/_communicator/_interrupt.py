"""Getting a thread of this process out of a Gloo collective at once.

Gloo has no abort: `abort`, `shutdown`, `destroy_process_group` and an in-place reconfiguration all
leave a blocked operation to its timeout (torch 2.13.0 and 2.14.1), and so does a peer that fails,
except for its two neighbours in the ring. What does end it is the end of a connection. So the
group's own connections are shut down: the operation fails at once, and so does any later one,
which is what a group that waits for its replacement should do.

Now and then Gloo loses a failure: a send that its event loop begins at that moment fails alone,
and whoever waits for it (`UnboundBuffer::waitSend`) is told by the timeout of the group only (torch
2.14.1, several times in a hundred updates taken back). So that timeout should be shorter than
the patience of whoever waits for the rank.

Every Gloo group has a device of its own, which listens on a port and has an event loop; the kernel
says what an event loop looks at (/proc/self/fdinfo), and the group has published its port in its
store. Only an exact match counts. Seen in torch 2.13.0 and 2.14.1 on Linux; elsewhere nothing is
found and `interrupt` says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from accelpact._communicator._world import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

_SELF = Path("/proc/self")
_WATCHED = re.compile(r"tfd:\s+(\d+) .* ino:([0-9a-f]+)")
_LOOK_UP_S = 0.5
_addresses: weakref.WeakKeyDictionary[ProcessGroup, bytes] = weakref.WeakKeyDictionary()
"""What groups have published of themselves in their stores, whose keys may be gone by now."""


def shut_connections(group: ProcessGroup) -> bool:
    """Make a collective of `group` that blocks a thread of this process raise at once.

    All later collectives of `group` raise too, here and, sooner or later, on its other members:
    call it only for a group that is going to be replaced, and not once that has begun.

    Returns:
        Whether it could: False where the group's connections cannot be told from those of others,
        and where it has none of Gloo's.
    """
    address = _address(group)
    connections = None if address is None else _connections(address)
    for connection in connections or ():
        with connection, contextlib.suppress(OSError):  # the peer may have been quicker
            connection.shutdown(socket.SHUT_RDWR)
    return connections is not None


def prepare(group: ProcessGroup) -> None:
    """Note where `group` listens, while its store can be asked."""
    if _device(group) is not None:
        _look_up(group)


def _address(group: ProcessGroup) -> bytes | None:
    """Return what `group` has published, if it has a device of its own."""
    if _device(group) is None:
        return None
    if group not in _addresses:
        # Another thread may be waiting for other ranks in the same client of the store.
        thread = threading.Thread(target=_look_up, args=(group,), daemon=True)
        thread.start()
        thread.join(_LOOK_UP_S)
    return _addresses.get(group)


def _look_up(group: ProcessGroup) -> None:
    """Ask the store of `group`, under every device that torch may have named the part by."""
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError):  # the store may be gone
        for device in ("cpu", *(each.type for each in group._device_types)):
            key = f"{device}//0/{group.rank()}"
            if group not in _addresses and store.check([key]):
                _addresses[group] = store.get(key)


def _device(group: ProcessGroup) -> object | None:
    """Return the Gloo device of `group`; None if it has not exactly one to itself."""
    devices = _devices(group)
    if len(devices) != 1:
        return None
    shared = any(
        devices[0] is device
        for other in registered()
        if other is not group
        for device in _devices(other)
    )
    return None if shared else devices[0]


def _devices(group: ProcessGroup) -> list[object]:
    found: list[object] = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # declared for this device and never made
            backend = group._get_backend(device)
            if backend.name() == "gloo":
                found += [each for each in backend.options._devices if each not in found]
    return found


def _connections(address: bytes) -> list[socket.socket] | None:
    """Return duplicates of the connections of the group that published `address`."""
    for loop in _event_loops():
        watched = list(_watched(loop))
        listeners = [each for each in watched if _listens(each)]
        if any(_packed(each) in address for each in listeners):
            for each in listeners:
                each.close()
            return [each for each in watched if each not in listeners]
        for each in watched:
            each.close()
    return None


def _event_loops() -> Iterator[str]:
    """Yield what the kernel tells of every event loop of this process."""
    for entry in (_SELF / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                yield (_SELF / "fdinfo" / entry.name).read_text()


def _watched(loop: str) -> Iterator[socket.socket]:
    """Yield duplicates of the sockets an event loop looks at."""
    for number, inode in _WATCHED.findall(loop):
        with contextlib.suppress(OSError):
            copy = os.dup(int(number))
            try:
                # The number may be another file's by now.
                if os.fstat(copy).st_ino == int(inode, 16):
                    yield socket.socket(fileno=copy)
                    copy = -1
            finally:
                if copy >= 0:
                    os.close(copy)


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _packed(one: socket.socket) -> bytes:
    """Return the address of `one` as a sockaddr has it."""
    host, port = one.getsockname()[:2]
    start = struct.pack("=H", one.family) + struct.pack("!H", port)
    if one.family == socket.AF_INET6:
        return start + bytes(4) + socket.inet_pton(socket.AF_INET6, host)
    return start + socket.inet_pton(socket.AF_INET, host)
