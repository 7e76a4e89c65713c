"""Taking the whole runtime off and on again in a process that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import accelpact
from accelpact import _communicator
from tests.distributed import ranks, wrappers

if TYPE_CHECKING:
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


class TestPause:
    """`Pact.pause` and `Pact.resume`, with a runtime that commits and repairs by itself."""

    def test_only_what_happens_after_resume_is_protected(self) -> None:
        """Paused, no step commits and a failure reaches the script; resumed, it is repaired."""

        def one(rank: Rank) -> dict[str, Any]:
            wrappers.connect(rank)
            original = dist.all_reduce
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pact = accelpact.attach(model, optimizer, store=rank.store, prefix="pause")
            store = rank.store()
            frontiers = []

            def update() -> None:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                frontiers.append(pact.frontier)

            update()
            pact.pause()
            found: dict[str, Any] = {"paused": dist.all_reduce is original}
            update()
            pact.resume()
            pact.resume()  # once is enough
            found["resumed"] = dist.all_reduce is not original
            update()
            ranks.meet(store, "trained", 2)
            world = dist.group.WORLD
            assert world is not None
            _communicator.interrupt(world)
            pact.pause()
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:
                found["failed"] = pact.generation
            pact.resume()
            value = torch.ones(1)
            dist.all_reduce(value)
            ranks.meet(store, "repaired", 2)
            update()
            pact.close()
            closed = dist.all_reduce is original
            return found | {
                "sum": value.item(),
                "generation": pact.generation,
                "frontiers": frontiers,
                "closed": closed,
            }

        for found in ranks.values(ranks.run(one, world_size=2)):
            assert found["paused"]
            assert found["resumed"]
            assert found["closed"]
            assert 0 == found["failed"]
            assert (2.0, 1) == (found["sum"], found["generation"])
            assert [1, 1, 2, 3] == found["frontiers"]
