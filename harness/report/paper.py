"""The published figures that a report sets beside its own.

Source of all: *Zero-I/O Fault Recovery for Sharded Deep Learning via Dynamic
Framework Dependency Rebinding*, arXiv:2609.18178v1. Figures are the tables'
where text and tables disagree.
"""

from __future__ import annotations

import dataclasses

SOURCE = "arXiv:2609.18178v1"

MACRO = "16 GPUs (4x4), Mistral-7B-v0.3, 25 updates, checkpoint at 10, fault after 15, 3 blocks"
SCALING = "32-layer decoder, NCCL, slowest rank, mean of 5 trials"
TORCHFT = "4 GPUs, PyTorch 2.11, NCCL 2.28.9, 32 layers, mean of 3 jobs"
ABLATION = "32-layer Mistral-7B, per rank: L + 1 references"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published figure with its conditions."""

    value: str
    conditions: str
    place: str
    """Table or section of `SOURCE`."""


WHOLE_RUN_OVER = {
    "cold": Published(value="1.197 (1.184 to 1.208)", conditions=MACRO, place="Table III"),
    "nvrx": Published(value="1.194 (1.187 to 1.197)", conditions=MACRO, place="Table III"),
}
"""Rival -> paired median of its whole run over AccelPact's, with the smallest and largest."""

REPAIR_MACRO_S = Published(value="0.672 to 0.930", conditions=MACRO, place="Table III")

REPAIR_TOTAL_MS: dict[int, Published] = {
    4: Published(value="624.55", conditions=f"4 ranks (2x2), {SCALING}", place="Table V"),
    8: Published(value="686.72", conditions=f"8 ranks (4x2), {SCALING}", place="Table V"),
    16: Published(value="693.91", conditions=f"16 ranks (4x4), {SCALING}", place="Table V"),
}
"""Number of ranks -> total of the repair stages, ms."""

TORCHFT_REPAIR_S = Published(value="0.682", conditions=TORCHFT, place="Table VIII")
TORCHFT_NEXT_UPDATE_S = Published(value="12.896", conditions=TORCHFT, place="Table VIII")
STALE_REFERENCES = Published(value="33", conditions=ABLATION, place="causal ablation")

POLICIES_PLACE = "Table II"
POLICIES_CONDITIONS = (
    "two-rank DDP at a boundary, 4 trials a cell, valid and replayed on an A100 and on a 910B"
)
POLICIES = {
    "no recovery": "A100 0/4; 910B 0/4",
    "always L1": "A100 4/4, 0 replayed; 910B 0/4",
    "always L2": "A100 4/4, 32 replayed; 910B 4/4, 32 replayed",
    "qualified": "A100 L1 4/4, 0 replayed; 910B L2 4/4, 32 replayed",
}
"""Policy -> what became of it on each stack."""

CHECKPOINTS_PLACE = "Table I"
CHECKPOINTS = (
    "1.216 B parameters, 4 GPUs, PyTorch 2.11.0, native DCP, local NVMe, a checkpoint at every "
    "update"
)
CHECKPOINT_MODES = (
    ("none", "1.024", "-", "-", "9.07", "0.00"),
    ("sync", "9.960", "+870.8", "+5.46", "17.99", "2.64"),
    ("async-thread", "11.734", "+1043.5", "+240.75", "31.48", "2.30"),
    ("async-process", "12.212", "+1090.2", "+240.48", "29.60", "2.17"),
    ("async-cached", "7.747", "+656.7", "+17.96", "32.52", "3.39"),
)
"""Mode, seconds per step, overhead %, forward and backward %, host PSS GiB, written TB/h."""
