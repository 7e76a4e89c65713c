"""All that is known of the private parts of the frameworks, one file per framework.

Each answers the same questions of a wrapped model: which references to process
groups do you cache, what shows that an update is under way, undo your part of an
unfinished update, and is a holder that the audit found on the heap one of yours.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._audit import Holder


class Reference(Protocol):
    """One place that can name a process group, found once and read again at a repair."""

    @property
    def label(self) -> str:
        """Path for people, for example `layers.0._inter_node_pg`."""
        ...

    def names(self, group: ProcessGroup) -> bool:
        """Whether this place names `group`, by identity."""
        ...

    def point_at(self, group: ProcessGroup) -> None:
        """Make this place name `group`."""
        ...


@runtime_checkable
class Fixed(Reference, Protocol):
    """A place that cannot be made to name another group.

    While it names a group, that is not rebuilt.
    """

    @property
    def advice(self) -> str:
        """Why not, and what the user can do, for one line."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """The reference in attribute `key` of `owner`.

    Reads and writes go past `__getattr__` and `__setattr__` of modules, which
    cost microseconds and look at parameters first.
    """

    owner: object
    key: str
    label: str

    def names(self, group: object) -> bool:
        """Whether the attribute is `group`."""
        return object.__getattribute__(self.owner, self.key) is group

    def point_at(self, group: object) -> None:
        """Set the attribute."""
        object.__setattr__(self.owner, self.key, group)


class Watch(Protocol):
    """What one framework looks at to tell a committed boundary, collected once from a model."""

    def structure(self) -> Iterator[str]:
        """Yield what in the modules' own state contradicts a boundary; cheap enough per update."""
        ...

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield path and tensor of every gradient that is set, wherever the framework keeps one.

        A gradient that the optimizer's last step has consumed is no sign of an update under way;
        the caller knows those.
        """
        ...


class _NoWatch:
    """What has no part in an update."""

    def structure(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing."""
        yield from ()


def no_watch(model: torch.nn.Module) -> Watch:  # noqa: ARG001
    """Nothing to collect."""
    return _NoWatch()


def adopt_nothing(holder: Holder) -> Reference | None:  # noqa: ARG001
    """Adopt no holder: all places of the framework were there when they were collected."""
    return None


def undo_nothing(model: torch.nn.Module) -> None:
    """Keep no state of an update: there is nothing to undo."""


def set_gradients(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and gradient of those of `parameters` that have one."""
    for path, parameter in parameters:
        if parameter.grad is not None:
            yield path, parameter.grad


class Framework(Protocol):
    """What the runtime asks of a framework. Every answer may be empty.

    A framework's file imports the framework inside its functions and only if the program has
    done so: a script that uses DDP alone does not pay for importing FSDP.
    """

    name: str
    synchronizes: bool
    """Whether the model is kept in step through the groups that it references: ranks that share
    one depend on one another."""

    def references(self, model: torch.nn.Module) -> Iterator[Reference]:
        """Yield every place in `model` that can name a process group."""
        ...

    def watch(self, model: torch.nn.Module) -> Watch:
        """Collect once what `model`'s boundary depends on."""
        ...

    def undo(self, model: torch.nn.Module) -> None:
        """Forget the update that is under way, as if its forward pass had not begun.

        Gradients of the optimizer's parameters are dropped by the caller before. Nothing of what
        is under way on the model's groups can succeed any more.

        Raises:
            Rejected: `reject_unsupported`, if this torch has no way to.
        """
        ...

    def adopt(self, holder: Holder) -> Reference | None:
        """Return how to rebind what the audit found on the heap, if it is this framework's.

        For places that come into being after the references were collected, such as the
        copies of a module's attributes that compiling makes.
        """
        ...


from accelpact._frameworks import (  # noqa: E402  they use what is above
    compiled,
    ddp,
    fsdp1,
    fsdp2,
    functional,
    mesh,
)

ALL: tuple[Framework, ...] = (fsdp1, fsdp2, ddp, mesh, functional, compiled)
"""Every framework the runtime knows."""
