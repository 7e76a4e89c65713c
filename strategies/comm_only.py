"""The paper's ablation: a new communicator, a passing probe, and nothing rebound."""

from __future__ import annotations

from strategies.accelpact import AccelPact


class CommunicatorOnly(AccelPact):
    """AccelPact without any framework: it must fail in the next synchronized backward."""

    name = "comm_only"
    summary = "ablation: communicator replaced, probe passes, no reference rebound; must fail"
    expected = "fail"
    frameworks = ()
    audit = False
