"""What a workload is to the harness: a model, its optimizer, its data and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from harness.spec import SpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Samples(Protocol):
    """Map-style data: which sample is read when is for the harness to say."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`, the same one every time and on every rank."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a rank knows when it builds its workload."""

    device: torch.device
    """Where it trains."""
    dtype: torch.dtype
    """Of parameters, gradients and optimizer state; inputs are the workload's to convert."""
    seed: int
    """torch's global generators are seeded with it when the function is called."""
    rank: int
    """For logs and caches; the model, its weights and the data are the same on every rank."""
    world_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training job, but for the machine, the ranks and the contender."""

    model: nn.Module
    """Not wrapped, with first values that depend on the seed alone, or on the meta device."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """Makes the optimizer of the wrapped model's parameters."""
    data: Samples
    loss: Callable[[Any, Any], Tensor]
    """(wrapped model, batch on the device) -> mean loss of the batch, a scalar."""
    blocks: tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] = ()
    """Submodules that are sharded one by one: their classes, or a test. The rest is one unit."""
    initialize: Callable[[nn.Module], None] | None = None
    """For a model on the meta device: gives one submodule's own parameters and buffers storage
    and first values, which depend on nothing but the seed and the submodule's name."""
    microbatch: int = 1
    """Samples of one forward pass of one rank."""
    accumulation: int = 1
    """Microbatches of one update; all but the last are backward without communication."""
    clip_norm: float | None = None
    """Largest norm of a replica's gradients; None does not clip."""
    tokens: int | None = None
    """Tokens of one sample; None counts samples."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples -> batch; None for torch's `default_collate`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            SpecError: names the field.
        """
        from torch import nn

        expected = {
            "model": (isinstance(self.model, nn.Module), "a torch.nn.Module"),
            "optimizer": (callable(self.optimizer), "a function of the parameters"),
            "data": (
                hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__"),
                "a map-style dataset, with len and [i]",
            ),
            "loss": (callable(self.loss), "a function of the model and a batch"),
            "blocks": (_are_blocks(self.blocks), "a tuple of module classes or a function"),
            "initialize": (_is_function(self.initialize), "a function of a submodule or None"),
            "microbatch": (_is_count(self.microbatch), "a whole number of at least 1"),
            "accumulation": (_is_count(self.accumulation), "a whole number of at least 1"),
            "clip_norm": (
                self.clip_norm is None or self.clip_norm > 0,
                "a number above 0 or None",
            ),
            "tokens": (
                self.tokens is None or _is_count(self.tokens),
                "a whole number of at least 1 or None",
            ),
            "collate": (_is_function(self.collate), "a function of a list of samples or None"),
        }
        for field, (right, what) in expected.items():
            if not right:
                value = getattr(self, field)
                raise SpecError(f"workload: {field}: expected {what}; found {_shown(value)}")

    @property
    def samples_per_update(self) -> int:
        """Samples that one rank consumes in one update."""
        return self.microbatch * self.accumulation

    def units(self) -> list[nn.Module]:
        """Return the submodules that are to be sharded one by one, the inner before the outer."""
        inner = [each for each in self.model.modules() if each is not self.model][::-1]
        if isinstance(self.blocks, tuple):
            return [each for each in inner if isinstance(each, self.blocks)]
        return [each for each in inner if self.blocks(each)]


def _are_blocks(value: Any) -> bool:
    from torch import nn

    if not isinstance(value, tuple):
        return _is_function(value) and value is not None
    return all(isinstance(each, type) and issubclass(each, nn.Module) for each in value)


def _is_function(value: object) -> bool:
    return value is None or (callable(value) and not isinstance(value, type))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _shown(value: object) -> str:
    """The value where it is short, else its type."""
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
