"""The model in its wrapper with its optimizer, and one update of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from harness.workload import wrappers
from harness.workload.data import Loader
from harness.workload.seeds import derive_seed
from harness.workload.training import Given, Training
from strategies import Groups, Layout

COMPILER_BACKEND = "aot_eager"
"""All of the compiler but the code generator, which needs a C++ compiler on the machine."""


class Built(NamedTuple):
    """What one rank trains."""

    model: torch.nn.Module
    """In its wrapper."""
    optimizer: torch.optim.Optimizer
    training: Training


class Update(NamedTuple):
    """What one update did on this rank."""

    loss: Tensor
    """Mean loss of this rank's own samples, a float32 scalar on the device."""
    samples: list[int]
    """Places in the data order that were consumed."""
    tokens: int | None
    """Of these samples; None where the workload counts samples alone."""


def build(
    make: Callable[[Given], Training],
    *,
    layout: Layout,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    seed: int,
    wrapper: str = "fsdp1",
    compiled: bool = False,
) -> Built:
    """Build the wrapped model and its optimizer; a collective of every rank.

    Parameters, gradients and optimizer state have `dtype`. Weights start equal on
    all ranks, since they depend on `seed` alone; the global generators are
    then seeded for this rank, so that dropout differs between ranks. If it is to be `compiled`,
    every unit is, by itself.

    Raises:
        SpecError: the mesh is none for that wrapper.
    """
    chosen = wrappers.find(wrapper)
    chosen.check_layout(layout)
    torch.manual_seed(seed)
    training = make(
        Given(
            device=device,
            dtype=dtype,
            seed=seed,
            rank=layout.rank,
            world_size=layout.world_size,
        )
    )
    training.model.to(dtype)
    units = training.units()  # of the bare model: a wrapper may change what a module looks like
    model = chosen.wrap(training, units, layout=layout, groups=groups, device=device)
    if activation_checkpointing:
        blocks = {id(unit) for unit in units}
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)
    if compiled:
        for unit in units:
            unit.compile(backend=COMPILER_BACKEND, dynamic=False)
    optimizer = training.optimizer(model.parameters())
    # The rank of the layout, never a group's: a contender's group may number its own way.
    torch.manual_seed(derive_seed(seed, "rank", layout.rank))
    return Built(model, optimizer, training)


def train_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    training: Training,
    *,
    wrapper: str = "fsdp1",
    may_commit: Callable[[], bool] = lambda: True,
) -> Update | None:
    """Do one optimizer update and leave no gradient behind.

    Only the last microbatch's backward pass communicates, and brings the
    accumulated gradients of all ranks with it.

    Args:
        model: from `build`.
        optimizer: from `build`.
        loader: of this rank.
        training: from `build`.
        wrapper: as for `build`.
        may_commit: asked when the gradients are complete.

    Returns:
        None if the optimizer has not stepped because it might not.
    """
    chosen = wrappers.find(wrapper)
    losses: list[Tensor] = []
    samples: list[int] = []
    for microbatch in range(training.accumulation):
        last = microbatch == training.accumulation - 1
        batch, places = loader.next_batch()
        samples += places
        with chosen.microbatch(model, last=last):
            loss = training.loss(model, batch)
            (loss / training.accumulation).backward()
        losses.append(loss.detach().float())
    if training.clip_norm is not None:
        chosen.clip_grad_norm(model, training.clip_norm)
    permitted = may_commit()
    if permitted:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not permitted:
        return None
    tokens = None if training.tokens is None else len(samples) * training.tokens
    return Update(torch.stack(losses).mean(), samples, tokens)
