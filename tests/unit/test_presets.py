"""The registry of workloads and the memory they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from harness.spec import SpecError
from harness.workload.model import Block, Decoder, ModelConfig
from harness.workload.presets import (
    PROCESS_BYTES,
    WORKLOADS,
    find_workload,
    memory_needed,
    num_parameters,
)

SMALL_VOCABULARY = ModelConfig(
    vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=4096
)


class TestPresets:
    """The registry of workloads."""

    def test_names(self) -> None:
        """Every workload is registered under its own name, with one line for people."""
        assert {name: name for name in WORKLOADS} == {
            name: workload.name for name, workload in WORKLOADS.items()
        }
        assert all(w.summary and "\n" not in w.summary for w in WORKLOADS.values())

    def test_unknown(self) -> None:
        """A wrong name is answered with the nearest one."""
        with pytest.raises(SpecError, match=r"workload: expected .*did you mean 'tiny'"):
            find_workload("tinny")

    def test_decoder_32l_has_33_units(self) -> None:
        """One unit per block and the root: the paper's 33 references."""
        with torch.device("meta"):
            decoder = Decoder(find_workload("decoder-32l").model)

        assert 32 == sum(isinstance(module, Block) for module in decoder.modules())

    def test_mistral_batch(self) -> None:
        """16 ranks consume the paper's 65,536 tokens in an update."""
        assert 65_536 == 16 * find_workload("mistral-7b").tokens_per_update

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("accumulation", 0, "accumulation: expected at least 1; found 0"),
            ("seq_len", 4096, "seq_len: expected at most the model's"),
            ("dtype", "float16", "dtype: expected one of"),
            ("lr", 0.0, "lr and clip_norm: expected more than 0"),
            (
                "model",
                SMALL_VOCABULARY,
                "vocab_size: expected at least 256",
            ),
        ],
    )
    def test_refused(self, field: str, value: Any, message: str) -> None:
        """The field is named."""
        with pytest.raises(SpecError, match=message):
            dataclasses.replace(find_workload("tiny"), **{field: value})


class TestMemory:
    """The estimate that decides whether a workload fits."""

    def test_mistral_state(self) -> None:
        """The paper's 16 GPUs: 10.9 GB of state, 14.5 GB of unsharded gradients, and more."""
        per_rank = (
            memory_needed(
                find_workload("mistral-7b"), 16, 4, "bfloat16", activation_checkpointing=True
            )
            / 16
            - PROCESS_BYTES
        )

        assert 25.4e9 < per_rank < 31.0 * 2**30

    def test_grows_with_ranks_and_dtype(self) -> None:
        """More ranks need more, wider dtypes need more, more shards need less per rank."""
        mistral = find_workload("mistral-7b")
        base = memory_needed(mistral, 4, 2, "bfloat16")

        assert 2 * base == memory_needed(mistral, 8, 2, "bfloat16")
        assert base < memory_needed(mistral, 4, 2, "float32")
        assert base > memory_needed(mistral, 4, 4, "bfloat16")
        assert base > memory_needed(mistral, 4, 2, "bfloat16", activation_checkpointing=True)

    def test_unknown_dtype(self) -> None:
        """A dtype that is not offered is refused."""
        with pytest.raises(SpecError, match="dtype: expected one of"):
            memory_needed(find_workload("tiny"), 4, 2, "float16")

    def test_no_accumulation_no_unsharded_gradients(self) -> None:
        """Without accumulation the gradients are sharded as they come."""
        mistral = find_workload("mistral-7b")
        single = dataclasses.replace(mistral, accumulation=1)
        saved = memory_needed(mistral, 2, 2, "bfloat16") - memory_needed(single, 2, 2, "bfloat16")

        assert num_parameters(mistral) * 2 == pytest.approx(saved, rel=1e-6)
