"""The decoder: its parameters, what its logits depend on, and that it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.spec import SpecError
from harness.workload.model import (
    Attention,
    Decoder,
    ModelConfig,
    next_token_loss,
    rotary_table,
    rotate,
)
from harness.workload.presets import find_workload, num_parameters

CPU = torch.device("cpu")
SMALL = ModelConfig(
    vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16
)


def make(config: ModelConfig = SMALL, *, seed: int = 0) -> Decoder:
    """Build a decoder the way FSDP does: shapes first, values from the seed."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        decoder = Decoder(config)
    return decoder.materialize(CPU)


def some_tokens(num_sequences: int = 3, num_tokens: int = 16) -> Tensor:
    """Return random tokens of the small vocabulary."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, SMALL.vocab_size, (num_sequences, num_tokens), generator=generator)


class TestParameters:
    """Counts and first values."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("tiny", 529_248),
            ("decoder-32l", 1_609_792),
            ("decoder-1.2b", 1_216_448_512),
            ("mistral-7b", 7_248_023_552),
        ],
    )
    def test_counts(self, name: str, expected: int) -> None:
        """Each preset has exactly the parameters it says."""
        assert expected == num_parameters(find_workload(name))

    def test_count_by_hand(self) -> None:
        """The count is the sum of the matrices and norms of the textbook decoder."""
        block = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32

        assert 2 * 61 * 32 + 2 * block + 32 == sum(p.numel() for p in make().parameters())

    def test_same_seed_same_weights(self) -> None:
        """Weights are a function of the seed."""
        one, two = make(seed=1).state_dict(), make(seed=1).state_dict()

        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_other_seed_other_weights(self) -> None:
        """Another seed changes every matrix."""
        one, two = make(seed=1).state_dict(), make(seed=2).state_dict()

        assert not any(torch.equal(one[name], two[name]) for name in one if "norm" not in name)

    def test_order_of_materialization(self) -> None:
        """FSDP reaches blocks before the root; the values do not depend on that."""
        from harness.workload.model import initializer

        torch.manual_seed(0)
        with torch.device("meta"):
            backwards = Decoder(SMALL)
        initialize = initializer(backwards, CPU)
        for module in reversed(list(backwards.modules())):
            initialize(module)
        forwards = make().state_dict()

        assert all(
            torch.equal(value, forwards[name]) for name, value in backwards.state_dict().items()
        )

    def test_scale(self) -> None:
        """Matrices start at 0.02, those that end a branch at 0.02 / sqrt(2 L), norms at 1."""
        config = dataclasses.replace(SMALL, dim=128, ffn_dim=256, num_layers=8)
        state = make(config).state_dict()

        assert state["blocks.0.attention.qkv.weight"].std() == pytest.approx(0.02, rel=0.05)
        assert state["blocks.0.ffn.down.weight"].std() == pytest.approx(0.005, rel=0.05)
        assert state["blocks.7.attention.out.weight"].std() == pytest.approx(0.005, rel=0.05)
        assert torch.equal(torch.ones(128), state["norm.weight"])

    def test_no_buffers(self) -> None:
        """Rotary tables are no state: nothing follows the weights into bfloat16."""
        assert not list(make().buffers())

    def test_materializing_leaves_global_random_state(self) -> None:
        """Weights are drawn from generators of their own."""
        torch.manual_seed(0)
        with torch.device("meta"):
            decoder = Decoder(SMALL)
        before = torch.get_rng_state()
        decoder.materialize(CPU)

        assert torch.equal(before, torch.get_rng_state())


class TestForward:
    """What the logits depend on."""

    def test_causal(self) -> None:
        """A token changes its own and later logits, and no earlier ones."""
        decoder, tokens = make(), some_tokens()
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocab_size
        with torch.no_grad():
            before, after = decoder(tokens), decoder(changed)

        assert torch.equal(before[:, :9], after[:, :9])
        assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()

    def test_rows_are_independent(self) -> None:
        """A sequence's logits do not depend on its neighbours in the batch."""
        decoder, tokens = make(), some_tokens()
        with torch.no_grad():
            together, alone = decoder(tokens), decoder(tokens[1:2])

        torch.testing.assert_close(alone[0], together[1])

    def test_positions_matter(self) -> None:
        """Without positions, swapping two past tokens would not change the last logits."""
        decoder = make(dataclasses.replace(SMALL, num_layers=1))
        with torch.no_grad():
            one = decoder(torch.tensor([[7, 8, 9]]))
            two = decoder(torch.tensor([[8, 7, 9]]))

        assert (one[0, -1] - two[0, -1]).abs().max() > 1e-7

    def test_too_many_tokens(self) -> None:
        """Sequences longer than the model's are refused by name and number."""
        with pytest.raises(ValueError, match=r"max_seq_len = 16 a sequence; found 17"):
            make()(some_tokens(num_tokens=17))

    def test_dropout_uses_the_global_generator(self) -> None:
        """In training equal seeds give equal logits and others do not; in eval none matter."""
        decoder, tokens = make(dataclasses.replace(SMALL, dropout=0.3)), some_tokens()
        logits = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            logits.append(decoder(tokens))
        decoder.eval()

        assert torch.equal(logits[0], logits[1])
        assert not torch.equal(logits[0], logits[2])
        assert torch.equal(decoder(tokens), decoder(tokens))

    def test_bfloat16_follows_float32(self) -> None:
        """A bfloat16 model computes what the float32 one does, to bfloat16's precision."""
        tokens = some_tokens()
        with torch.no_grad():
            exact = make()(tokens)
            rounded = make().to(torch.bfloat16)(tokens)

        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


