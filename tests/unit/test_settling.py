"""Waiting for what has only been issued to a device, which is not there."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch.distributed as dist

from accelpact import _communicator
from accelpact._boundary import Boundary
from accelpact._collectives import Call, Function, is_communication_failure
from accelpact._errors import Reason, UpdateInterrupted
from accelpact._intercept import Intercept
from accelpact._pact import Pact
from accelpact._settling import CollectiveFailed, Settling
from tests.unit import nccl_fakes as fakes

if TYPE_CHECKING:
    from accelpact import Rejected
    from accelpact._messages import Notice


class Control:
    """What peers tell."""

    def __init__(self) -> None:
        self.pending: Notice | Any = None
        self.taken_back = False

    def require_no_discard(self) -> None:
        """As the control plane does."""
        if self.taken_back:
            raise UpdateInterrupted("taken back")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fakes.Device:
    """A device that is not there."""
    return fakes.Device(monkeypatch)


@pytest.fixture
def group(device: fakes.Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group with a timeout of 0.2 s, known to torch."""
    assert device
    made = fakes.group()
    made._get_backend(fakes.CUDA).options._timeout = timedelta(seconds=0.2)
    fakes.register(monkeypatch, made, "cuda:nccl")
    return made


@pytest.fixture
def control() -> Control:
    """Peers that tell nothing."""
    return Control()


@pytest.fixture
def settling(control: Control, group: Any) -> Settling:
    """The waits of a rank whose model has one group."""
    peers: Any = control
    return Settling(peers, lambda: [group])


