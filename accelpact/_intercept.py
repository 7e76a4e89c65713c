"""Standing in for torch.distributed's functions, so that a script takes part without a change.

A call made with a retired group goes to its replacement. A collective at a committed boundary
that fails is repaired and issued again with its input restored; the script gets the result of the
last one. A collective inside an update that fails is left to whoever can execute that again
(`accelpact._updates`), or to the launcher, and all ranks that depend on this one are told at once.

Calls that a compiler traces go to the original functions, which it knows. Those that torch itself
makes while a compiled model runs (FSDP1 does) are not traced, and neither are the stand-ins.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelpact._collectives import Call, Function, functions, is_communication_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from accelpact._pact import Pact

MAX_REPAIRS = 3
"""Repairs for one call; if it fails yet again, the script gets the error."""


class Intercept:
    """Stand-ins for this process's functions of torch.distributed, between `install` and `remove`.

    Looking through all modules takes milliseconds, so where the functions are named is noted once;
    installing and removing the stand-ins takes microseconds.
    """

    def __init__(self, pact: Pact) -> None:
        """Find every function that takes a group, wherever a module names it."""
        # It keeps a table of the originals, which it must not fill with the stand-ins.
        import torch.distributed._functional_collectives  # noqa: F401

        self._pact = pact
        self._inside = False
        self._installed = False
        self._places: list[tuple[dict[str, Any], str, Any, Callable[..., Any]]] = []
        stand_ins = {id(each.original): self._stand_in(each) for each in functions()}
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType):
                namespace = vars(module)
                self._places += [
                    (namespace, name, value, stand_in)
                    for name, value in list(namespace.items())
                    if (stand_in := stand_ins.get(id(value))) is not None
                ]

    def install(self) -> None:
        """Put the stand-ins in."""
        self._installed = True
        for namespace, name, original, stand_in in self._places:
            if namespace.get(name) is original:  # others may have put in something of their own
                namespace[name] = stand_in

    def remove(self) -> None:
        """Put the original functions back; a stand-in that somebody kept calls the original."""
        self._installed = False
        for namespace, name, original, stand_in in self._places:
            if namespace.get(name) is stand_in:
                namespace[name] = original

    def close(self) -> None:
        """Put the original functions back for good, and let go of the runtime.

        A compiler that first looked at torch.distributed meanwhile keeps the stand-ins.
        """
        self.remove()
        del self._pact

    def _stand_in(self, function: Function) -> Callable[..., Any]:
        original = function.original
        # What is called below a stand-in is no business of a compiler's either.
        handle = torch.compiler.disable(self._collective if function.is_collective else self._other)

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if not self._installed or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            call = Call(function, args, kwargs)
            del args, kwargs  # a retired group must not stay named by this frame
            return handle(call)

        _leave_alone(stand_in)
        _leave_alone(Call.__init__)
        return stand_in

    def _other(self, call: Call) -> Any:
        call.group = self._pact.redirects.current(call.group)
        return call.make()

    def _collective(self, call: Call) -> Any:
        call.group = self._pact.redirects.current(call.group)
        if self._inside:  # a part of a collective that is looked after as a whole
            return self._make(call)
        self._inside = True
        try:
            if self._pact.boundary.declared:
                return self._at_boundary(call)
            return self._in_update(call)
        finally:
            self._inside = False

    def _in_update(self, call: Call) -> Any:
        self._pact.control.require_no_discard()
        try:
            return self._wait_in(call, call.make)
        except RuntimeError as error:
            if not is_communication_failure(error):
                raise
            if self._pact.attempt is None:
                self._pact.give_up(_group_of(call), error)
            self._pact.boundary.poisoned.add(_group_of(call).group_name)
            raise

    def _at_boundary(self, call: Call) -> Any:
        copies = call.copy_input()
        for repairs in range(MAX_REPAIRS + 1):
            self._pact.join_pending()
            call.group = self._pact.redirects.current(call.group)
            try:
                result = self._wait_in(call, functools.partial(self._make, call))
            except RuntimeError as error:
                if repairs == MAX_REPAIRS or not is_communication_failure(error):
                    raise
            else:
                if isinstance(result, dist.Work):
                    return _Reissued(self, call, result, copies)
                if self.complete(_group_of(call)):
                    return result
            self.mend(call, copies)
        raise AssertionError

    def _make(self, call: Call) -> Any:
        """Make a call; at a boundary, return only when it has completed."""
        result = call.make()
        if self._pact.boundary.declared and not isinstance(result, dist.Work):
            self._pact.settling.await_collective(_group_of(call))
        return result

    def _finish(self, work: dist.Work, call: Call, *args: Any) -> bool:
        done: bool = work.wait(*args)
        self._pact.settling.await_collective(_group_of(call))
        return done

    def complete(self, group: ProcessGroup) -> bool:
        """Count a completed collective; whether that stands.

        It does not when a peer has failed in the same one meanwhile: then all members issue it
        again. The count goes up before the notice is looked at; the control thread takes the
        notice before it reads the count, so one of them sees the other.
        """
        completed, name = self._pact.boundary.completed, group.group_name
        completed[name] += 1
        notice = self._pact.control.pending
        if notice is None or notice.group != name or completed[name] <= notice.completed:
            return True
        completed[name] -= 1
        return False

    def mend(self, call: Call, copies: list[torch.Tensor]) -> None:
        """Repair the group of `call` and restore its input."""
        call.group = self._pact.mend(_group_of(call))
        call.restore_input(copies)

    def _wait_in(self, call: Call, make: Callable[[], Any]) -> Any:
        boundary = self._pact.boundary
        boundary.waiting = _group_of(call).group_name
        try:
            return make()
        finally:
            boundary.waiting = None

    def wait(self, work: dist.Work, call: Call, copies: list[torch.Tensor], *args: Any) -> bool:
        """Wait for a collective that was issued at a boundary; issue it again if it fails."""
        if not self._installed:
            return bool(work.wait(*args))
        for repairs in range(MAX_REPAIRS + 1):
            try:
                done: bool = self._wait_in(call, functools.partial(self._finish, work, call, *args))
            except RuntimeError as error:
                if repairs == MAX_REPAIRS or not is_communication_failure(error):
                    raise
            else:
                if self.complete(_group_of(call)):
                    return done
            self.mend(call, copies)
            work = call.make()
        raise AssertionError


class _Reissued(dist.Work):
    """A collective under way at a boundary, which is issued again if waiting for it fails."""

    def __init__(
        self, intercept: Intercept, call: Call, work: dist.Work, copies: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._intercept = intercept
        self._call = call
        self._work = work
        self._copies = copies

    def wait(self, *args: Any) -> bool:
        """Wait until it has completed."""
        return self._intercept.wait(self._work, self._call, self._copies, *args)

    def __getattribute__(self, name: str) -> Any:
        if name == "wait" or name.startswith("_"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("_work"), name)


def _leave_alone(function: Any) -> None:
    """Have the compiler make no graph of `function` by itself, as it makes none of torch's own.

    It may still trace it as part of a function that calls it, which a decorator of torch's would
    forbid. (`skip_code`, seen in torch 2.13.0 and 2.14.1: without it, FSDP1's collectives under
    `torch.compile` become graphs that no stand-in looks after.)
    """
    from torch._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(function.__code__)


def _group_of(call: Call) -> ProcessGroup:
    group = call.group or dist.group.WORLD
    assert group is not None
    return group
