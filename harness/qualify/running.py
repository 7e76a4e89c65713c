"""Runs the trials, within a limit of time, and keeps the envelope that they prove so far."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from typing import TYPE_CHECKING

from accelpact import _envelope
from accelpact._envelope import Envelope
from harness import compare, environment, plan, summarize, supervisor
from harness.launching import Forks
from harness.layout import CHECKPOINTS, COMPARISON, ENVIRONMENT, RUNS, STATE
from harness.qualify import evidence, trials
from harness.qualify.trials import ALWAYS_L1, POLICIES, QUALIFIED, REBUILD, UPDATES
from harness.records import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.progress import Progress
    from harness.qualify.evidence import Finding
    from harness.qualify.trials import Policy, Row
    from harness.spec import Fault, RunSpec, Spec
    from strategies import Platform

_STALL_S = 60.0
"""A trial that records nothing for so long is ended."""
_FIRST_S = 10.0
"""What a trial may take, as long as none has told."""
_SO_FAR, _NOTHING = "so-far.json", "nothing.json"


def run(
    base: Spec,
    *,
    rows: Sequence[Row],
    faults: Sequence[Fault],
    num_trials: int,
    limit_s: float,
    platform: Platform,
    records: Path,
    out: Path,
    progress: Progress,
) -> Envelope:
    """Try everything, or as much as `limit_s` allows, and write `out`.

    Args:
        base: workload, device and seed.
        rows: wrappers.
        faults: what strikes them.
        num_trials: how often every policy is tried.
        limit_s: seconds; no trial begins that might end after them.
        platform: device and backend.
        records: an empty folder for the records of the runs.
        out: the envelope file; written also if this is interrupted.
        progress: tells a person.
    """
    with Forks() as forks:
        own = _Qualification(base, num_trials, limit_s, platform, records, progress, forks)
        reason = "interrupted"
        try:
            with progress.over(own.count(rows, faults)):
                for row in rows:
                    own.row(row, faults)
            reason = ""
        finally:
            own.leave(rows, faults, reason)
            found = own.envelope()
            found.write(out)
    return found


class _Qualification:
    """The trials so far."""

    def __init__(  # noqa: PLR0917  private, and made once
        self,
        base: Spec,
        num_trials: int,
        limit_s: float,
        platform: Platform,
        records: Path,
        progress: Progress,
        forks: Forks,
    ) -> None:
        self._base = base
        self._num_trials = num_trials
        self._limit_s = limit_s
        self._platform = platform
        self._records = records
        self._progress = progress
        self._forks = forks
        self._began = time.monotonic()
        self._longest_s = _FIRST_S
        self._findings: list[Finding] = []
        self._not_run: list[str] = []
        self._needless: set[tuple[str, str, str]] = set()
        self._ran: Counter[tuple[str, str, str]] = Counter()
        self._stack = _envelope.stack_of(backend=platform.backend, device=platform.device)
        self._environment = environment.describe(device=platform.device, backend=platform.backend)
        Envelope(stack=self._stack, entries=()).write(records / _NOTHING)

    def count(self, rows: Sequence[Row], faults: Sequence[Fault]) -> int:
        """Return how many runs there are at most."""
        cells = [(row, fault) for row in rows for fault in faults]
        possible = sum(trials.impossible(*cell) is None for cell in cells)
        return 2 * len(rows) + possible * len(POLICIES) * self._num_trials

    def row(self, row: Row, faults: Sequence[Fault]) -> None:
        """Try one wrapper."""
        place = self._records / row.name
        (place / RUNS).mkdir(parents=True)
        spec = trials.spec_of(self._base, row)
        write_json(place / ENVIRONMENT, self._environment)
        title = f"Trials on {spec.workload}, {row.name} {spec.mesh}"
        described = compare.describe(spec, [], [], platform=self._platform, title=title)
        write_json(place / COMPARISON, described)
        for reference in plan.references(spec, backend=self._platform.backend):
            if not self._execute(reference, place):
                return
        for fault in faults:
            reason = trials.impossible(row, fault)
            if reason is None:
                self._strike(row, fault, place)
            else:
                self._needless |= {(row.name, fault.phase, each.label) for each in POLICIES}
                self._not_run.append(f"{row.name}, {fault.kind}@{fault.phase}: {reason}")

    def _strike(self, row: Row, fault: Fault, place: Path) -> None:
        """Try every policy against one fault."""
        for policy in POLICIES:
            if policy is REBUILD and self._rebuilds(fault, place):
                self._needless.add((row.name, fault.phase, policy.label))
                continue
            spec = trials.spec_of(self._base, row, fault)
            if policy.asks:
                self.envelope().write(self._records / _SO_FAR)
                name = _SO_FAR if policy.asks == "own" else _NOTHING
                spec = dataclasses.replace(spec, envelope=str(self._records / name))
            for number in range(self._times(policy)):
                trial = trials.planned(
                    spec, fault, policy, number, place / RUNS, self._platform.backend
                )
                if self._execute(trial, place):
                    self._judge(trial, fault, policy, place)
                    self._ran[row.name, fault.phase, policy.label] += 1

    def _times(self, policy: Policy) -> int:
        """Return how often it is tried: once shows that the file admits what it holds."""
        return 1 if policy is QUALIFIED else self._num_trials

    def _rebuilds(self, fault: Fault, place: Path) -> bool:
        """Whether `auto` rebuilds groups here, which is tried, or nothing is replaced anyway."""
        mine = [
            each.asked
            for each in self._findings
            if each.policy is ALWAYS_L1
            and each.fault == fault
            and (place / RUNS / each.summary.name).is_dir()
        ]
        found = [each for asked in mine for each in asked]
        return fault.phase == "step" or evidence.asked_for_rebuild(found)

    def _execute(self, planned: RunSpec, place: Path) -> bool:
        """Run it, if there is time."""
        began = time.monotonic()
        if began - self._began + self._longest_s > self._limit_s:
            return False
        folder = place / RUNS / planned.name
        with self._progress.run(planned) as watch:
            status = supervisor.execute(
                planned, folder, on_event=watch.event, stall_s=_STALL_S, launch=self._forks
            )
            watch.ended(status)
        for name in (STATE, CHECKPOINTS):
            shutil.rmtree(folder / name, ignore_errors=True)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        return True

    def _judge(self, trial: RunSpec, fault: Fault, policy: Policy, place: Path) -> None:
        found = summarize.summarize(place)
        summary = next(each for each in found.runs if each.name == trial.name)
        self._findings.append(
            evidence.Finding(
                fault=fault,
                policy=policy,
                summary=summary,
                asked=evidence.asked(place / RUNS / trial.name),
                digests=evidence.final_roots(place / RUNS / trial.name, UPDATES),
                expected=evidence.final_roots(place / RUNS / "0-reference", UPDATES),
            )
        )

    def leave(self, rows: Sequence[Row], faults: Sequence[Fault], reason: str) -> None:
        """Say what was not tried."""
        reason = reason or f"the limit of {self._limit_s / 60:g} min was reached"
        for row in rows:
            for fault in faults:
                left = [
                    self._left((row.name, fault.phase, policy.label), self._times(policy))
                    for policy in POLICIES
                ]
                if any(left):
                    what = (
                        f"{row.name}, {fault.kind}@{fault.phase}, {', '.join(filter(None, left))}"
                    )
                    self._not_run.append(f"{what}: {reason}")

    def _left(self, place: tuple[str, str, str], times: int) -> str:
        """Name a policy with the number of its trials that are missing, if there are any."""
        missing = 0 if place in self._needless else times - self._ran[place]
        return f"{place[-1]} ({missing} of {times})" if missing else ""

    def envelope(self) -> Envelope:
        """Return what is proven so far."""
        entries, lost = evidence.entries(self._findings)
        return Envelope(
            stack=self._stack,
            entries=entries,
            not_run=(*self._not_run, *lost),
            made={
                "commit": self._environment["commit"] or "not known",
                "python": self._environment["python"],
                "processor": self._environment["processor"],
                "workload": self._base.workload,
                "seed": str(self._base.seed),
                "schedule": f"{UPDATES} updates, a checkpoint after update "
                f"{trials.CHECKPOINT_AT}, the fault after update {trials.FRONTIER} or in the next",
                "trials": str(self._num_trials),
                "seconds": f"{time.monotonic() - self._began:.0f}",
            },
        )
