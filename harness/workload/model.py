"""A causal decoder: RMSNorm, rotary grouped-query attention, SwiGLU.

Shapes are named B (sequences), T (tokens), H and K (query and key heads),
D (width of a head), C (width of the residual stream) and V (vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  torch's own habit
from torch import Tensor, nn

from harness.workload.config import ModelConfig
from harness.workload.seeds import derive_seed

__all__ = ["Block", "Decoder", "ModelConfig", "initializer", "next_token_loss"]

INIT_STD = 0.02


def rotary_table(num_tokens: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return cosines and sines of every position, float32 [2, T, D / 2].

    Computed in every forward pass rather than kept: a buffer would follow the
    parameters into bfloat16, in which positions beyond 256 are no longer
    distinct, and would have to be materialised apart from them.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + D / 2) of `x` [B, H, T, D] by its positions' angles."""
    cos, sin = table
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the projections; queries, keys and values come from one matrix."""
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv = nn.Linear(config.dim, sum(self.num_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split(self.num_heads, dim=1)
        mixed = F.scaled_dot_product_attention(
            rotate(query, table), rotate(key, table), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the projections; gate and up are halves of one matrix."""
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer, and one FSDP unit: both branches normalise first and add to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        """Create both branches."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), table))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):
    """Embedding, `num_layers` blocks, norm and an output head of its own (untied)."""

    def __init__(self, config: ModelConfig) -> None:
        """Create the layers on the current default device; `meta` gives shapes alone."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the token after each of `tokens` [B, T] (int64).

        Raises:
            ValueError: more tokens than `max_seq_len`.
        """
        num_tokens, config = tokens.shape[1], self.config
        if num_tokens > config.max_seq_len:
            raise ValueError(
                f"tokens: expected at most max_seq_len = {config.max_seq_len} a sequence; "
                f"found {num_tokens}; cut the sequences"
            )
        table = rotary_table(num_tokens, config.head_dim, config.rope_theta, tokens.device)
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))

    def materialize(self, device: torch.device) -> Decoder:
        """Give every parameter storage on `device` and its first values; return self."""
        initialize = initializer(self, device)
        for module in self.modules():
            initialize(module)
        return self


def initializer(model: Decoder, device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that gives one submodule of `model` storage and first values.

    The values depend on torch's global seed (as it is now) and on the
    submodule's name, not on the order of the calls: FSDP materialises its
    innermost units first, a plain model goes from the top.
    """
    seed = torch.initial_seed()
    names = {id(module): name for name, module in model.named_modules()}
    # Branch outputs start smaller, so that the stream's variance does not grow with depth.
    branch_std = INIT_STD / math.sqrt(2 * model.config.num_layers)

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        if next(module.parameters(recurse=False), None) is None:
            return
        name = names[id(module)]
        module.to_empty(device=device, recurse=False)
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()
            return
        std = branch_std if name.endswith((".out", ".down")) else INIT_STD
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "weights", name))
        for parameter in module.parameters(recurse=False):
            parameter.normal_(0.0, std, generator=generator)

    typed: Callable[[nn.Module], None] = initialize
    return typed


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, a float32 scalar.

    Args:
        logits: [B, T, V], any floating dtype; the softmax is taken in float32.
        targets: [B, T], int64; the token that follows each position.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
