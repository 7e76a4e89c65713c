"""What a digest costs beside moving the same bytes once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from accelpact._digest import tensor_digest, tree_digest

if TYPE_CHECKING:
    from tests.benchmarks.conftest import AgainstFloor

pytestmark = pytest.mark.benchmark

MIB = 2**20


def test_large_tensor(against_floor: AgainstFloor) -> None:
    """A 64 MiB tensor, against a copy of it."""
    t = torch.randn(64 * MIB // 4)
    target = torch.empty_like(t)

    against_floor(
        lambda: tensor_digest(t),
        lambda: target.copy_(t),
        description="copy_ of the same 64 MiB",
    )


def test_many_small_tensors(against_floor: AgainstFloor) -> None:
    """The tree over 300 tensors of 64 KiB, against a copy of each."""
    state = {f"weight/{i}": torch.randn(64 * 1024 // 4) for i in range(300)}
    targets = {name: torch.empty_like(t) for name, t in state.items()}

    def copy() -> None:
        for name, t in state.items():
            targets[name].copy_(t)

    against_floor(
        lambda: tree_digest(state), copy, description="copy_ of the same 300 tensors of 64 KiB"
    )
