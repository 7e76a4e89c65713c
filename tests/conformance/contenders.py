"""Contenders that are wrong in one way each. Found by entry point, as another package's are."""

from __future__ import annotations

import torch
import torch.distributed as dist

from strategies import Failure, Job, Outcome, Strategy
from strategies.accelpact import AccelPact

FAULTS = {
    "drops-moment": ("DropsMoment", "moments"),
    "shares-rng": ("SharesRng", "rng"),
    "only-claims": ("OnlyClaims", "trained_on"),
    "leaks-group": ("LeaksGroup", "left_behind"),
    "skips-batch": ("SkipsBatch", "cursor"),
}
"""Name -> its class here, and the check that names its fault."""


class OnceRight(AccelPact):
    """Like the right one, and struck between updates alone: one recovery shows what is wrong."""

    expected_inside = "rejected"


class DropsMoment(OnceRight):
    """Recovers, and loses the second moment of one parameter."""

    name = "drops-moment"

    def recover(self, job: Job, failure: Failure) -> Outcome:
        outcome = super().recover(job, failure)
        moments = [held["exp_avg_sq"] for held in job.optimizer.state.values()]
        max(moments, key=torch.Tensor.numel).zero_()
        return outcome


class SharesRng(OnceRight):
    """Recovers, and gives every rank that did the random state of rank 0."""

    name = "shares-rng"

    def committed(self, job: Job) -> None:
        super().committed(job)
        if job.attempt.layout.rank == 0:
            state = bytes(torch.get_rng_state().tolist())
            job.attempt.store().set(f"rng/{job.frontier}", state)

    def recover(self, job: Job, failure: Failure) -> Outcome:
        outcome = super().recover(job, failure)
        state = job.attempt.store().get(f"rng/{job.frontier}")
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return outcome


class OnlyClaims(Strategy):
    """Says that the rank is where it should be in the end, and trains no more."""

    name = "only-claims"
    summary = "claims"

    def recover(self, job: Job, failure: Failure) -> Outcome:
        del failure
        job.frontier += 100
        return Outcome.FORGONE


class LeaksGroup(OnceRight):
    """Recovers, and leaves one more group registered."""

    name = "leaks-group"

    def recover(self, job: Job, failure: Failure) -> Outcome:
        outcome = super().recover(job, failure)
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return outcome


class SkipsBatch(OnceRight):
    """Recovers, and goes past one microbatch that nobody has trained on."""

    name = "skips-batch"

    def recover(self, job: Job, failure: Failure) -> Outcome:
        outcome = super().recover(job, failure)
        job.loader.load_state_dict({"cursor": job.loader.state_dict()["cursor"] + 2})
        return outcome
