"""Standing in for torch.distributed's functions, without any group."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact._intercept import Intercept
from accelpact._redirect import Redirects

if TYPE_CHECKING:
    from collections.abc import Iterator

ORIGINALS = {"size": dist.get_world_size}
"""In a table, since a variable here would be replaced too."""


@pytest.fixture
def script() -> Iterator[types.ModuleType]:
    """A module that has imported functions by name."""
    module = types.ModuleType("a_script")
    module.size = dist.get_world_size  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def intercept(script: types.ModuleType) -> Iterator[Intercept]:
    """Stand-ins that are ready and not installed."""
    assert script
    pact: Any = SimpleNamespace(redirects=Redirects())
    made = Intercept(pact)
    yield made
    made.remove()


class TestIntercept:
    """Installing and removing."""

    def test_every_place_is_replaced_and_put_back(
        self, intercept: Intercept, script: types.ModuleType
    ) -> None:
        """Names in torch and in a script, as often as one likes."""
        places = [(dist, "get_world_size"), (c10d, "get_world_size"), (script, "size")]
        assert all(ORIGINALS["size"] is getattr(*place) for place in places)
        for _ in range(2):
            intercept.install()
            assert [ORIGINALS["size"]] * 3 == [getattr(*place).__wrapped__ for place in places]
            intercept.remove()

            assert [ORIGINALS["size"]] * 3 == [getattr(*place) for place in places]

    def test_what_others_put_in_stays(self, intercept: Intercept, script: types.ModuleType) -> None:
        """A place that somebody else has changed meanwhile is left alone."""
        intercept.install()
        script.size = other = object()  # type: ignore[attr-defined]
        intercept.remove()
        assert other is script.size
        intercept.install()

        assert other is script.size

    def test_kept_stand_in_calls_the_original(
        self, intercept: Intercept, script: types.ModuleType
    ) -> None:
        """Once removed, a stand-in that a closure has kept asks nobody for a redirect."""
        intercept.install()
        kept = script.size
        del intercept._pact.redirects
        with pytest.raises(AttributeError, match="redirects"):
            kept()
        intercept.remove()

        with pytest.raises(ValueError, match="process group has not been initialized"):
            kept()
