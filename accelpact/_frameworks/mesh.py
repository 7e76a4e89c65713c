"""DeviceMesh: the root mesh keeps its groups by name, and everything else looks them up there.

`DeviceMesh._pg_registry`, seen in torch 2.13.0 and 2.14.1 (`torch/distributed/device_mesh.py`).
DTensors and submeshes hold names. A mesh need not belong to a module, so all of the process count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from accelpact._discover import living
from accelpact._frameworks import no_watch, undo_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._audit import Holder
    from accelpact._frameworks import Reference

name = "mesh"
synchronizes = False

_HOME = "torch.distributed.device_mesh"


@dataclasses.dataclass(frozen=True, slots=True)
class _Registry:
    """The groups of one mesh, whichever name a group has there."""

    registry: dict[str, Any]
    label: str

    def names(self, group: object) -> bool:
        return any(each is group for each in self.registry.values())

    def point_at(self, group: ProcessGroup) -> None:
        """Enter the replacement, which has the old group's name."""
        self.registry[group.group_name] = group


def references(model: torch.nn.Module) -> Iterator[Reference]:  # noqa: ARG001
    """Yield the registry of every mesh of this process."""
    seen: set[int] = set()
    for item in living(_HOME, "DeviceMesh"):
        registry = vars(item).get("_pg_registry")
        if isinstance(registry, dict) and id(registry) not in seen:
            seen.add(id(registry))
            dims = vars(item).get("_mesh_dim_names") or ()
            yield _Registry(registry, f"DeviceMesh({', '.join(dims)})._pg_registry")


def names_of_groups(model: torch.nn.Module) -> set[str]:
    """Return the names of the groups that operations on the parameters of `model` may use.

    DTensor's caches (torch 2.14.1) are asked by equality, and meshes that have other groups but
    the same ranks and names are equal: a result may lie on any of them, whichever came first.
    """
    parameters = (getattr(each, "device_mesh", None) for each in model.parameters())
    meshes = {each for each in parameters if each is not None}
    names: set[str] = set()
    if not meshes:
        return names
    for item in living(_HOME, "DeviceMesh"):
        if item in meshes:
            with contextlib.suppress(RuntimeError):  # it was made without groups
                names |= {group.group_name for group in item.get_all_groups()}
    return names


def adopt(holder: Holder) -> Reference | None:
    """Take a mesh that was made after the references were collected."""
    home = sys.modules.get(_HOME)
    if home is None:
        return None
    for each in (holder.owner, *holder.chain):
        if issubclass(type(each), home.DeviceMesh):
            registry = vars(each).get("_pg_registry")
            if registry is holder.owner and isinstance(registry, dict):
                return _Registry(registry, "DeviceMesh._pg_registry")
    return None


watch = no_watch
undo = undo_nothing