class TestUpdate:
    """Before an optimizer steps."""

    def test_waits_for_the_device(self, settling: Settling, device: fakes.Device) -> None:
        """And no longer than that."""
        device.idle.clear()
        fakes.later(0.05, device.idle.set)
        settling.await_update()

        assert device.idle.is_set()
        assert device.queries > 1

    def test_timeout(self, settling: Settling, device: fakes.Device) -> None:
        """The group's; the error is one of communication, and names the group."""
        device.idle.clear()
        with pytest.raises(CollectiveFailed, match="collectives of pair to complete") as found:
            settling.await_update()

        assert is_communication_failure(found.value)

    def test_peers_take_it_back(
        self, settling: Settling, device: fakes.Device, control: Control
    ) -> None:
        """Their notice ends the wait."""
        device.idle.clear()
        fakes.later(0.05, lambda: setattr(control, "taken_back", True))
        with pytest.raises(UpdateInterrupted):
            settling.await_update()

    def test_an_abort_is_no_completion(
        self, settling: Settling, device: fakes.Device, group: Any
    ) -> None:
        """The device is idle after it, and what it has computed is not the result."""
        _communicator.interrupt(group)
        assert device.idle.is_set()
        with pytest.raises(CollectiveFailed, match="was aborted") as found:
            settling.await_update()

        assert ("pair",) == found.value.groups

    def test_what_the_watchdog_saw(
        self, settling: Settling, device: fakes.Device, group: Any
    ) -> None:
        """It has aborted the communicator by itself."""
        assert device.idle.is_set()
        group._get_backend(fakes.CUDA).error = fakes.Error.TIMEOUT
        with pytest.raises(CollectiveFailed, match="has failed: TIMEOUT"):
            settling.await_update()

    def test_not_while_a_graph_is_captured(self, settling: Settling, device: fakes.Device) -> None:
        """Nothing runs then, and asking an event would end the capture."""
        device.idle.clear()
        device.is_capturing = True
        settling.await_update()

        assert 0 == device.queries

    def test_other_backends(
        self,
        settling: Settling,
        device: fakes.Device,
        group: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Where calls return when they are complete, nothing is waited for."""
        device.idle.clear()
        monkeypatch.setattr(
            group, "_get_backend", lambda _: SimpleNamespace(name=lambda: "gloo", options=None)
        )
        settling.await_update()

        assert 0 == device.queries


class TestCollective:
    """At a boundary."""

    def test_notice_of_the_same_group(
        self, settling: Settling, device: fakes.Device, control: Control, group: Any
    ) -> None:
        """A peer has failed in it: this rank must not wait for its own timeout."""
        device.idle.clear()
        control.pending = SimpleNamespace(group="another", by=3)
        fakes.later(0.05, lambda: setattr(control, "pending", SimpleNamespace(group="pair", by=3)))
        with pytest.raises(CollectiveFailed, match="group pair failed on rank 3"):
            settling.await_collective(group)

    def test_timeout(self, settling: Settling, device: fakes.Device, group: Any) -> None:
        """The group's."""
        device.idle.clear()
        with pytest.raises(CollectiveFailed, match=r"within 0\.2 s"):
            settling.await_collective(group)

    def test_completes(self, settling: Settling, device: fakes.Device, group: Any) -> None:
        """As soon as the device is there."""
        device.idle.clear()
        fakes.later(0.05, device.idle.set)
        settling.await_collective(group)

        assert device.idle.is_set()


class Work(dist.Work):
    """A collective under way."""

    def wait(self, *_: Any) -> bool:
        """Return when it was issued, as NCCL's does."""
        return True


class TestIntercepted:
    """What a script calls of torch.distributed."""

    @pytest.fixture
    def events(self) -> list[str]:
        """What happened, in order."""
        return []

    @pytest.fixture
    def intercept(self, events: list[str], group: Any) -> Intercept:
        """Stand-ins of a rank at a boundary that have looked for nothing to stand in for."""
        made = object.__new__(Intercept)
        pact: Any = SimpleNamespace(
            attempt=object(),
            boundary=Boundary(),
            control=SimpleNamespace(pending=None, require_no_discard=lambda: None),
            join_pending=lambda: None,
            redirects=SimpleNamespace(current=lambda given: given),
            settling=SimpleNamespace(
                await_collective=lambda given: events.append(f"awaited {given.group_name}")
            ),
        )
        assert group
        made._pact, made._inside, made._installed = pact, False, True
        return made

    def call(self, events: list[str], group: Any, result: object) -> Call:
        """Return a collective that is issued and returns `result`."""

        def issue(*, group: Any) -> object:
            assert group
            events.append("issued")
            return result

        function = Function(
            name="all_reduce", original=issue, key="group", position=0, in_place=None
        )
        return Call(function, (), {"group": group})

    def test_awaited_at_a_boundary(
        self, intercept: Intercept, events: list[str], group: Any
    ) -> None:
        """It counts as completed only then."""
        completed = intercept._pact.boundary.completed
        intercept._pact.settling.await_collective = lambda _: events.append(
            f"awaited, {completed['pair']} completed"
        )
        intercept._collective(self.call(events, group, None))

        assert ["issued", "awaited, 0 completed"] == events
        assert 1 == completed["pair"]

    def test_not_awaited_in_an_update(
        self, intercept: Intercept, events: list[str], group: Any
    ) -> None:
        """There the host runs ahead, to the optimizer's step."""
        intercept._pact.boundary.entered = True
        intercept._collective(self.call(events, group, None))

        assert ["issued"] == events

    def test_awaited_when_the_script_waits(
        self, intercept: Intercept, events: list[str], group: Any
    ) -> None:
        """One that the script goes on beside."""
        work = intercept._collective(self.call(events, group, Work()))
        assert ["issued"] == events
        work.wait()

        assert ["issued", "awaited pair"] == events

    def test_part_of_another_is_awaited_too(
        self, intercept: Intercept, events: list[str], group: Any
    ) -> None:
        """Collectives of objects read a size from the device before they go on."""
        inner = self.call(events, group, None)
        outer = self.call(events, group, None)
        outer.make = lambda: intercept._collective(inner)  # type: ignore[method-assign]
        intercept._collective(outer)

        assert ["issued", "awaited pair", "awaited pair"] == events
        assert 1 == intercept._pact.boundary.completed["pair"]


class TestBeforeStep:
    """What the runtime does when the device has nothing to step with."""

    def pact(self, *, drive: str, attempt: object) -> Any:
        """Return a rank whose collectives of group `pair` have failed."""

        def fail() -> None:
            raise CollectiveFailed("it was aborted", "pair")

        made: Any = object.__new__(Pact)
        made.settings = SimpleNamespace(drive=drive)
        made.attempt, made.rank, made.boundary = attempt, 1, Boundary(4)
        made.settling = SimpleNamespace(await_update=fail)
        made.control = SimpleNamespace(before_step=lambda: pytest.fail("the step must not begin"))
        return made

    @pytest.mark.parametrize(("drive", "attempt"), [("auto", object()), ("manual", None)])
    def test_left_to_who_can_do_it_again(self, drive: str, attempt: object) -> None:
        """It is raised, and the group is noted as one to replace."""
        pact = self.pact(drive=drive, attempt=attempt)
        with pytest.raises(CollectiveFailed):
            pact._before_step()

        assert {"pair"} == pact.boundary.poisoned

    def test_refused_if_nobody_can(self) -> None:
        """Nothing is committed, and all that depend on this rank end."""
        pact = self.pact(drive="auto", attempt=None)
        refused = []

        def refuse(rejection: Rejected, group: str, ranks: list[int], *, trigger: str) -> NoReturn:
            refused.append((rejection.reason, rejection.detail, group, ranks, trigger))
            raise SystemExit

        pact.refuse = refuse
        with pytest.raises(SystemExit):
            pact._before_step()

        assert [
            (
                Reason.UNCOMMITTED_BOUNDARY,
                "update 5 was under way when it was aborted",
                "unknown",
                [1],
                "exception",
            )
        ] == refused
