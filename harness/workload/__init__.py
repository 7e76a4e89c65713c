"""What is trained: the model, its data and how both are laid out over the ranks.

`config`, `presets`, `corpus`, `ledger` and `seeds` can be imported without
torch; `model`, `data` and `hsdp` need it.
"""
