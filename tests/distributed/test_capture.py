"""What the runtime captures at the boundaries of a job that trains."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from harness.workload.model import next_token_loss
from tests.distributed import ranks, trainee

if TYPE_CHECKING:
    from harness.job import TrainingJob
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


class TestCaptured:
    """`Pact.captured`."""

    def test_restoring_gives_the_same_data_and_dropout_again(self) -> None:
        """After any number of batches, the one after the boundary has the loss that it had."""

        def one(rank: Rank) -> list[Any]:
            job = trainee.make(rank)
            pact = trainee.protect(rank, job, loader=job.loader)
            frontiers = [pact.captured.frontier]
            trainee.update(job, pact)
            frontiers.append(pact.captured.frontier)
            first = [_loss(job) for _ in range(2)]
            pact.captured.restore()
            again = [_loss(job) for _ in range(2)]
            dist.barrier()
            pact.close()
            return [frontiers, first == again, first[0] != first[1]]

        assert [[[0, 1], True, True]] * 4 == ranks.values(ranks.run(one))

    def test_undeclared_boundary_is_not_captured(self) -> None:
        """A commit inside an update leaves what the last committed boundary had."""

        def one(rank: Rank) -> list[int]:
            job = trainee.make(rank)
            pact = trainee.protect(rank, job)
            trainee.update(job, pact)
            tokens, _ = job.loader.next_batch()
            loss = next_token_loss(job.model(tokens[:, :-1]), tokens[:, 1:])
            pact.watches = [_NeverIdle()]
            pact.commit(7)
            found = [pact.captured.frontier, pact.frontier]
            loss.backward()
            dist.barrier()
            pact.close()
            return found

        assert [[1, 7]] * 4 == ranks.values(ranks.run(one))


class _NeverIdle:
    """What a framework says while an update is under way."""

    def structure(self) -> list[str]:
        return ["a module: is in the backward pass"]

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        return []


def _loss(job: TrainingJob) -> tuple[float, float]:
    """Run the next microbatch with dropout, and draw a number of Python's."""
    tokens, _ = job.loader.next_batch()
    with torch.no_grad():
        loss = next_token_loss(job.model(tokens[:, :-1]), tokens[:, 1:])
    return loss.item(), random.random()
