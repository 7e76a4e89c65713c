"""The records of a whole comparison, written by hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from harness import compare, plan
from harness.records import (
    write_json,
)
from harness.spec import Spec
from strategies import Availability, Platform
from tests.unit import logs

if TYPE_CHECKING:
    from pathlib import Path

CPU = Platform(device="cpu", backend="gloo")
RUNS = (
    "0-reference",
    "0-reference-control",
    "0-cold",
    "0-cold-fault-free",
    "0-accelpact",
    "0-accelpact-fault-free",
    "0-comm_only",
)


def comm_only() -> logs.Log:
    """The repair seemed to work, and the next synchronized backward failed."""
    log = logs.repaired()
    log.events = [event for event in log.events if event.t - logs.CLOCK <= 14.1]
    log.add(14.5, "failure", logs.PEER, update=4, error="RuntimeError: stale group")
    return log.supervise(15, "end", code=1)


def make(folder: Path, *, complete: bool = True) -> Path:
    """Write the records of one block, as a comparison leaves them, into `folder`."""
    runs = folder / "runs"
    reference = logs.digests(logs.uninterrupted())
    for order, (name, log, changes) in enumerate(
        [
            ("reference", logs.uninterrupted(), {"faulted": False}),
            ("reference-control", logs.uninterrupted(), {"faulted": False, "control": True}),
            ("cold", logs.restarted(), {}),
            ("cold-fault-free", logs.uninterrupted(), {"faulted": False}),
            ("accelpact", logs.repaired(), {}),
            ("accelpact-fault-free", logs.uninterrupted(), {"faulted": False}),
            ("comm_only", comm_only(), {}),
        ]
    ):
        strategy = name.removesuffix("-fault-free").removesuffix("-control")
        fields: dict[str, Any] = {"name": f"0-{name}", "order": order, **changes}
        if strategy == "cold":
            fields["variant"] = "monitor-0.02s"
        spec = logs.run_spec(strategy, **fields)
        states = logs.digests(log)
        logs.write_run(runs, spec, log, states)
        write_json(runs / spec.name / "drift.json", {"reference": "0-reference", "numbers": None})
    assert 20 == len(reference)
    write_json(folder / "environment.json", {"python": "3.12.3", "packages": {"torch": "2.14.0"}})
    write_json(folder / "comparison.json", described(complete=complete))
    return folder


def described(*, complete: bool) -> compare.Comparison:
    """What the comparison says about itself; the package of `nvrx` is missing."""
    entries = plan.contenders(("cold", "accelpact", "comm_only", "nvrx"))
    answer = Availability(available=False, reason="package nvidia-resiliency-ext is not installed")
    found = compare.describe(
        Spec(schedule=logs.SCHEDULE),
        entries[:3],
        [(entries[3], answer)],
        platform=CPU,
        title="A comparison",
    )
    return dataclasses.replace(found, complete=complete)
