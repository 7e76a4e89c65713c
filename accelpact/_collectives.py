"""What is known of torch.distributed's functions: where the group stands, what a failure spoils.

Names as of torch 2.8 to 2.14.1; a function that a version lacks is left out.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

_GROUP_NAMES = ("group", "pg", "process_group")

_COLLECTIVES = frozenset(
    (
        "_all_gather_base",
        "_reduce_scatter_base",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_into_tensor",
        "gather_object",
        "gather_single",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
    )
)
"""Every member calls these, and they can be issued again."""

_IN_PLACE = {"all_reduce": "tensor", "all_reduce_coalesced": "tensors", "reduce": "tensor"}
"""Argument that is both input and output, which a collective that fails may leave half summed."""

_SIGNS = ("gloo", "nccl", "pair closure", "closed by peer", "reset by peer")
"""In messages of backends; Gloo's own do not always name it (functional collectives, torch 2.14.1).
"""


def is_communication_failure(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a backend's and not a caller's mistake.

    Gloo raises plain RuntimeErrors, which name its source file; other backends raise
    `torch.distributed.DistError`. The logger of torch.distributed may raise another error while
    it describes the first.
    """
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError):
            return True
        if isinstance(current, RuntimeError) and any(s in str(current).lower() for s in _SIGNS):
            return True
        current = current.__cause__ or current.__context__
    return False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function of torch.distributed that takes a group."""

    name: str
    original: Callable[..., Any]
    key: str
    """Name of the argument that is the group."""
    position: int
    """Where it stands among the positional ones."""
    in_place: tuple[str, int] | None
    """Name and position of what is both input and output."""

    @property
    def is_collective(self) -> bool:
        """Whether every member calls it, so that it can be issued again."""
        return self.name in _COLLECTIVES


def functions() -> Iterator[Function]:
    """Yield the functions of torch.distributed that take a group."""
    for name, value in vars(c10d).items():
        if type(value) is not types.FunctionType or (
            name.startswith("_") and name not in _COLLECTIVES
        ):
            continue
        parameters = list(inspect.signature(value).parameters)
        key = next((each for each in _GROUP_NAMES if each in parameters), None)
        if key is None or value.__module__ != c10d.__name__:
            continue
        spoiled = _IN_PLACE.get(name)
        yield Function(
            name=name,
            original=value,
            key=key,
            position=parameters.index(key),
            in_place=(spoiled, parameters.index(spoiled)) if spoiled in parameters else None,
        )


class Call:
    """One call of a function with its arguments, to be made once or several times."""

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments; the caller should let go of its own references to them."""
        self.function = function
        self._args = list(args)
        self._kwargs = dict(kwargs)

    @property
    def group(self) -> ProcessGroup | None:
        """The group as it was given: None means the default group."""
        position = self.function.position
        given = self._args[position] if position < len(self._args) else None
        return self._kwargs.get(self.function.key, given)

    @group.setter
    def group(self, group: ProcessGroup | None) -> None:
        if self.function.position < len(self._args):
            self._args[self.function.position] = group
        elif self.function.key in self._kwargs:
            self._kwargs[self.function.key] = group

    def make(self) -> Any:
        """Call the original function."""
        return self.function.original(*self._args, **self._kwargs)

    def copy_input(self) -> list[torch.Tensor]:
        """Copy what a failure may spoil."""
        return [tensor.detach().clone() for tensor in self._spoiled()]

    def restore_input(self, copies: list[torch.Tensor]) -> None:
        """Put back what `copy_input` returned."""
        with torch.no_grad():
            for tensor, copy in zip(self._spoiled(), copies, strict=True):
                tensor.copy_(copy)

    def _spoiled(self) -> list[torch.Tensor]:
        if self.function.in_place is None:
            return []
        key, position = self.function.in_place
        value = self._args[position] if position < len(self._args) else self._kwargs[key]
        return [value] if isinstance(value, torch.Tensor) else list(value)
