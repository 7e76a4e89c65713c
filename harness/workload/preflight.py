"""Tries a workload of the user's own, in processes of its own, before any rank is started.

Verdicts rest on equal bits. So two processes (hashes of strings differ between them) build what the
first and the last rank would build, and one of them does so twice, since some contenders restart
within their process. Every build is compared with the first: weights, buffers and the samples that
are read first; then the weights after one microbatch and one step of the optimizer.

Usage: python -m harness.workload.preflight SPEC RANK, with the specification as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from harness.processes import die_with_parent
from harness.spec import Own, Spec, SpecError
from harness.workload import own as users

if TYPE_CHECKING:
    import torch

    from harness.workload.training import Given, Training

LIMIT_S = 300.0
"""For building and one update. Whoever needs longer has a model that no comparison gets through."""
MAX_HASHED = 256
"""Samples that are read and hashed, in the order in which the ranks will read them."""


# -- the process that asks ---------------------------------------------------


def examine(spec: Spec) -> Spec:
    """Return `spec` with what was found, having tried its workload.

    Raises:
        SpecError: says what is wrong with it, in one line.
    """
    assert spec.own is not None
    request = msgspec.json.encode(spec).decode()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, request, str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, spec.mesh.world_size - 1)
    ]
    try:
        first, other = (_answer(child, spec.own) for child in children)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    compare(first["digests"], other["digests"], "built in another process and as the last rank")
    return dataclasses.replace(spec, own=dataclasses.replace(spec.own, found=first["found"]))


def _answer(child: subprocess.Popen[bytes], own: Own) -> dict[str, Any]:
    try:
        output, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"workload: expected {users.short_name(own)} to be built and to do one update within "
            f"{LIMIT_S:g} s; found it still at it; make it smaller"
        ) from None
    if child.returncode != 0 or not output:
        cause = f"exit status {child.returncode}"
        if child.returncode < 0:
            cause = signal.Signals(-child.returncode).name
        raise SpecError(
            f"workload: expected {users.short_name(own)} to be tried in a process of its own; "
            f"found that process ended by {cause}; memory may have run out"
        )
    answer: dict[str, Any] = json.loads(output)
    if "refused" in answer:
        raise SpecError(answer["refused"])
    return answer


def compare(first: dict[str, str], other: dict[str, str], when: str) -> None:
    """Refuse a build that gives something else the next time.

    Raises:
        SpecError: names the first difference.
    """
    names = [*first, *(name for name in other if name not in first)]
    differing = [name for name in names if first.get(name) != other.get(name)]
    if differing:
        raise SpecError(
            f"workload: expected the same from the same seed every time and on every rank; found "
            f"{differing[0]} different the next time, {when} ({len(differing)} of {len(names)} "
            "differ); draw from torch's generators alone, and let nothing depend on the rank"
        )


# -- the process that tries --------------------------------------------------


def main() -> None:
    """Answer with one JSON object on stdout; what the user's code prints goes nowhere."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    rank = int(sys.argv[2])
    try:
        answer = inspect(spec, rank)
    except SpecError as error:
        answer = {"refused": str(error)}
    except SystemExit as error:
        answer = {"refused": f"workload: expected {spec.workload} to return; found it exit {error}"}
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)  # whatever threads the user's code has started


def inspect(spec: Spec, rank: int = 0) -> dict[str, Any]:
    """Build, check and train as `rank` would; `digests`, and on rank 0 what was `found`.

    Raises:
        SpecError: says what is wrong, in one line.
    """
    assert spec.own is not None
    make = users.load(spec.own)
    given = _given(spec, rank)
    trial = _Trial(spec, given, make)
    digests = trial.built()
    if rank != 0:
        return {"digests": digests}
    trial.train()
    stepped = trial.weights()
    found = trial.found()
    del trial
    again = _Trial(spec, given, make)
    compare(digests, again.built(), "built in the same process")
    again.train()
    compare(stepped, again.weights(), "built and trained in the same process")
    return {"digests": digests, "found": found}


def _given(spec: Spec, rank: int) -> Given:
    import torch

    from harness.workload.training import Given

    device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device(spec.device)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    return Given(
        device=device,
        dtype=getattr(torch, spec.dtype),
        seed=spec.seed,
        rank=rank,
        world_size=spec.mesh.world_size,
    )


