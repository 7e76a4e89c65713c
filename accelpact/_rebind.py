"""Phase 5: every cached reference that is g_old becomes g_new, every other stays (Eq. 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from accelpact import _communicator
from accelpact._frameworks import Fixed, mesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from accelpact._frameworks import Framework, Reference


class ReferenceIndex:
    """The places that can name a group, found once so that a repair does not search."""

    def __init__(self, model: torch.nn.Module, frameworks: Sequence[Framework]) -> None:
        """Walk `model` once with every framework."""
        self._references: list[Reference] = []
        self._of_model: list[Reference] = []
        self._of_tensors = mesh.names_of_groups(model)
        for framework in frameworks:
            found = list(framework.references(model))
            self._references += found
            if framework.synchronizes:
                self._of_model += found

    def __len__(self) -> int:
        """Number of places."""
        return len(self._references)

    def holders(self, group: ProcessGroup) -> list[Reference]:
        """References that are `group`, by identity."""
        return [reference for reference in self._references if reference.names(group)]

    def obstacles(self, group: ProcessGroup) -> list[str]:
        """Say what names `group` and cannot be rebound, and what to do about it."""
        return [
            f"{each.label}: {each.advice}"
            for each in self.holders(group)
            if isinstance(each, Fixed)
        ]

    def model_groups(self) -> list[list[int]]:
        """Return the ranks of each group through which the model is kept in step.

        All ranks in one, if the model names none: nothing is known of it then.
        """
        groups = [dist.get_process_group_ranks(group) for group in self.synchronizing()]
        return groups or [list(range(dist.get_world_size()))]

    def synchronizing(self) -> list[ProcessGroup]:
        """Return the registered groups through which the model is kept in step."""
        return [
            group
            for group in _communicator.registered()
            if group.group_name in self._of_tensors
            or any(reference.names(group) for reference in self._of_model)
        ]


def rebind(holders: Iterable[Reference], new: ProcessGroup) -> int:
    """Point every one of `holders` at `new`; return how many there were."""
    count = 0
    for reference in holders:
        reference.point_at(new)
        count += 1
    return count
