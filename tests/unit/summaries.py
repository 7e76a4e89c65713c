"""Hand-made summaries for tests of the report: every figure follows from the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import stats
from harness.records import (
    Contender,
    Drift,
    FaultRecord,
    Ledger,
    References,
    RunSummary,
    Summary,
    Tried,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 4
TOKENS = 8192
"""Tokens of an update, all ranks."""
UPDATES = 25
CHECKPOINT, FAULT = 10, 15
UPDATE_S = 0.25
START_S = 3.0
HOLDERS = [*(f"layers.{layer}._fsdp_state.process_group" for layer in range(4)), "root"]

REPAIR_MS = {
    "accelpact": {
        "guard": 0.1,
        "admit": 0.6,
        "retire": 0.3,
        "rebuild": 1.2,
        "rebind": 0.2,
        "validate": 0.4,
        "release": 0.4,
    },
    "torchft_pg": {"retire": 0.5, "rebuild": 2.1, "validate": 0.3},
    "comm_only": {"guard": 0.1, "admit": 0.6, "retire": 0.3, "rebuild": 1.2, "validate": 0.4},
    "nvrx": {"restart": 150.0, "restore": 60.0, "replay": 1000 * 5 * UPDATE_S},
    "cold": {"restart": 3900.0, "restore": 70.0, "replay": 1000 * 5 * UPDATE_S},
}
CONTENDERS = ("reference", "cold", "nvrx", "torchft_pg", "accelpact", "comm_only")
DETECTION_S = 3.01


def wobble(block: int, place: int) -> float:
    """A factor near 1 that differs from run to run and never by chance."""
    return 1 + 0.01 * (((7 * block + 3 * place) % 5) - 2)


def run(strategy: str, *, block: int = 0, faulted: bool = True, **changes: Any) -> RunSummary:
    """One run that went as it should; `changes` replace fields."""
    control = bool(changes.get("control", False))
    place = CONTENDERS.index(strategy) if strategy in CONTENDERS else 9
    place = place + 2 * faulted + control
    factor = wobble(block, place)
    fails = faulted and strategy == "comm_only"
    kind = "control" if control else "faulted" if faulted else "clean"
    fields: dict[str, Any] = {
        "name": f"{block}-{strategy}-{kind}",
        "strategy": strategy,
        "variant": "default",
        "block": block,
        "order": place,
        "faulted": faulted,
        "control": control,
        "verdict": "fail" if fails else "pass",
        "expected": "fail" if fails else "pass",
        "reason": "update 16: RuntimeError in the synchronized backward" if fails else "",
        "division": "tiny, 2x2, fsdp1, cpu",
        "replayed_updates": 5 if faulted and strategy in ("cold", "nvrx") else 0,
        "discarded_updates": 0,
        "data_ledger": Ledger(missing=0, duplicated=0),
        "resources": {
            "before": {"threads": 23.0, "descriptors": 41.0, "groups": 3.0, "rss_bytes": 4.1e8},
            "after": {"threads": 23.0, "descriptors": 41.0, "groups": 3.0, "rss_bytes": 4.2e8},
        },
        **_state(fails=fails),
    }
    phases = {name: ms * factor for name, ms in REPAIR_MS.get(strategy, {}).items()}
    fields |= _times(phases if faulted else {}, factor=factor, faulted=faulted, fails=fails)
    if faulted and "rebuild" in phases:
        fields |= _repair(strategy, phases, fails=fails)
    return RunSummary(**{**fields, **changes})


def _state(*, fails: bool) -> dict[str, Any]:
    drift = Drift(
        level="differs" if fails else "bitwise",
        equal=not fails,
        ranks_equal=0 if fails else RANKS,
        ranks=RANKS,
        max_abs=0.03 if fails else 0.0,
        l2=1.7 if fails else 0.0,
        first_update=16 if fails else None,
        tensors=["weights/layers.0.wq"] if fails else [],
    )
    return {"committed_updates": FAULT if fails else UPDATES, "drift": drift}


def _times(
    phases: dict[str, float], *, factor: float, faulted: bool, fails: bool
) -> dict[str, Any]:
    lost_s = (DETECTION_S + sum(phases.values()) / 1000) if faulted else 0.0
    productive_s = UPDATES * UPDATE_S * factor
    wall_s = START_S + productive_s + lost_s
    replay_s = phases.get("replay", 0.0) / 1000
    fields: dict[str, Any] = {
        "wall_s": wall_s,
        "update_s": UPDATE_S * factor,
        "goodput_tokens_s": UPDATES * TOKENS / wall_s,
        "runtime_goodput": productive_s / wall_s,
        "shares": {
            "start-up": START_S / wall_s,
            "productive": productive_s / wall_s,
            "replay": replay_s / wall_s,
            "checkpoint save": 0.0,
            "detection": DETECTION_S * faulted / wall_s,
            "recovery": (sum(phases.values()) / 1000 - replay_s) / wall_s,
            "other": 0.0,
        },
        "curve": _curve(FAULT if fails else UPDATES, factor=factor, lost_s=lost_s),
    }
    if faulted:
        fields["fault_s"] = START_S + FAULT * UPDATE_S * factor + 0.001
        fields["detection_s"] = DETECTION_S
        fields["phases_ms"] = phases
    if faulted and not fails:
        fields["fault_to_resume_s"] = lost_s
        fields["fault_to_next_update_s"] = lost_s + UPDATE_S * factor
        fields["fault_to_frontier_s"] = lost_s + 10 * UPDATE_S * factor
    return fields


def _repair(strategy: str, phases: dict[str, float], *, fails: bool) -> dict[str, Any]:
    rebinds = strategy == "accelpact"
    references = [
        References(
            rank=rank,
            rebound=5 if rebinds else 0,
            left=5 if fails else 0,
            holders=HOLDERS if fails or rebinds else [],
        )
        for rank in (0, 2)
    ]
    return {
        "repair_ms": sum(phases.values()),
        "floor_ms": 0.8 * sum(phases.values()),
        "references_rebound": max(each.rebound for each in references),
        "references_left": max(each.left for each in references),
        "references": references,
    }


def _curve(last: int, *, factor: float, lost_s: float) -> list[tuple[float, int]]:
    return [
        (
            START_S + update * UPDATE_S * factor + (lost_s if update > FAULT else 0.0),
            update * TOKENS,
        )
        for update in range(1, last + 1)
    ]


def contender(name: str, **changes: Any) -> Contender:
    """What the records say about a contender as such."""
    fields: dict[str, Any] = {
        "name": name,
        "summary": f"What {name} does, in one line.",
        "available": True,
        "reason": "",
        "version": "2.14.0",
        "variant": "default",
        "settings": {"environment": {}, "group_timeout": 3.0, "options": {"poll_s": 0.05}},
        "integration_lines": 4,
        "tried": [
            Tried(
                variant="default",
                options={"poll_s": 0.05},
                n=3,
                recovery_s=0.0032,
                update_s=0.25,
                verdicts=["pass"] * 3,
                source="torch 2.14.0, 2 cores",
            )
        ],
    }
    return Contender(**{**fields, **changes})


def comparison(
    *, blocks: int = 6, strategies: Sequence[str] = CONTENDERS, **changes: Any
) -> Summary:
    """A whole comparison; `changes` replace fields of the summary."""
    runs = []
    for block in range(blocks):
        for name in strategies:
            if name == "reference":
                runs += [
                    run(name, block=block, faulted=False, control=control)
                    for control in (False, True)
                ]
            else:
                runs += [run(name, block=block, faulted=faulted) for faulted in (True, False)]
    return summary(runs, strategies=strategies, **changes)


def summary(
    runs: Sequence[RunSummary], *, strategies: Sequence[str] = CONTENDERS, **changes: Any
) -> Summary:
    """A summary of given runs, with ratios and overheads as the harness makes them."""
    fields: dict[str, Any] = {
        "schema_version": 1,
        "title": "Recovery of an HSDP run: tiny on 2x2, cpu",
        "spec": {
            "preset": "paper",
            "workload": "tiny",
            "wrapper": "fsdp1",
            "device": "cpu",
            "mesh": {"replicate": 2, "shard": 2},
            "schedule": {
                "updates": UPDATES,
                "checkpoint_at": CHECKPOINT,
                "faults": [{"kind": "absent", "phase": "boundary", "update": FAULT}],
            },
            "seed": 1,
            "data": None,
        },
        "environment": {"python": "3.12.3", "torch": "2.14.0", "processor": {"cores": 2}},
        "contenders": [contender(name) for name in strategies],
        "runs": list(runs),
        "overhead": stats.overheads(runs),
        "ratios": stats.ratios(runs),
        "faults": [
            FaultRecord(
                run=each.name,
                planned="absent@boundary:15",
                fired=True,
                evidence="rank 2 stayed away; rank 0 timed out after 3.01 s",
            )
            for each in runs
            if each.faulted and each.block == 0
        ],
        "limits": ["One machine, 2 cores shared by 4 ranks; no network between them."],
    }
    return Summary(**{**fields, **changes})
