"""All that is known of the private parts of the frameworks, one file per framework.

Each answers the same questions of a wrapped model: which references to process
groups do you cache, and are you at a committed boundary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """One place that names a process group: attribute `key` of `owner`.

    Reads and writes go past `__getattr__` and `__setattr__` of modules, which
    cost microseconds and look at parameters first.
    """

    owner: object
    key: str
    label: str
    """Path for people, for example `layers.0._inter_node_pg`."""

    def names(self, group: object) -> bool:
        """Whether this place names `group`, by identity."""
        return object.__getattribute__(self.owner, self.key) is group

    def point_at(self, group: object) -> None:
        """Make this place name `group`."""
        object.__setattr__(self.owner, self.key, group)


Watch: TypeAlias = "Callable[[], Iterator[str]]"
"""Yields what contradicts a committed boundary; nothing if there is none."""


class Framework(Protocol):
    """What the runtime asks of a framework."""

    name: str

    def references(self, model: torch.nn.Module) -> Iterator[Reference]:
        """Yield every place in `model` that can name a process group."""
        ...

    def watch(self, model: torch.nn.Module) -> Watch:
        """Collect once what `model`'s boundary depends on; return how to look at it."""
        ...
