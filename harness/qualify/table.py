"""The trials of an envelope as the paper's Table II: policy by wrapper and phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelpact._envelope import DISCARD, L1, title
from harness.qualify.evidence import NONE
from harness.qualify.trials import ALWAYS_L1, ALWAYS_L2, NO_RECOVERY, QUALIFIED
from harness.report import paper

if TYPE_CHECKING:
    from accelpact._envelope import Entry, Envelope, Trial

_ORDER = (NO_RECOVERY.name, ALWAYS_L1.name, ALWAYS_L2.name, QUALIFIED.name)


def render(envelope: Envelope) -> str:
    """Write every trial of the file as Markdown, and nothing that is not in it."""
    lines = [
        "# Envelope: what was proven, and what it admits",
        "",
        f"Stack: {title(envelope.stack)}.",
        *(f"{name}: {text}." for name, text in envelope.made.items()),
        "",
        (
            "| held by | struck in | policy | action | valid | false recoveries | replayed | "
            f"discarded | {paper.SOURCE}, {paper.POLICIES_PLACE} |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in envelope.entries:
        for policy in _ORDER:
            for action in dict.fromkeys(t.action for t in entry.trials if t.policy == policy):
                own = [t for t in entry.trials if (t.policy, t.action) == (policy, action)]
                lines.append(_row(entry, policy, action, own))
    lines += [
        "",
        (
            "valid: the job reached its last update by that action, and the state of every rank "
            "equals the uninterrupted run's bit for bit. False recoveries: it acted in place, and "
            "the state is another or the job did not end."
        ),
        f"The paper's figures: {paper.POLICIES_CONDITIONS}.",
        "",
        "Admitted:",
        *(_admitted(entry) for entry in envelope.entries),
    ]
    reasons = _reasons(envelope)
    if reasons:
        lines += ["", "What was refused or failed says:", *reasons]
    if envelope.not_run:
        lines += ["", "Not run:", *(f"- {each}" for each in envelope.not_run)]
    return "\n".join(lines) + "\n"


def _row(entry: Entry, policy: str, action: str, trials: list[Trial]) -> str:
    in_place = action in (L1, DISCARD)
    good = sum(action != NONE and trial.proves(action) for trial in trials)
    false = sum(in_place and trial.verdict == "fail" for trial in trials)
    like_the_papers = entry.key.profile.startswith("ddp, eager") and entry.key.phase == "boundary"
    cells = [
        entry.key.profile,
        entry.key.phase,
        policy,
        action if action != NONE else "-",
        f"{good}/{len(trials)}",
        str(false),
        str(sum(trial.replayed_updates for trial in trials)),
        str(sum(trial.discarded_updates for trial in trials)),
        paper.POLICIES[policy] if like_the_papers else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _admitted(entry: Entry) -> str:
    actions = ", ".join(entry.actions) or "nothing"
    return f"- {entry.key.profile}, {entry.key.phase}: {actions}"


def _reasons(envelope: Envelope) -> list[str]:
    found = {
        f"- {trial.policy}, {trial.fault}: {' '.join(trial.reason.split())}": None
        for entry in envelope.entries
        for trial in entry.trials
        if trial.reason
    }
    return list(found)
