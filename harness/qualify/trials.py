"""What is tried: rows of the matrix, faults that strike them, and policies that answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import strategies
from harness import plan
from harness.spec import Fault, Mesh, Schedule, SpecError, choose
from strategies import Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.spec import RunSpec, Spec

UPDATES, CHECKPOINT_AT, FRONTIER = 4, 1, 2
GROUP_S = 3.0
"""Timeout of a replicate group: what a trial with an absent rank waits for."""
_FORWARD = {"group_timeout": 3 * GROUP_S, "shard_timeout": 1.5 * GROUP_S}
"""With these a shard peer of the absent rank fails first, in its forward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A wrapper on the smallest mesh on which it averages over replicas."""

    name: str
    wrapper: str
    mesh: str
    compiled: bool = False
    gathers: bool = True
    """Whether its forward pass communicates."""


ROWS = {
    row.name: row
    for row in (
        Row(name="ddp", wrapper="ddp", mesh="2x1", gathers=False),
        Row(name="fsdp2", wrapper="fsdp2", mesh="2x2"),
        Row(name="fsdp1", wrapper="fsdp1", mesh="2x2"),
        Row(name="compiled", wrapper="ddp", mesh="2x1", compiled=True, gathers=False),
    )
}
STRIKES = ("absent@boundary", "absent@forward", "absent@backward", "error@step")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How every failure is answered."""

    name: str
    label: str
    """Part of the names of its runs."""
    strategy: str
    variant: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    asks: str = ""
    """Which envelope decides: `nothing` admits nothing, `own` what is proven so far."""


NO_RECOVERY = Policy(
    name="no recovery", label="none", strategy="cold", settings={"max_restarts": 0}
)
ALWAYS_L1 = Policy(name="always L1", label="l1", strategy="accelpact", variant="auto")
REBUILD = Policy(name="always L1", label="l1-rebuild", strategy="accelpact")
"""The same where `auto` takes the other way to replace a group."""
ALWAYS_L2 = Policy(
    name="always L2", label="l2", strategy="accelpact", variant="auto", asks="nothing"
)
QUALIFIED = Policy(
    name="qualified", label="qualified", strategy="accelpact", variant="auto", asks="own"
)
POLICIES = (ALWAYS_L1, ALWAYS_L2, NO_RECOVERY, REBUILD, QUALIFIED)
"""In the order in which they are tried: what is proven comes before what asks for it."""


def spec_of(base: Spec, row: Row, fault: Fault | None = None) -> Spec:
    """Return `base` on `row`, struck by `fault`."""
    return dataclasses.replace(
        base,
        wrapper=row.wrapper,
        mesh=Mesh.parse(row.mesh),
        compiled=row.compiled,
        timeouts=Timeouts(group=GROUP_S),
        schedule=Schedule(
            updates=UPDATES, checkpoint_at=CHECKPOINT_AT, faults=(fault,) if fault else ()
        ),
    )


def chosen_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of these names, by default all.

    Raises:
        SpecError: one is unknown, or named twice.
    """
    _once("rows", names)
    return [ROWS[choose("rows", name, ROWS)] for name in names or ROWS]


def chosen_faults(names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names, by default all.

    Raises:
        SpecError: one is unknown, or named twice.
    """
    _once("faults", names)
    found = []
    for name in names or STRIKES:
        fault = Fault.parse(f"{choose('faults', name, STRIKES)}:{FRONTIER}")
        found.append(dataclasses.replace(fault, update=FRONTIER + 1) if fault.inside else fault)
    return found


def _once(field: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise SpecError(f"{field}: expected each once; found {', '.join(names)}")


def impossible(row: Row, fault: Fault) -> str | None:
    """Say why `fault` cannot strike `row`, if that is so."""
    if fault.phase == "forward" and not row.gathers:
        return f"{row.wrapper} communicates in no forward pass"
    return None


def planned(  # noqa: PLR0917  one trial in one line
    spec: Spec, fault: Fault, policy: Policy, number: int, runs: Path, backend: str
) -> RunSpec:
    """Plan a trial whose runtime writes its own record into the folder of the run."""
    kind = strategies.find(policy.strategy)
    label = f"{fault.phase}-{policy.label}-{number}"
    made = plan.trial(
        spec,
        kind(variant=policy.variant),
        label,
        backend=backend,
        expected="fail" if policy is NO_RECOVERY else "pass",
    )
    settings = {
        **made.settings,
        **(_FORWARD if fault.phase == "forward" else {}),
        **policy.settings,
        "environment": {
            **made.settings["environment"],
            "ACCELPACT_EVENTS": str(runs / made.name),
        },
    }
    return dataclasses.replace(made, settings=settings)
