"""What an update would have to be rewound to: random states, the loader's position, the frontier.

Taken at every committed boundary, so it must be cheap: a few kilobytes, no collective, no wait for
a device, and no random number drawn. Weights and optimizer state are not part of it; they change
only in the optimizer's step, which is what commits. Of buffers, those that forward passes change
(running means and the like) are.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import importlib
import random
import sys
from typing import Any, Protocol

import torch

from accelpact._buffers import BufferCopies, Buffers

_MT19937_BYTES = 2500
"""Size of numpy's `mt19937_state`: 624 words and a position (numpy 1.17 to 2.4)."""


class Loader(Protocol):
    """Whatever hands out a job's data and can say and be told where it is."""

    def state_dict(self) -> Any:
        """Return where it is; small, since it is asked after every update."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Go to where `state_dict` was taken."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Capture:
    """The states of one rank at one committed boundary; none of them changes any more."""

    frontier: int
    """Last committed update then."""
    cpu: torch.Tensor
    """State of torch's CPU generator."""
    device: tuple[int, torch.Tensor] | None
    """The current CUDA device and its generator's state, if CUDA was in use."""
    python: tuple[Any, ...]
    """State of the module `random`."""
    numpy: Any
    """State of numpy's global generator, or None if numpy was not imported."""
    loader: Any
    """What the loader's `state_dict` gave, or None without a loader."""
    source: Loader | None = dataclasses.field(repr=False)
    """The loader."""
    buffers: BufferCopies | None = None
    """Those of the model's buffers that updates change."""

    def restore(self) -> None:
        """Put random states, buffers and the loader back; as often as one likes.

        Raises:
            Rejected: `reject_uncommitted_boundary`, if a buffer that no update has changed before
                was changed since.
        """
        if self.buffers is not None:
            self.buffers.restore()
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            number, state = self.device
            torch.cuda.set_rng_state(state, number)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        if self.source is not None:
            self.source.load_state_dict(copy.deepcopy(self.loader))


class Capturing:
    """Takes the captures of one rank."""

    def __init__(self, loader: Loader | None = None, model: torch.nn.Module | None = None) -> None:
        """Take the loader's state and the model's buffers with the rest, if there are any.

        Raises:
            TypeError: `loader` cannot say where it is, or cannot be told.
        """
        lacks = [
            name
            for name in ("state_dict", "load_state_dict")
            if loader is not None and not callable(getattr(loader, name, None))
        ]
        if lacks:
            raise TypeError(
                "loader: expected an object with state_dict() and load_state_dict(); "
                f"found a {type(loader).__name__} without {' and '.join(lacks)}"
            )
        self._loader = loader
        self._numpy = _Numpy()
        self._buffers = Buffers(model) if model is not None else None

    def take(self, frontier: int) -> Capture:
        """Capture the boundary after update `frontier`."""
        device = None
        if torch.cuda.is_initialized():
            number = torch.cuda.current_device()
            device = number, torch.cuda.get_rng_state(number)
        return Capture(
            frontier=frontier,
            cpu=torch.get_rng_state(),
            device=device,
            python=random.getstate(),
            numpy=self._numpy.state(),
            # A dictionary that the loader goes on changing would be of another boundary.
            loader=None if self._loader is None else copy.deepcopy(self._loader.state_dict()),
            source=self._loader,
            buffers=None if self._buffers is None else self._buffers.copy(frontier),
        )


class _Numpy:
    """Reads numpy's global generator, and only if it has moved.

    `get_state` takes 35 us, which is more than all the rest. So it is asked only when the
    generator's own memory, whose address numpy publishes, has changed. A normal deviate that waits
    to be handed out is not in that memory: while there is one, the state is always read.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = None

    def state(self) -> Any:
        """Return the state, which nobody changes; None if numpy was not imported."""
        if "numpy" not in sys.modules:
            return None
        # Numpy 2 imports it at its first use, and only then would there be a state to capture.
        numpy = sys.modules.get("numpy.random") or importlib.import_module("numpy.random")
        memory = _memory(numpy)
        if not memory or memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, numpy.get_state(legacy=False)
        return self._state


def _memory(numpy: Any) -> bytes:
    """Return the memory of the global generator; empty if it is not the kind that is known."""
    if not hasattr(numpy, "get_bit_generator"):  # numpy 1.24
        return b""
    generator = numpy.get_bit_generator()
    if type(generator) is not numpy.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
