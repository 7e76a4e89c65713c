"""S_app: what must survive a failure (the paper, section III), and how it is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of `optimizer`, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def application_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cursor: int,
    frontier: int,
) -> Mapping[str, torch.Tensor | int]:
    """Return this rank's S_app = {W, M, V, S_RNG, kappa, F, tau_opt} by name, without copies.

    Weights and optimizer state are this rank's shards, on their own device; buffers, such as the
    running statistics of batch normalization, are its own and count as weights. A
    parameter that has no optimizer state yet contributes none, so that a moment
    that went missing changes the set of names. The optimizer's step counters are
    among its state.

    Args:
        model: the wrapped model.
        optimizer: its optimizer.
        cursor: samples that this rank has consumed.
        frontier: last committed update.
    """
    state: dict[str, torch.Tensor | int] = {"cursor": cursor, "frontier": frontier}
    for name, parameter in model.named_parameters():
        path = clean_name(name)
        state[f"weight/{path}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (torch.Tensor, int)):
                state[f"{key}/{path}"] = value
    for name, buffer in model.named_buffers():
        state[f"buffer/{clean_name(name)}"] = buffer.detach()
    state["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    return state
