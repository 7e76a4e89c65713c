"""Noticing forward passes of a model, whatever compiles it, without a trace in what is compiled.

A forward pre-hook notices every pass, but a compiler that traces the module traces the hook too:
it costs a frame, and DDP a graph break (torch 2.13.0 and 2.14.1). So where a compiled call begins
outside of what is traced, the notice is given there and the hook steps aside meanwhile. In a
function of the script that is compiled as a whole, the hook stays, and is traced.

`Module._compiled_call_impl` is what `Module.compile` sets and `Module.__call__` calls; the compiler
does not look at it when it traces a call of the module.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from accelpact._discover import living

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SLOT = "_compiled_call_impl"
_HOME = "torch._dynamo.eval_frame"


class ForwardNotice:
    """Calls `notice` when `model`, compiled or not, begins a forward pass, until `remove`."""

    def __init__(self, model: torch.nn.Module, notice: Callable[[], None]) -> None:
        """Hook the model, and get in front of what has compiled it and what will.

        Args:
            model: the model, or one that `torch.compile` has made of it.
            notice: must not raise.
        """
        self._model = _inside(model)
        self._notice = notice
        self._hook = self._model.register_forward_pre_hook(lambda *_: notice())
        self._covered: list[tuple[torch.nn.Module, Any, Any]] = []
        if vars(self._model).get(_SLOT) is not None:
            self._cover(self._model)
        for compiled in _compiled_from(self._model):
            self._cover(compiled)
        _watch_compiling(self)

    def remove(self) -> None:
        """Take everything off again."""
        _NOTICES.remove(self)
        self._hook.remove()
        for module, before, stand_in in self._covered:
            if vars(module).get(_SLOT) is stand_in:
                vars(module)[_SLOT] = before
        self._covered = []

    def compiled(self, target: object, made: Any) -> Any:
        """Return what is to be used for `made`, which `torch.compile` has made of `target`."""
        if isinstance(made, torch.nn.Module):
            if _inside(made) is self._model:
                self._cover(made)
        elif target == self._model._call_impl:  # for `Module.compile`
            return self._stand_in(self._model, made, made)
        return made

    def _cover(self, module: torch.nn.Module) -> None:
        """Have `module` called through a stand-in."""
        before = vars(module).get(_SLOT)
        call = module._call_impl if before is None else before
        vars(module)[_SLOT] = self._stand_in(module, before, call)

    def _stand_in(self, module: torch.nn.Module, before: Any, call: Callable[..., Any]) -> Any:
        stand_in = functools.partial(self._call, call)
        self._covered.append((module, before, stand_in))
        return stand_in

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._notice()
        hooks = self._model._forward_pre_hooks
        hook = hooks.pop(self._hook.id, None)
        try:
            return call(*args, **kwargs)
        finally:
            if hook is not None:
                hooks[self._hook.id] = hook


_NOTICES: list[ForwardNotice] = []
"""Those that are on."""


def _watch_compiling(notice: ForwardNotice) -> None:
    """Tell `notice` of what is compiled from now on."""
    _NOTICES.append(notice)
    original = torch.compile
    if hasattr(original, "_tells_notices"):
        return

    @functools.wraps(original)
    def compile_and_tell(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = original(model, *args, **kwargs)
        for each in _NOTICES:
            made = each.compiled(model, made)
        return made

    compile_and_tell._tells_notices = True  # type: ignore[attr-defined]
    torch.compile = compile_and_tell


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was compiled, or `model` itself."""
    home = sys.modules.get(_HOME)
    while home is not None and isinstance(model, home.OptimizedModule):
        model = model._orig_mod
    return model


def _compiled_from(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return every module of this process that `torch.compile` has made of `model`."""
    return (each for each in living(_HOME, "OptimizedModule") if _inside(each) is model)
