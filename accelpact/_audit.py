"""The proof that nothing names a retired group any more, or the path of everything that does.

A group that was retired still works, or hangs: whoever goes on using it gets wrong sums without
an error. So it is not enough to rebind what one knows of.

The proof is that the group is gone: its weak reference is dead, and the threads and descriptors
of its communicator have ended, which C++ objects could have kept that Python does not see. While
a variable of the script names the group, that cannot be; then the heap is walked, and the holders
that are found must account for every reference to the group.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import types
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from accelpact import _native
from accelpact._heap import Found, Holder, find_holders, running_frames
from accelpact._places import Kind, partial_of, read_locals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from accelpact._frameworks import Reference

__all__ = ["Audit", "Finding", "Holder", "Kind"]

_GRACE_S = 0.25
"""For the frames of the repair itself, which name the group, to end."""
_NATIVE_S = 5.0
"""For the threads of a communicator that nothing holds any more to end."""
_PATIENCE_S = 20.0
"""For the walk."""
_POLL_S = 0.002
_ONE_AT_A_TIME = threading.Lock()
"""Two walks would find each other's notes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit found; all of it text, which keeps nothing alive."""

    label: str
    adopted: tuple[str, ...] = ()
    """Places that a framework knew how to rebind, which was done."""
    redirected: tuple[str, ...] = ()
    """Variables and attributes of the script or of third parties. Calls that they make through
    torch.distributed go to the replacement."""
    left: tuple[str, ...] = ()
    """Places that torch itself reads, or that reach the backend past torch.distributed: the
    repair does not hold."""
    dead: bool = False
    """Whether the group is gone."""
    native: str = ""
    """`released`, or what keeps the communicator."""
    unseen: int = 0
    """References to the group that no place accounts for: arguments of calls under way, or what
    extension modules hold."""
    walked: bool = False
    """Whether the heap was walked."""
    collected: bool = False
    """Whether the garbage collector was asked to run."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing is left that could use the retired communicator."""
        return not self.left