class TestRotary:
    """Rotary position embedding."""

    def test_keeps_length(self) -> None:
        """Rotation preserves the norm of every pair."""
        x = torch.randn(2, 3, 16, 8)
        turned = rotate(x, rotary_table(16, 8, 10_000.0, CPU))

        torch.testing.assert_close(
            x.unflatten(-1, (2, 4)).norm(dim=-2), turned.unflatten(-1, (2, 4)).norm(dim=-2)
        )

    def test_first_position_is_untouched(self) -> None:
        """Position 0 is the identity."""
        x = torch.randn(1, 1, 4, 8)

        assert torch.equal(x[:, :, 0], rotate(x, rotary_table(4, 8, 10_000.0, CPU))[:, :, 0])

    def test_products_depend_on_distance_alone(self) -> None:
        """The same query and key score the same wherever they stand equally far apart."""
        query, key = torch.randn(8).expand(1, 1, 12, 8), torch.randn(8).expand(1, 1, 12, 8)
        table = rotary_table(12, 8, 100.0, CPU)
        scores = (rotate(query, table) @ rotate(key, table).mT)[0, 0]

        torch.testing.assert_close(scores[2, 0].expand(10), scores.diagonal(-2))
        assert (scores[2, 0] - scores[3, 0]).abs() > 1e-3

    def test_angles(self) -> None:
        """Pair i of position p is turned by p * theta ** (-2 i / D)."""
        cos, sin = rotary_table(400, 4, 100.0, CPU)

        torch.testing.assert_close(torch.tensor([399.0, 39.9]).cos(), cos[399])
        torch.testing.assert_close(torch.tensor([399.0, 39.9]).sin(), sin[399])

    def test_bfloat16_queries_keep_float32_angles(self) -> None:
        """Late positions are turned as exactly as early ones; bfloat16 tables would be lost."""
        x, table = torch.randn(1, 1, 300, 8), rotary_table(300, 8, 100.0, CPU)
        exact, rounded = rotate(x.bfloat16().float(), table), rotate(x.bfloat16(), table)

        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(exact.bfloat16(), rounded, rtol=0, atol=0)


class TestGroupedQueries:
    """Key and value heads that serve several query heads."""

    def test_equals_repeated_heads(self) -> None:
        """Grouped attention is multi-head attention with each key and value head repeated."""
        grouped = Attention(SMALL)
        full = Attention(dataclasses.replace(SMALL, num_kv_heads=4))
        query, key, value = grouped.qkv.weight.detach().split((32, 16, 16))
        repeated = [
            weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
            for weight in (key, value)
        ]
        full.qkv.weight = nn.Parameter(torch.cat([query, *repeated]))
        full.out.weight = grouped.out.weight
        x, table = torch.randn(2, 16, 32), rotary_table(16, 8, 10_000.0, CPU)

        torch.testing.assert_close(full(x, table), grouped(x, table))

    def test_equals_attention_by_hand(self) -> None:
        """Scores over sqrt(D), masked above the diagonal, weights times values."""
        attention = Attention(dataclasses.replace(SMALL, num_kv_heads=4))
        x, table = torch.randn(1, 6, 32), rotary_table(6, 8, 10_000.0, CPU)
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1)
        )
        scores = rotate(query, table) @ rotate(key, table).mT / 8**0.5
        hidden = torch.ones(6, 6).triu(1).bool()
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

        torch.testing.assert_close(
            attention.out(mixed.transpose(1, 2).flatten(2)), attention(x, table)
        )


class TestLearning:
    """Loss and gradients."""

    def test_loss_is_cross_entropy(self) -> None:
        """Mean of -log softmax at the target, in float32 whatever the logits are."""
        logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
        by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()

        torch.testing.assert_close(by_hand, next_token_loss(logits, targets))
        assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32

    def test_loss_starts_at_chance(self) -> None:
        """An untrained model knows nothing: log V nats."""
        tokens = some_tokens()
        loss = next_token_loss(make()(tokens[:, :-1]), tokens[:, 1:])

        assert float(torch.tensor(61.0).log()) == pytest.approx(float(loss.detach()), abs=0.05)

    def test_every_parameter_gets_a_gradient(self) -> None:
        """Nothing is left out of the graph."""
        decoder, tokens = make(), some_tokens()
        next_token_loss(decoder(tokens[:, :-1]), tokens[:, 1:]).backward()

        assert not [
            name
            for name, parameter in decoder.named_parameters()
            if parameter.grad is None or not parameter.grad.abs().sum() > 0
        ]

    def test_learns_a_repeated_batch(self) -> None:
        """Thirty steps on one batch bring the loss from log V to less than half."""
        decoder, tokens = make(), some_tokens()
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
        for _ in range(30):
            loss = next_token_loss(decoder(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        assert float(loss.detach()) < 2.0


class TestConfig:
    """Shapes that cannot be built."""

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("num_layers", 0, "num_layers: expected at least 1; found 0"),
            ("dim", 30, "dim: expected an even multiple of num_heads"),
            ("dim", 36, "dim: expected an even multiple of num_heads"),
            ("num_kv_heads", 3, "num_kv_heads: expected a divisor of num_heads"),
            ("dropout", 1.0, "dropout: expected at least 0 and less than 1"),
        ],
    )
    def test_refused(self, field: str, value: Any, message: str) -> None:
        """The field is named."""
        with pytest.raises(SpecError, match=message):
            dataclasses.replace(SMALL, **{field: value})
