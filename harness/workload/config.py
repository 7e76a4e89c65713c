"""The shape of the decoder."""

from __future__ import annotations

import dataclasses

from harness.spec import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and constants of a `Decoder`."""

    vocab_size: int
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads; each is dim / num_heads wide."""
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    ffn_dim: int
    """Inner width of the SwiGLU feed-forward network."""
    max_seq_len: int
    """Longest sequence, in tokens, that the model accepts."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    """Probability with which an element of a residual branch is dropped in training."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built.

        Raises:
            SpecError: names the field.
        """
        for field in (
            "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len"
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise SpecError(f"{field}: expected at least 1; found {getattr(self, field)}")
        if self.dim % self.num_heads or self.head_dim % 2:
            raise SpecError(
                f"dim: expected an even multiple of num_heads ({self.num_heads}), since rotary "
                f"embeddings turn pairs; found {self.dim}; use {2 * self.num_heads * 16}, say"
            )
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_kv_heads: expected a divisor of num_heads ({self.num_heads}); "
                f"found {self.num_kv_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"dropout: expected at least 0 and less than 1; found {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads
