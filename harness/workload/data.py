"""Which rank reads which sequence, as a function of how much it has consumed.

Every sample has a place in one data order: 0, 1, 2, ... A rank that has
consumed `cursor` samples takes place cursor * W + rank next. So the ranks of a
history of n updates have together read exactly the first n * W * samples
places, in whichever process and after however many restarts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.workload.corpus import VOCAB_SIZE, Corpus
from harness.workload.ledger import ledger
from harness.workload.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VOCAB_SIZE", "Corpus", "Loader", "ledger", "permutation", "sequence_at"]


@functools.lru_cache(maxsize=2)  # a microbatch may straddle two epochs
def permutation(seed: int, epoch: int, num_sequences: int) -> Tensor:
    """Return the order of the sequences in one epoch, int64 [num_sequences].

    A generator of its own: the global one is part of the state that recovery
    must preserve, and reading data must not move it.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
    return torch.randperm(num_sequences, generator=generator)


def sequence_at(place: int, *, seed: int, num_sequences: int) -> int:
    """Return the sequence that stands at `place` of the data order."""
    epoch, index = divmod(place, num_sequences)
    return int(permutation(seed, epoch, num_sequences)[index])


class Loader:
    """The samples of one rank, in order; `cursor` is all the state it has."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        microbatch: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """Start at the beginning of the data order.

        Raises:
            SpecError: the corpus is too small for one microbatch of every rank.
        """
        corpus.check(seq_len=seq_len, microbatch=microbatch, world_size=world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to {world_size - 1}; found {rank}")
        self.seq_len = seq_len
        self.microbatch = microbatch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.num_sequences = corpus.num_sequences(seq_len)
        self.cursor = 0
        """Samples that this rank has consumed in the committed history."""
        self._bytes = torch.frombuffer(bytearray(corpus.data), dtype=torch.uint8)

    def next_batch(self) -> tuple[Tensor, list[int]]:
        """Consume one microbatch.

        Returns:
            Tokens, int64 [microbatch, seq_len + 1] on the device (inputs are all
            but the last, targets all but the first), and the places in the data
            order that were served.
        """
        places = [
            (self.cursor + offset) * self.world_size + self.rank
            for offset in range(self.microbatch)
        ]
        tokens = torch.stack([self._sequence(place) for place in places])
        self.cursor += self.microbatch
        return tokens.to(self.device, torch.int64), places

    def _sequence(self, place: int) -> Tensor:
        sequence = sequence_at(place, seed=self.seed, num_sequences=self.num_sequences)
        start = sequence * self.seq_len
        return self._bytes[start : start + self.seq_len + 1]

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
