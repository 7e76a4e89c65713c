"""The records that the checks look at, and what several of them ask of these."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from harness import drift
from harness.records import Digests, Event, Resources, read_lines
from harness.spec import RunSpec
from harness.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMPONENTS = ("weights", "moments", "steps", "rng", "cursor", "frontier")
"""Of the state of a rank."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """One run with a fault, as recorded, and the digests of the uninterrupted reference."""

    run: RunSpec
    timeline: Timeline
    digests: Sequence[Digests]
    resources: Sequence[Resources]
    reference: Sequence[Digests]

    @classmethod
    def read(cls, folder: Path, reference: Path) -> Evidence:
        """Read the records of both runs, which the supervisor has left as they were written.

        Raises:
            OSError, msgspec.DecodeError: there are none, or they are damaged.
        """
        run = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunSpec)
        return cls(
            run=run,
            timeline=Timeline(
                read_lines(folder / "events.jsonl", Event), world_size=run.spec.mesh.world_size
            ),
            digests=read_lines(folder / "digests.jsonl", Digests),
            resources=read_lines(folder / "resources.jsonl", Resources),
            reference=read_lines(reference / "digests.jsonl", Digests),
        )

    @property
    def finished(self) -> bool:
        """Whether every rank says that it has reached the last update."""
        return self.timeline.finish is not None

    def first_difference(self) -> tuple[int, dict[str, list[str]]]:
        """Return the first update at which a rank differs, and `rank R: NAME` by what differs.

        Later ones say no more: a state that is wrong once is wrong in every part an update or two
        later, on every rank. (0, {}) if nothing differs.
        """
        mine, theirs = drift.final(self.digests), drift.final(self.reference)
        differing = sorted(
            (update, rank)
            for rank, update in mine.keys() & theirs.keys()
            if mine[rank, update].root != theirs[rank, update].root
        )
        found: dict[str, list[str]] = {}
        for update, rank in differing:
            if update != differing[0][0]:
                break
            own, other = mine[rank, update].tensors or {}, theirs[rank, update].tensors or {}
            for name in sorted(own.keys() | other.keys()):
                if own.get(name) != other.get(name):
                    found.setdefault(_kind(name), []).append(f"rank {rank}: {name}")
        return (differing[0][0] if differing else 0), found


def by_component(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Sort differences at the first update that has any by the component that is to blame.

    An update reads random numbers, data and weights and makes gradients of them; both moments take
    these in, and the weights follow the moments. So where random state or cursor are wrong, wrong
    weights and moments are only what came of it; where one moment is wrong and the other is right,
    the gradients were right, and the weights are what came of the moment. Where both are wrong and
    the weights too, the records cannot tell, and both are named.
    """
    own: tuple[str, ...] = ("steps", "rng", "cursor", "frontier")
    blamed = {name: found[name] for name in own if name in found}
    if {"rng", "cursor"} & found.keys():
        return blamed
    moments = [name for name in _MOMENTS if name in found]
    if moments:
        blamed["moments"] = [each for name in moments for each in found[name]]
    others = [
        each for kind in found if kind not in (*COMPONENTS, *_MOMENTS) for each in found[kind]
    ]
    wrong = [*found.get("weights", []), *others]
    if wrong and len(moments) != 1 and "steps" not in found:
        blamed["weights"] = wrong
    return blamed


def _kind(name: str) -> str:
    head = name.partition("/")[0]
    return {"weight": "weights", "step": "steps"}.get(head, head)
