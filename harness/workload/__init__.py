"""What is trained: the model, its data and how both are laid out over the ranks.

`training`, `own`, `config`, `presets`, `corpus`, `ledger` and `seeds` can be imported without
torch; `model`, `decoder`, `data`, `hsdp` and `preflight` need it.
"""

from harness.workload.training import Given, Samples, Training

__all__ = ["Given", "Samples", "Training"]