class _Trial:
    """One build, and what is tried with it."""

    def __init__(self, spec: Spec, given: Given, make: Callable[[Given], Training]) -> None:
        import torch

        from harness.workload import checks
        from harness.workload.wrappers import materialize

        assert spec.own is not None
        self._spec, self._own, self._given = spec, spec.own, given
        self._before = _memory(given.device)
        torch.manual_seed(given.seed)
        self._training = training = make(given)
        checks.model(training)
        training.model.to(given.dtype)
        checks.units(training, spec)
        checks.data(training, given.world_size)
        with self._doing("giving the model its values"):
            self._model = materialize(training, given.device)
        checks.materialized(self._model)
        self._data_digests = self._read()

    def built(self) -> dict[str, str]:
        """Digests of weights, buffers and samples."""
        return {**self.weights(), **self._data_digests}

    def weights(self) -> dict[str, str]:
        """Digests of weights and buffers."""
        import accelpact

        named = {f"parameter {name}": each for name, each in self._model.named_parameters()}
        named |= {f"buffer {name}": each for name, each in self._model.named_buffers()}
        return dict(
            accelpact.tree_digest({name: each.detach() for name, each in named.items()}).tensors
        )

    def train(self) -> None:
        """Do one microbatch and one step.

        Raises:
            SpecError: the loss is none to train with.
        """
        import torch

        from harness.workload import checks
        from harness.workload.data import batch, sample_at

        given, training = self._given, self._training
        indices = [
            sample_at(place, seed=given.seed, num_samples=len(training.data))
            for place in range(training.microbatch)
        ]
        with self._doing("making the optimizer"):
            optimizer = training.optimizer(self._model.parameters())
        checks.optimizer(optimizer, self._model)
        torch.manual_seed(given.seed)
        with self._doing("making a batch of samples"):
            found = batch(training, indices, given.device)
        self._usual = _memory(given.device)
        # Compiled code takes no notice of a hook that comes later.
        compiled = training.units() if self._spec.compiled else ()
        with (
            checks.Calls(self._model, without=compiled) as calls,
            self._doing("the loss of a batch"),
        ):
            loss = training.loss(self._model, found)
        checks.loss(loss)
        with self._doing("the backward pass"):
            loss.backward()
        self._peak = _peak_memory(given.device)
        self._halts_at = calls.middle()
        checks.gradients(self._model, self._spec, calls)
        with self._doing("the optimizer's step"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._optimizer = optimizer

    def found(self) -> dict[str, Any]:
        """Return what records say of the workload, and what the harness needs to know of it."""
        from harness.workload import checks

        training = self._training
        return {
            "class": type(training.model).__name__,
            "optimizer": type(self._optimizer).__name__,
            "parameters": sum(each.numel() for each in self._model.parameters()),
            "units": len(training.units()) + 1,
            "microbatch": training.microbatch,
            "accumulation": training.accumulation,
            "clip_norm": training.clip_norm,
            "tokens": training.tokens,
            "unit": "samples" if training.tokens is None else "tokens",
            "halts_at": self._halts_at,
            "beside": users.beside(self._own),
            "data": {
                "name": self._spec.workload,
                "samples": len(training.data),
                "hashed": len(self._data_digests),
                "sha256": checks.digest_of(self._data_digests.values()),
            },
            "memory": self._measured(),
        }

    def _measured(self) -> dict[str, Any]:
        from harness.workload.checks import owners
        from harness.workload.memory import Measured

        sizes: dict[int, int] = {}
        for parameter, (unit, *_) in owners(self._training):
            sizes[unit] = sizes.get(unit, 0) + _bytes(parameter)
        root = sizes.pop(id(self._model), 0)
        parameters = sum(_bytes(each) for each in self._model.parameters())
        trained = sum(_bytes(each) for each in self._model.parameters() if each.requires_grad)
        state = [each for held in self._optimizer.state.values() for each in held.values()]
        measured = Measured(
            parameters=parameters,
            trained=trained,
            optimizer=sum(_bytes(each) for each in state if hasattr(each, "numel")),
            unit=max(sizes.values(), default=0),
            root=root,
            data=max(0, self._usual - self._before - parameters),
            activations=max(0, self._peak - self._usual - trained),
            accumulates=self._training.accumulation > 1,
        )
        return dataclasses.asdict(measured)

    def _read(self) -> dict[str, str]:
        """Digests of the samples that are read first.

        Raises:
            SpecError: reading one again gives something else.
        """
        import torch

        from harness.workload import checks
        from harness.workload.data import sample_at

        given, data, spec = self._given, self._training.data, self._spec
        wanted = spec.schedule.updates * given.world_size * self._training.samples_per_update
        places = range(min(wanted, MAX_HASHED))
        indices = [
            sample_at(place, seed=given.seed, num_samples=len(data)) for place in places
        ]  # fmt: skip
        found: list[dict[str, str]] = []
        for these in (indices, indices[:1]):
            torch.manual_seed(given.seed)
            with self._doing("reading samples"):
                prints = [checks.fingerprint(data[index]) for index in these]
            names = (f"sample {index} at place {place}" for place, index in enumerate(these))
            found.append(dict(zip(names, prints, strict=True)))
        whole, again = found
        compare({name: whole[name] for name in again}, again, "in the same data")
        return whole

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except SpecError:
            raise
        except Exception as error:
            raise users.failed(f"{what} of {self._spec.workload}", self._own, error) from error


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _memory(device: torch.device) -> int:
    """Bytes that this process holds, on the device or resident."""
    import psutil
    import torch

    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held."""
    import resource

    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
