"""Which rank reads which sample, as a function of how much it has consumed.

Every sample has a place in one data order: 0, 1, 2, ... A rank that has
consumed `cursor` samples takes place cursor * W + rank next. So the ranks of a
history of n updates have together read exactly the first n * W * samples
places, in whichever process and after however many restarts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from harness.spec import SpecError
from harness.workload.corpus import VOCAB_SIZE, Corpus
from harness.workload.ledger import ledger
from harness.workload.seeds import derive_seed

if TYPE_CHECKING:
    from harness.workload.training import Training

__all__ = [
    "VOCAB_SIZE", "Corpus", "Loader", "Sequences", "batch", "ledger", "permutation", "sample_at",
]  # fmt: skip


class Sequences:
    """The samples of a corpus: int64 [seq_len + 1], the inputs and the byte behind the last."""

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Cut `corpus` into sequences of `seq_len` inputs."""
        self._seq_len = seq_len
        self._num = corpus.num_sequences(seq_len)
        self._bytes = torch.frombuffer(bytearray(corpus.data), dtype=torch.uint8)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._num

    def __getitem__(self, index: int) -> Tensor:
        """Return sequence `index`."""
        start = index * self._seq_len
        return self._bytes[start : start + self._seq_len + 1].to(torch.int64)


@functools.lru_cache(maxsize=2)  # a microbatch may straddle two epochs
def permutation(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Return the order of the samples in one epoch, int64 [num_samples].

    A generator of its own: the global one is part of the state that recovery
    must preserve, and reading data must not move it.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
    return torch.randperm(num_samples, generator=generator)


def sample_at(place: int, *, seed: int, num_samples: int) -> int:
    """Return the index of the sample that stands at `place` of the data order."""
    epoch, index = divmod(place, num_samples)
    return int(permutation(seed, epoch, num_samples)[index])


def batch(training: Training, indices: list[int], device: torch.device) -> Any:
    """Read the samples `indices`, and return them as one batch on `device`."""
    collate = training.collate or default_collate
    return _moved(collate([training.data[index] for index in indices]), device)


def _moved(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(each, device) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    return value


class Loader:
    """The samples of one rank, in order; `cursor` is all the state it has."""

    def __init__(
        self,
        training: Training,
        *,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """Start at the beginning of the data order.

        Raises:
            SpecError: there are too few samples for one microbatch of every rank.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to {world_size - 1}; found {rank}")
        check_size(len(training.data), microbatch=training.microbatch, world_size=world_size)
        self.microbatch = training.microbatch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.num_samples = len(training.data)
        self.cursor = 0
        """Samples that this rank has consumed in the committed history."""
        self._training = training

    def next_batch(self) -> tuple[Any, list[int]]:
        """Consume one microbatch.

        Returns:
            The batch, on the device, and the places in the data order that were served.
        """
        places = self.places(self.cursor, self.microbatch)
        indices = [
            sample_at(place, seed=self.seed, num_samples=self.num_samples) for place in places
        ]
        found = batch(self._training, indices, self.device)
        self.cursor += self.microbatch
        return found, places

    def places(self, cursor: int, number: int) -> list[int]:
        """Return the places in the data order of this rank's `number` samples after `cursor`."""
        return [(cursor + offset) * self.world_size + self.rank for offset in range(number)]

    def state_dict(self) -> dict[str, int]:
        """Return `{"cursor": samples consumed}`."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where `state_dict` was taken.

        Raises:
            ValueError: no cursor, or one that is not a count.
        """
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise ValueError(
                f"cursor: expected a count of samples from Loader.state_dict; found {cursor!r}"
            )
        self.cursor = cursor


def check_size(num_samples: int, *, microbatch: int, world_size: int) -> None:
    """Refuse data that cannot give every rank one microbatch of its own.

    Raises:
        SpecError: says how many samples are needed.
    """
    needed = world_size * microbatch
    if num_samples < needed:
        raise SpecError(
            f"workload: data: expected at least {needed} samples, one microbatch of {microbatch} "
            f"for each of {world_size} ranks; found {num_samples}; give more data"
        )
