"""Faults inside an update: where and when a rank halts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.faults import halting, inside
from harness.spec import Fault

MICROBATCHES = 3
UPDATE = 5


class Notices:
    """Plans one fault, and notes after which step the rank halted."""

    def __init__(self, phase: str, kind: str = "absent") -> None:
        self.fault = Fault(kind=kind, phase=phase, update=UPDATE)
        self.steps: list[str] = []
        self.halted_after: list[str] = []

    def due(self, job: Any) -> Fault | None:
        return self.fault if job.frontier == self.fault.frontier else None

    def strike(self, _job: Any, _fault: Fault) -> str:
        self.halted_after.append(self.steps[-1])
        return "notice"

    def fail(self, _job: Any, _fault: Fault) -> None:
        raise ConnectionError


def execute(phase: str, *, frontier: int = UPDATE - 1) -> Notices:
    """Execute an update of some microbatches; every module and every gradient is a step."""
    notices = Notices(phase)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for place, module in enumerate(model):
        module.register_forward_hook(lambda *_, place=place: notices.steps.append(f"out {place}"))
        module.weight.register_hook(lambda _, place=place: notices.steps.append(f"grad {place}"))
    job: Any = SimpleNamespace(model=model, frontier=frontier)
    with halting(job, notices, microbatches=MICROBATCHES):  # type: ignore[arg-type]
        for microbatch in range(MICROBATCHES):
            notices.steps.append(f"microbatch {microbatch}")
            model(torch.ones(1, 2)).sum().backward()
    notices.steps.append("end")
    model(torch.ones(1, 2)).sum().backward()
    return notices


class TestHalting:
    @pytest.mark.parametrize(("phase", "after"), [("forward", "out 1"), ("backward", "grad 3")])
    def test_halts_once_in_the_middle_of_the_last_microbatch(self, phase: str, after: str) -> None:
        """The module before the middle one, or the one behind it, has just done its part."""
        notices = execute(phase)
        last = notices.steps.index(f"microbatch {MICROBATCHES - 1}")

        assert [after] == notices.halted_after
        assert after in notices.steps[last:]

    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_other_updates_are_left_alone(self, phase: str) -> None:
        """It strikes in the planned update only."""
        assert [] == execute(phase, frontier=UPDATE).halted_after

    def test_compiled_code_takes_no_notice_of_hooks(self) -> None:
        """So a rank halts at the module in the middle of those that are not compiled."""
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
        for place in (2, 3, 4):
            model[place].compile(backend="eager")

        assert model[5] is inside._middle(model)

    def test_step_fails_when_weights_are_written(self) -> None:
        """Who executes the update again would apply it twice."""
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        notices = Notices("step", kind="error")
        job: Any = SimpleNamespace(
            model=nn.Sequential(nn.Linear(1, 1)), optimizer=optimizer, frontier=UPDATE - 1
        )
        parameter.grad = torch.ones(1)
        with (
            pytest.raises(ConnectionError),
            halting(job, notices, microbatches=1),  # type: ignore[arg-type]
        ):
            optimizer.step()
        assert 0.0 == parameter.item()
        optimizer.step()

        assert -1.0 == parameter.item()

    def test_boundary_is_none_of_its_business(self) -> None:
        """A fault between updates strikes elsewhere."""
        assert [] == execute("boundary", frontier=UPDATE).halted_after
