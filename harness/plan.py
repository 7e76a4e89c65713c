"""Which runs a comparison consists of, and in which order."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import msgspec

import strategies
from harness.spec import RunSpec, SpecError, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.spec import Fault, Spec
    from strategies import Availability, Platform, Strategy

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender in a comparison: a strategy at one of its variants."""

    strategy: Strategy
    label: str
    """Part of the names of its runs."""
    fault_free: bool = True
    """Whether it also runs without a fault."""


def contenders(names: Sequence[str]) -> list[Entry]:
    """Make the contenders, without the reference, which is always there.

    Raises:
        SpecError: a name is unknown.
    """
    known = strategies.names()
    wanted = [choose("strategies", name, known) for name in names or strategies.by_default()]
    if len(set(wanted)) != len(wanted):
        raise SpecError(f"strategies: expected each once; found {', '.join(wanted)}")
    return [
        Entry(strategy=strategies.find(name)(), label=name) for name in wanted if name != REFERENCE
    ]


def variants(name: str) -> list[Entry]:
    """Make one contender once per variant that it offers, for tuning."""
    kind = strategies.find(choose("strategy", name, strategies.names()))
    if name == REFERENCE:
        raise SpecError(
            f"strategy: expected a contender; found {REFERENCE}, which has nothing to tune"
        )
    return [
        Entry(strategy=kind(variant=variant), label=f"{name}-{place}", fault_free=False)
        for place, variant in enumerate(kind.variants)
    ]


def availability(
    entries: Sequence[Entry], platform: Platform
) -> tuple[list[Entry], list[tuple[Entry, Availability]]]:
    """Split `entries` into those that can run here and those that cannot, with the reason."""
    found = [(entry, entry.strategy.availability(platform)) for entry in entries]
    return (
        [entry for entry, answer in found if answer.available],
        [(entry, answer) for entry, answer in found if not answer.available],
    )


def block_runs(spec: Spec, entries: Sequence[Entry], *, block: int, backend: str) -> list[RunSpec]:
    """Plan one block: two references, every contender with the fault and without, shuffled.

    The order depends on the seed and the block alone.
    """
    planned = _references(spec, block, backend)
    for entry in entries:
        if spec.schedule.faults:
            planned.append(_run(spec, entry.strategy, entry.label, block, backend, faulted=True))
        if entry.fault_free or not spec.schedule.faults:
            label = f"{entry.label}-fault-free"
            planned.append(_run(spec, entry.strategy, label, block, backend, faulted=False))
    random.Random(f"{spec.seed}/{block}").shuffle(planned)  # noqa: S311  not a secret
    return [dataclasses.replace(run, order=order) for order, run in enumerate(planned)]


def _references(spec: Spec, block: int, backend: str) -> list[RunSpec]:
    reference = strategies.find(REFERENCE)()
    return [
        _run(spec, reference, "reference", block, backend, faulted=False),
        _run(spec, reference, "reference-control", block, backend, faulted=False, control=True),
    ]


def reference_run(spec: Spec, *, backend: str) -> RunSpec:
    """Plan one uninterrupted run of the reference."""
    return _references(spec, 0, backend)[0]


def run_name(block: int, label: str) -> str:
    """Name of a run, and of its folder."""
    return f"{block}-{label}"


def matrix_label(contender: str, fault: Fault) -> str:
    """Label of the run of a contender that is struck by `fault`."""
    return f"{contender}-{fault.kind}-{fault.phase}"


def matrix_runs(
    spec: Spec, entries: Sequence[Entry], faults: Sequence[Fault], *, backend: str
) -> list[RunSpec]:
    """Plan two references, and every contender once per fault, in that order."""
    planned = _references(spec, 0, backend)
    for entry in entries:
        for fault in faults:
            schedule = dataclasses.replace(spec.schedule, faults=(fault,))
            struck = dataclasses.replace(spec, schedule=schedule)
            label = matrix_label(entry.label, fault)
            planned.append(_run(struck, entry.strategy, label, 0, backend, faulted=True))
    return [dataclasses.replace(run, order=order) for order, run in enumerate(planned)]


def trial(
    spec: Spec, strategy: Strategy, label: str, *, backend: str, expected: str, **settings: Any
) -> RunSpec:
    """Plan one run with the faults of `spec` and other settings than the contender's own."""
    run = _run(spec, strategy, label, 0, backend, faulted=True)
    return dataclasses.replace(run, expected=expected, settings={**run.settings, **settings})


def references(spec: Spec, *, backend: str) -> list[RunSpec]:
    """Plan the pair of uninterrupted runs that the others of its block are judged by."""
    return _references(spec, 0, backend)


def _expected(strategy: Strategy, spec: Spec, backend: str) -> str:
    if strategy.asks_envelope and spec.envelope and not _admitted(strategy, spec, backend):
        return "rejected"
    if any(fault.kind == "kill" for fault in spec.schedule.faults):
        return strategy.expected_killed
    if any(fault.kind == "error" for fault in spec.schedule.faults):
        return strategy.expected_step
    inside = any(fault.inside for fault in spec.schedule.faults)
    return strategy.expected_inside if inside else strategy.expected


def _admitted(strategy: Strategy, spec: Spec, backend: str) -> bool:
    """Whether the envelope holds proven what `spec`'s faults call for.

    A rank that stays away fails the reduction over the replicas first, wherever it is: no other
    group has so short a timeout.
    """
    from accelpact import _envelope as envelopes

    try:
        found = envelopes.read(str(spec.envelope))
    except envelopes.EnvelopeError:
        return False
    stack = envelopes.stack_of(backend=backend, device=spec.device)
    setting = strategy.options["replacement"]
    steps = ("rebuild", "reconfigure") if setting == "auto" else (setting,)
    keys = [
        [
            envelopes.Key(
                platform=envelopes.title(stack),
                profile=envelopes.profile_of(
                    spec.wrapper, compiled=spec.compiled, replacement=step
                ),
                phase="backward" if fault.inside else "boundary",
            )
            for step in steps
        ]
        for fault in spec.schedule.faults
    ]
    actions = [envelopes.DISCARD if each.inside else envelopes.L1 for each in spec.schedule.faults]
    return all(
        any(found.objection(stack, key, action) is None for key in alternatives)
        for alternatives, action in zip(keys, actions, strict=True)
    )


def _run(
    spec: Spec,
    strategy: Strategy,
    label: str,
    block: int,
    backend: str,
    *,
    faulted: bool,
    control: bool = False,
) -> RunSpec:
    settings = strategy.settings(
        spec.timeouts, num_faults=len(spec.schedule.faults), backend=backend
    )
    return RunSpec(
        name=run_name(block, label),
        strategy=strategy.name,
        variant=strategy.variant,
        block=block,
        order=0,
        faulted=faulted,
        control=control,
        expected=_expected(strategy, spec, backend) if faulted else "pass",
        backend=backend,
        spec=spec,
        settings=msgspec.to_builtins(settings),
        launcher_recovers=strategy.launcher_recovers,
    )
