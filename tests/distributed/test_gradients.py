"""The reference itself: what each wrapper averages is what one process computes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accelpact._state import clean_name
from harness.spec import WRAPPERS, Mesh
from harness.workload import decoder, hsdp, wrappers
from harness.workload.model import Decoder, next_token_loss
from harness.workload.presets import find_workload
from strategies._base import connect_native
from tests.distributed import ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workload.presets import Workload
    from tests.distributed.ranks import Rank

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

NUM_RANKS, ACCUMULATION, SEED = 4, 2, 3
SEQ_LEN = 16


def workload() -> Workload:
    """The smallest one, without dropout, which one process could not repeat."""
    tiny = find_workload("tiny")
    return dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, dropout=0.0))


def tokens(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    vocabulary = workload().model.vocab_size
    return torch.randint(vocabulary, (2, SEQ_LEN + 1), generator=generator)


def backward(model: nn.Module, rank: int, microbatch: int, share: float) -> None:
    """Add one microbatch's gradient, as its share of the whole batch."""
    found = tokens(rank, microbatch)
    (next_token_loss(model(found[:, :-1]), found[:, 1:]) * share).backward()


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """Gradients of one process that has the batches of all ranks."""
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = Decoder(workload().model)
    model.materialize(torch.device("cpu"))
    for rank in range(NUM_RANKS):
        for microbatch in range(ACCUMULATION):
            backward(model, rank, microbatch, 1 / (NUM_RANKS * ACCUMULATION))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class TestGradients:
    """Two microbatches on each of four ranks."""

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_are_those_of_a_single_process(self, wrapper: str, expected: dict[str, Tensor]) -> None:
        """Averaged, not summed, over replicas and shards, on every rank."""
        for found in ranks.values(ranks.run(_gradients, wrapper)):
            assert expected.keys() == found.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(
                    torch.tensor(found[name]), gradient, rtol=1e-4, atol=1e-6, msg=name
                )


def _gradients(rank: Rank, wrapper: str) -> dict[str, object]:
    mesh = Mesh.parse(WRAPPERS[wrapper])
    layout = mesh.layout(rank.number)
    attempt = dataclasses.replace(
        rank.attempt(group_timeout=30.0, shard_timeout=30.0), layout=layout
    )
    model = hsdp.build(
        decoder.maker(workload()),
        layout=layout,
        groups=connect_native(attempt),
        device=attempt.device,
        dtype=torch.float32,
        activation_checkpointing=False,
        seed=SEED,
        wrapper=wrapper,
    ).model
    for microbatch in range(ACCUMULATION):
        last = microbatch == ACCUMULATION - 1
        with wrappers.find(wrapper).microbatch(model, last=last):
            backward(model, rank.number, microbatch, 1 / ACCUMULATION)
    whole = (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True)
        if wrapper == "fsdp1"
        else contextlib.nullcontext()
    )
    with whole:
        return {
            clean_name(name).removeprefix("module."): _whole(parameter.grad).tolist()
            for name, parameter in model.named_parameters()
        }


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
