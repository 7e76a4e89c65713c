"""The workloads: a model, its batch and its optimizer under one name."""

from __future__ import annotations

import dataclasses
import functools

from harness.spec import DTYPES, SpecError, choose
from harness.workload.config import ModelConfig
from harness.workload.corpus import VOCAB_SIZE

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = 400 * 2**20
"""A rank's interpreter, torch and Gloo. Seen resident: 370 MiB with the CPU build of torch; the
CUDA build's 730 MiB are for the most part library pages that the ranks share."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Everything about a training job that is not the machine's or the contender's."""

    name: str
    summary: str
    """One line for people."""
    model: ModelConfig
    seq_len: int
    """Tokens of a sequence."""
    microbatch: int
    """Sequences of one forward pass of one rank."""
    accumulation: int
    """Microbatches of one update; all but the last are backward without communication."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Largest norm of a replica's gradients."""
    dtype: str = "float32"
    """Recommended dtype of parameters and moments."""
    activation_checkpointing: bool = False
    """Whether recomputing activations is recommended."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            SpecError: names the field.
        """
        choose("dtype", self.dtype, DTYPES)
        for field in ("seq_len", "microbatch", "accumulation"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field}: expected at least 1; found {getattr(self, field)}")
        if self.seq_len > self.model.max_seq_len:
            raise SpecError(
                f"seq_len: expected at most the model's {self.model.max_seq_len}; "
                f"found {self.seq_len}"
            )
        if self.model.vocab_size < VOCAB_SIZE:
            raise SpecError(
                f"vocab_size: expected at least {VOCAB_SIZE}, one token per byte; "
                f"found {self.model.vocab_size}"
            )
        if self.lr <= 0 or self.clip_norm <= 0:
            raise SpecError(
                f"lr and clip_norm: expected more than 0; found {self.lr} and {self.clip_norm}"
            )

    @property
    def samples_per_update(self) -> int:
        """Sequences that one rank consumes in one update."""
        return self.microbatch * self.accumulation

    @property
    def tokens_per_update(self) -> int:
        """Tokens that one rank consumes in one update."""
        return self.samples_per_update * self.seq_len


TINY = Workload(
    name="tiny",
    summary="4 layers; an update takes about 0.1 s on 4 ranks of 2 cores",
    model=ModelConfig(
        vocab_size=VOCAB_SIZE, dim=96, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=320,
        max_seq_len=128, dropout=0.1,
    ),
    seq_len=64, microbatch=1, accumulation=2, lr=3e-3,
)  # fmt: skip

DECODER_32L = Workload(
    name="decoder-32l",
    summary="32 narrow layers, 33 FSDP units: many references to rebind, runs on CPU",
    model=ModelConfig(
        vocab_size=VOCAB_SIZE, dim=64, num_layers=32, num_heads=4, num_kv_heads=2, ffn_dim=192,
        max_seq_len=128, dropout=0.1,
    ),
    seq_len=64, microbatch=1, accumulation=2, lr=2e-3,
)  # fmt: skip

DECODER_1_2B = Workload(
    name="decoder-1.2b",
    summary="1.216 B parameters in 24 layers, the size of the paper's checkpoint measurements",
    model=ModelConfig(
        vocab_size=32_768, dim=2048, num_layers=24, num_heads=16, num_kv_heads=4, ffn_dim=5632,
        max_seq_len=2048,
    ),
    seq_len=512, microbatch=1, accumulation=4, lr=3e-4, dtype="bfloat16",
)  # fmt: skip

MISTRAL_7B = Workload(
    name="mistral-7b",
    summary="the shape of Mistral-7B-v0.3, 7.248 B parameters: the paper's main workload",
    model=ModelConfig(
        vocab_size=32_768, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336,
        max_seq_len=32_768, rope_theta=1_000_000.0,
    ),
    seq_len=512, microbatch=1, accumulation=8, lr=1e-5, dtype="bfloat16",
    activation_checkpointing=True,
)  # fmt: skip

WORKLOADS = {workload.name: workload for workload in (TINY, DECODER_32L, DECODER_1_2B, MISTRAL_7B)}


def find_workload(name: str) -> Workload:
    """Return the workload called `name`.

    Raises:
        SpecError: there is none; the nearest name is offered.
    """
    return WORKLOADS[choose("workload", name, WORKLOADS)]


@functools.cache
def _count(config: ModelConfig) -> tuple[int, int]:
    import torch

    from harness.workload.model import Block, Decoder

    with torch.device("meta"):
        decoder, block = Decoder(config), Block(config)
    return (
        sum(parameter.numel() for parameter in decoder.parameters()),
        sum(parameter.numel() for parameter in block.parameters()),
    )


def num_parameters(workload: Workload) -> int:
    """Count the parameters on the meta device, which allocates none of them."""
    return _count(workload.model)[0]


def memory_needed(
    workload: Workload,
    world_size: int,
    shard_size: int,
    dtype: str,
    *,
    activation_checkpointing: bool = False,
) -> int:
    """Estimate the bytes that `world_size` ranks need together at the peak of an update.

    Per rank, with P parameters of b bytes, Q of them in one block and the rest
    outside all blocks (the root unit):

        b * P / shard_size * 3           sharded weights and AdamW's two moments
      + b * P                            gradients: unsharded while `no_sync` accumulates
        (b * P / shard_size              without accumulation)
      + b * 2 * (P - num_layers * Q + 2 * Q)
                                         gathered at once: root, block and next block, and as
                                         much again to reduce their gradients
      + b * B * T * C-like terms         activations that backward needs, all blocks
        (two blocks and one [B, T, C] per block with activation checkpointing)
      + 12 * B * T * V                   float32 logits, log-softmax and their gradient
      + PROCESS_BYTES                    interpreter and torch

    Device and host are one sum: on CPU they are the same memory. Allocator
    slack is not in it; leave a tenth free. Seen: 6.2 GiB resident on CPU where it says 6.1 GiB
    (4 ranks, 147 million parameters, bfloat16).
    """
    item = ITEM_BYTES[choose("dtype", dtype, ITEM_BYTES)]
    model = workload.model
    total, block = _count(model)
    gradients = total if workload.accumulation > 1 else total // shard_size
    gathered = 2 * (total - (model.num_layers - 2) * block)
    state = item * (3 * total // shard_size + gradients + gathered)
    tokens = workload.microbatch * workload.seq_len
    # Kept by one block per token: 10 of width C (norms, projections, rotary in
    # float32, residuals) and 4 of the feed-forward width.
    per_block = item * tokens * (10 * model.dim + 4 * model.ffn_dim)
    inputs = item * tokens * model.dim * model.num_layers
    activations = (
        inputs + 2 * per_block if activation_checkpointing else per_block * model.num_layers
    )
    logits = 12 * tokens * model.vocab_size
    return world_size * (state + activations + logits + PROCESS_BYTES)
