"""What a workload of the user's own is refused for, one function each; and what is seen in one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

import accelpact
from harness.spec import Spec, SpecError
from harness.workload.data import check_size

if TYPE_CHECKING:
    from types import TracebackType

    from harness.workload.training import Training


def model(training: Training) -> None:
    """Refuse a model with nothing to train, or that nothing gives its values.

    Raises:
        SpecError: says which.
    """
    if not any(each.requires_grad for each in training.model.parameters()):
        count = sum(1 for _ in training.model.parameters())
        raise SpecError(
            "workload: model: expected parameters that require gradients; found "
            + (f"{count} that do not" if count else "a model without parameters")
        )
    if training.initialize is None:
        on_meta = [name for name, each in _tensors(training.model) if each.is_meta]
        if on_meta:
            raise SpecError(
                f"workload: initialize: expected a function, since {on_meta[0]} is on the meta "
                "device; found None"
            )


def materialized(built: nn.Module) -> None:
    """Refuse a model of which something was left on the meta device.

    Raises:
        SpecError: names it.
    """
    for name, each in _tensors(built):
        if each.is_meta:
            raise SpecError(
                f"workload: initialize: expected it to give every parameter and buffer storage; "
                f"found {name} still on the meta device"
            )


def units(training: Training, spec: Spec) -> None:
    """Refuse blocks that are not there, and parameters that cannot be sharded.

    Raises:
        SpecError: names what it is.
    """
    if training.blocks and not training.units():
        raise SpecError(
            "workload: blocks: expected submodules of these classes in the model; found none"
        )
    if spec.activation_checkpointing and not training.units():
        raise SpecError(
            "activation-checkpointing: expected blocks, whose activations are recomputed; found a "
            "workload without any"
        )
    if spec.compiled and not training.units():
        raise SpecError(
            "compiled: expected blocks, which are compiled one by one; found a workload without any"
        )
    if spec.wrapper == "ddp":
        return
    names = {id(each): name for name, each in training.model.named_parameters()}
    for parameter, owned_by in owners(training):
        name = names[id(parameter)]
        if len(owned_by) > 1:
            raise SpecError(
                f"workload: blocks: expected every parameter in one block, or in none; found "
                f"{name} shared between two, which {spec.wrapper} cannot shard"
            )
        if parameter.ndim == 0:
            raise SpecError(
                f"workload: model: expected parameters with a dimension to shard for "
                f"{spec.wrapper}; found {name} without one; give it the shape (1,)"
            )


def owners(training: Training) -> list[tuple[nn.Parameter, list[int]]]:
    """Return every parameter with the ids of the units that hold it; the model itself is one."""
    blocks = {id(unit) for unit in training.units()}
    parameters: dict[int, nn.Parameter] = {}
    found: dict[int, list[int]] = {}
    left = [(training.model, id(training.model))]
    while left:
        module, unit = left.pop()
        for parameter in module.parameters(recurse=False):
            parameters[id(parameter)] = parameter
            if unit not in found.setdefault(id(parameter), []):
                found[id(parameter)].append(unit)
        left += [(child, id(child) if id(child) in blocks else unit) for child in module.children()]
    return [(parameters[key], unit_ids) for key, unit_ids in found.items()]


def data(training: Training, world_size: int) -> None:
    """Refuse data that has no length, or too little of it.

    Raises:
        SpecError: says what was found.
    """
    try:
        size = len(training.data)
    except TypeError as error:
        raise SpecError(f"workload: data: expected a length; found that {error}") from None
    check_size(size, microbatch=training.microbatch, world_size=world_size)


def optimizer(made: object, built: nn.Module) -> None:
    """Refuse what is no optimizer of this model.

    Raises:
        SpecError: says what it is.
    """
    if not isinstance(made, torch.optim.Optimizer):
        raise SpecError(
            f"workload: optimizer: expected the function to return a torch.optim.Optimizer; found "
            f"{type(made).__name__}"
        )
    own = {id(each) for each in built.parameters()}
    foreign = [
        each for group in made.param_groups for each in group["params"] if id(each) not in own
    ]
    if foreign:
        raise SpecError(
            "workload: optimizer: expected the parameters that the function is called with; found "
            f"{len(foreign)} others; a wrapper replaces the model's own"
        )


def loss(found: Any) -> None:
    """Refuse a loss that cannot be trained with.

    Raises:
        SpecError: says what it is.
    """
    if not isinstance(found, Tensor):
        what = type(found).__name__
    elif found.ndim != 0:
        what = f"a tensor of shape {tuple(found.shape)}"
    elif not found.is_floating_point():
        what = f"a scalar of {found.dtype}"
    elif not found.requires_grad:
        what = "one that no parameter leads to"
    elif not torch.isfinite(found):
        what = f"{found.item()}"
    else:
        return
    raise SpecError(
        f"workload: loss: expected a finite floating-point scalar with a gradient; found {what}"
    )


def gradients(built: nn.Module, spec: Spec, calls: Calls) -> None:
    """Refuse what the wrapper or the planned faults cannot do with this model.

    Raises:
        SpecError: names it.
    """
    unused = [
        name for name, each in built.named_parameters() if each.requires_grad and each.grad is None
    ]
    if unused and spec.wrapper == "ddp":
        raise SpecError(
            f"workload: model: expected every trained parameter to take part in the loss, since "
            f"ddp waits for its gradient; found that {unused[0]} does not; freeze it"
        )
    inside = [each for each in spec.schedule.faults if each.phase in ("forward", "backward")]
    if inside and calls.middle() is None:
        raise SpecError(
            f"fault: expected one at a boundary, since no submodule of this model that holds "
            f"parameters gives one tensor once per batch; found {inside[0]}"
        )


@final
class Calls:
    """Counts the calls of those submodules that hold parameters and no other module."""

    def __init__(self, built: nn.Module, *, without: Sequence[nn.Module] = ()) -> None:
        """Watch `built`, but for what is in `without`, in the body of the statement."""
        left_out = {id(inner) for module in without for inner in module.modules()}
        self._names = [
            (name, module)
            for name, module in built.named_modules()
            if id(module) not in left_out
            and not any(module.children())
            and any(True for _ in module.parameters(recurse=False))
        ]
        self._counts: dict[int, int] = {}

    def __enter__(self) -> Calls:
        self._handles = [each.register_forward_hook(self._count) for _, each in self._names]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def middle(self) -> str | None:
        """Name of the module in the middle, of those that gave one tensor with a gradient, once."""
        once = [name for name, module in self._names if self._counts.get(id(module)) == 1]
        return once[len(once) // 2] if once else None

    def _count(self, module: nn.Module, _inputs: object, output: object) -> None:
        usable = isinstance(output, Tensor) and output.requires_grad
        self._counts[id(module)] = self._counts.get(id(module), 0) + (1 if usable else 2)


def fingerprint(sample: Any) -> str:
    """Return a digest of a sample: of tensors and arrays their bits, of all else what it says."""
    return digest_of(_parts(sample))


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 of `parts`, in their order."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:{part}".encode())
    return whole.hexdigest()


def _parts(value: Any) -> Iterable[str]:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        yield f"{kind} {accelpact.tree_digest({'': value.detach()}).root}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{kind} {key!r}"
            yield from _parts(each)
    elif isinstance(value, (list, tuple)):
        yield f"{kind} {len(value)}"
        for each in value:
            yield from _parts(each)
    else:
        yield f"{kind} {hashlib.sha256(pickle.dumps(value)).hexdigest()}"


def _tensors(built: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from built.named_parameters()
    yield from built.named_buffers()
