"""Noticing forward passes: whatever compiles the model, and without a trace in what is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from accelpact._boundary import Boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def _eager(layer: Layer) -> Callable[..., Any]:
    return layer


def _module(layer: Layer) -> Callable[..., Any]:
    return torch.compile(layer, backend="eager")


def _method(layer: Layer) -> Callable[..., Any]:
    layer.compile(backend="eager")
    return layer


def _function(layer: Layer) -> Callable[..., Any]:
    return torch.compile(lambda x: layer(x).sum(), backend="eager")


WAYS = {"eager": _eager, "module": _module, "method": _method, "function": _function}
ALONE = {"module": _module, "method": _method}
"""The model itself is compiled, and not a function that calls it."""


def _watched(
    layer: Layer, boundary: Boundary, way: str, *, late: bool
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Compile `layer` and notice its forward passes; return what to call, and what stops that."""
    if late:
        remove = boundary.notice_forward(layer)
        return WAYS[way](layer), remove
    used = WAYS[way](layer)
    return used, boundary.notice_forward(layer)


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_so_far() -> dict[str, dict[str, int]]:
    return {key: dict(counters[key]) for key in ("stats", "frames", "graph_break")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True], ids=["compiled before", "compiled after"])
class TestNotice:
    """A model is compiled before or after it is watched."""

    def test_forward_pass_with_a_graph_is_noticed(self, way: str, *, late: bool) -> None:
        """Time and again, and until the notice is taken off."""
        boundary, layer = Boundary(), Layer()
        used, remove = _watched(layer, boundary, way, late=late)
        seen = []
        for _ in range(2):
            used(torch.ones(1, 2))
            seen.append(boundary.entered)
            boundary.commit(1)
        remove()

        assert [True, True] == seen
        assert not layer._forward_pre_hooks

    def test_evaluation_is_not(self, way: str, *, late: bool) -> None:
        """It keeps no graph."""
        boundary, layer = Boundary(), Layer()
        used, _ = _watched(layer, boundary, way, late=late)
        with torch.no_grad():
            used(torch.ones(1, 2))

        assert not boundary.entered


@pytest.mark.parametrize("way", ALONE)
class TestCompiler:
    """What the compiler sees of a notice."""

    def test_counts_the_same_with_and_without(self, way: str) -> None:
        """Graphs, frames and graph breaks."""
        ALONE[way](Layer())(torch.ones(1, 2))
        bare = compiled_so_far()
        torch._dynamo.reset()
        counters.clear()
        layer = Layer()
        Boundary().notice_forward(layer)
        ALONE[way](layer)(torch.ones(1, 2))

        assert bare["stats"]["unique_graphs"] == 1
        assert bare == compiled_so_far()

    def test_compiles_nothing_again_when_the_notice_comes_and_goes(self, way: str) -> None:
        """As it does when the runtime is paused."""
        boundary, layer = Boundary(), Layer()
        used = ALONE[way](layer)
        used(torch.ones(1, 2))
        before = compiled_so_far()
        for _ in range(2):
            remove = boundary.notice_forward(layer)
            used(torch.ones(1, 2))
            remove()
            used(torch.ones(1, 2))

        assert before == compiled_so_far()

    def test_notice_that_was_removed_is_silent(self, way: str) -> None:
        """The compiled call is the one from before."""
        boundary, layer = Boundary(), Layer()
        used = ALONE[way](layer)
        slot = vars(layer).get("_compiled_call_impl")
        boundary.notice_forward(used)()
        used(torch.ones(1, 2))

        assert not boundary.entered
        assert slot is vars(layer).get("_compiled_call_impl")
