"""`torch.distributed.nn.functional`: default arguments that are the default group itself.

Its functions are defined with `group=group.WORLD`, which is evaluated when the module is imported:
if that comes after `init_process_group`, the defaults are the group (torch 2.13.0 and 2.14.1).
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from accelpact._frameworks import adopt_nothing, no_watch, undo_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._frameworks import Reference

name = "functional"
synchronizes = False

_HOME = "torch.distributed.nn.functional"


class _Defaults:
    """All default arguments of the module, which may be imported at any time."""

    label = f"{_HOME} default arguments"

    def names(self, group: object) -> bool:
        """Whether any default is `group`."""
        return any(value is group for each in _functions() for value in each.__defaults__ or ())

    def point_at(self, group: ProcessGroup) -> None:
        """Make every default that is a group this one: only the default group is among them."""
        for each in _functions():
            each.__defaults__ = tuple(
                group if isinstance(value, type(group)) else value
                for value in each.__defaults__ or ()
            )


def _functions() -> list[types.FunctionType]:
    module = sys.modules.get(_HOME)
    return [
        value
        for value in (vars(module).values() if module is not None else ())
        if isinstance(value, types.FunctionType) and value.__module__ == _HOME
    ]


def references(model: torch.nn.Module) -> Iterator[Reference]:  # noqa: ARG001
    """Yield the one place that stands for all defaults."""
    yield _Defaults()


watch = no_watch
undo = undo_nothing


adopt = adopt_nothing