class Audit:
    """The audit of one group: made before the group is retired, run after, off the critical path.

    It does not keep the group alive.
    """

    def __init__(self, group: ProcessGroup, *, label: str) -> None:
        """Note what the group has in this process.

        Args:
            group: still registered and unharmed.
            label: its name, for people.
        """
        self.label = label
        self._group = weakref.ref(group)
        backends = _native.backends(group)
        self._footprint = _native.Footprint(backends)
        self._backends = [weakref.ref(backend) for backend in backends]

    def run(
        self,
        adopt: Callable[[Holder], Reference | None],
        new: ProcessGroup,
        *,
        keep: list[ProcessGroup] | None = None,
    ) -> Finding:
        """Let go of the group, and find out whether it goes.

        Takes milliseconds if it does, and seconds if the heap must be walked. Run it in a thread
        of its own: the last reference may take as long to drop as an operation under way takes.

        Args:
            adopt: returns how to rebind a holder, if a framework knows it.
            new: what has the place of the group now.
            keep: the list that has kept the group until now. It is emptied.
        """
        start = time.monotonic()
        with _ONE_AT_A_TIME:
            self._refresh()
            if keep is not None:
                keep.clear()
            verdict = _Verdict(self.label)
            if not self._gone(_GRACE_S):
                self._examine(verdict, adopt, new)
            self._conclude(verdict)
        return verdict.finding(time.monotonic() - start)

    # -- what is still there -------------------------------------------------------------

    def _refresh(self) -> None:
        """Note what of the group was not to be seen yet when this was made."""
        group = self._group()
        if group is not None:
            self._footprint.settle()
            self._backends = [weakref.ref(backend) for backend in _native.backends(group)]

    def _gone(self, seconds: float) -> bool:
        """Whether no Python object of the group is left, within `seconds`."""
        end = time.monotonic() + seconds
        while self._group() is not None or any(each() is not None for each in self._backends):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def _targets(self) -> list[Any]:
        references = [self._group, *self._backends]
        return [target for each in references if (target := each()) is not None]

    # -- the walk --------------------------------------------------------------------------

    def _examine(
        self,
        verdict: _Verdict,
        adopt: Callable[[Holder], Reference | None],
        new: ProcessGroup,
    ) -> None:
        """Find, rebind and class every holder."""
        if not self._explained():
            gc.collect()
            verdict.collected = True
            if self._gone(0):
                return
        verdict.walked = True
        is_alive = self._group() is not None
        try:
            found = find_holders(self._targets(), end=time.monotonic() + _PATIENCE_S)
        except TimeoutError:
            verdict.left.append(f"the heap could not be walked within {_PATIENCE_S:g} s")
            return
        if is_alive:
            verdict.unseen = self._unseen(found.references)
        self._classify(found, verdict, adopt, new, is_backend=not is_alive)

    def _classify(
        self,
        found: Found,
        verdict: _Verdict,
        adopt: Callable[[Holder], Reference | None],
        new: ProcessGroup,
        *,
        is_backend: bool,
    ) -> None:
        for holder in found.holders:
            reference = adopt(holder)
            past = is_backend or holder.target > 0 or _reaches_past(holder)
            if reference is not None:
                reference.point_at(new)
                verdict.adopted.append(reference.label)
            elif holder.of_torch or past:
                verdict.left.append(holder.path)
            else:
                verdict.redirected.append(holder.path)

    def _explained(self) -> bool:
        """Whether variables of running functions and modules have all references to the group.

        If so, none can be in a cycle that waits for the garbage collector.
        """
        group = self._group()
        if group is None:
            return False
        count = sum(_count_fast(frame, group) for frame in running_frames())
        for module in list(sys.modules.values()):
            if type(module) is types.ModuleType:
                count += sum(value is group for value in list(vars(module).values()))
        return sys.getrefcount(group) - 2 <= count

    def _unseen(self, references: int) -> int:
        """References to the group besides those found, and the variable's and argument's here."""
        group = self._group()
        return 0 if group is None else max(0, sys.getrefcount(group) - 2 - references)

    # -- the end -----------------------------------------------------------------------------

    def _conclude(self, verdict: _Verdict) -> None:
        """Wait for the communicator to end, if nothing that was found keeps it."""
        keeps = "a variable" if verdict.redirected else "what is left"
        if verdict.redirected or verdict.left or verdict.adopted:
            self._gone(_GRACE_S if verdict.adopted else 0)
        else:
            self._gone(_NATIVE_S if verdict.walked and self._group() is not None else 0)
        verdict.dead = self._group() is None
        if not verdict.dead and not (verdict.redirected or verdict.left):
            verdict.native = f"held by {verdict.unseen} references that no Python object has"
            verdict.left.append(f"native: {verdict.native}")
        elif not verdict.dead or (verdict.left and not self._gone(0)):
            verdict.native = f"held by {keeps}"
        else:
            self._await_native(verdict)

    def _await_native(self, verdict: _Verdict) -> None:
        """Wait for the threads and descriptors, which no Python object keeps any more."""
        left = self._footprint.wait(_NATIVE_S)
        if left and not verdict.collected:
            gc.collect()
            verdict.collected = True
            left = self._footprint.wait(_GRACE_S)
        verdict.native = left or "released"
        if left and not self._footprint.works:
            verdict.native = f"released; {left} for results of its operations"
        elif left:
            verdict.left.append(f"native: {left}; a C++ object holds them")


class _Verdict:
    """A finding in the making."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.adopted: list[str] = []
        self.redirected: list[str] = []
        self.left: list[str] = []
        self.dead = False
        self.native = ""
        self.unseen = 0
        self.walked = False
        self.collected = False

    def finding(self, seconds: float) -> Finding:
        return Finding(
            label=self.label,
            adopted=_counted(self.adopted),
            redirected=_counted(self.redirected),
            left=_counted(self.left),
            dead=self.dead,
            native=self.native,
            unseen=self.unseen,
            walked=self.walked,
            collected=self.collected,
            seconds=seconds,
        )


def _counted(paths: list[str]) -> tuple[str, ...]:
    """Say every path once, in order."""
    return tuple(
        path if count == 1 else f"{path} ({count} of them)"
        for path, count in sorted(Counter(paths).items())
    )


def _reaches_past(holder: Holder) -> bool:
    """Whether the holder calls the backend without torch.distributed's functions of today.

    A bound method of the group does, and so does a `functools.partial` of a function that has
    been replaced since in its module by one that redirects.
    """
    if holder.kind is Kind.BOUND:
        return True
    for each in (holder.owner, *holder.chain):
        function = partial_of(each)
        if isinstance(function, types.FunctionType):
            module = sys.modules.get(function.__module__)
            today = vars(module).get(function.__name__) if module is not None else None
            return _is_replaced(function, today)
    return False


def _is_replaced(function: types.FunctionType, today: object) -> bool:
    """Whether another function has taken the place of `function`, wrapping it."""
    return today is not function and getattr(today, "__wrapped__", None) is function


def _count_fast(frame: types.FrameType, group: object) -> int:
    """References that the frame itself has to `group`; those in cells are the cells'."""
    code = frame.f_code
    own = frozenset(code.co_varnames) - frozenset(code.co_cellvars)
    return sum(name in own for name, value in read_locals(frame) if value is group)
