"""The one line in a training script: `accelpact.attach`."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelpact import _frameworks
from accelpact._pact import Pact
from accelpact._settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import Store

    from accelpact._boundary import Boundary
    from accelpact._capture import Loader
    from accelpact._frameworks import Framework


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    store: Callable[[], Store] | None = None,
    prefix: str | None = None,
    frontier: int = 0,
    frameworks: Sequence[Framework] = _frameworks.ALL,
    boundary: Boundary | None = None,
    loader: Loader | None = None,
    on_abort: Callable[[str], None] | None = None,
    **settings: Any,
) -> Pact:
    """Protect a job at its committed boundaries. Every rank calls this once, all meet in it.

    Call it after wrapping the model and before its first forward pass: a compiled model takes no
    notice of hooks that come later.

    Args:
        model: the wrapped model (FSDP, `fully_shard`, DDP).
        optimizer: its optimizer; `step` gets hooks, nothing else changes.
        store: gives a new client of a store that outlives every rank; by
            default the launcher's, at MASTER_ADDR and MASTER_PORT.
        prefix: separates this start of this job from others in that store; by
            default the launcher's run id and restart count.
        frontier: last update that is committed already, after a restore.
        frameworks: what knows the private parts of the model.
        boundary: where this rank is, if hooks keep that already; the model gets no hook then.
        loader: what hands out the data, if its position is to be captured with the random states.
        on_abort: called with the reason just before this process is ended
            because a repair of its peers failed.
        settings: see `Settings`.

    Raises:
        Rejected: `reject_deadline`, if not every rank comes within `deadline`;
            `reject_unsupported`, if a communication hook keeps a group that could only be rebuilt,
            or a backend, or a setting of NCCL's, is one that no failure could be survived with.
        TypeError: `loader` cannot say where it is, or cannot be told.
        ValueError: a setting is out of its range.
    """
    # FSDP1's constructor leaves its arguments, the groups among them, in reference cycles. What
    # holds a retired group keeps its threads and sockets, until the collector happens to come by.
    gc.collect()
    pact = Pact(
        model,
        optimizer,
        store=store or _launcher_store,
        prefix=prefix or _launcher_prefix(),
        settings=Settings(**settings),
        frameworks=frameworks,
        boundary=boundary,
        loader=loader,
        on_abort=on_abort or (lambda _: None),
    )
    pact.open(frontier)
    return pact


def _launcher_store() -> Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
    )


def _launcher_prefix() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    return f"accelpact/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
