"""How a run's wall time is divided, against hand-made event logs."""

from __future__ import annotations

from typing import Any

import pytest

from harness import metrics
from tests.unit import logs
from tests.unit.logs import Log

LOGS = {"uninterrupted": logs.uninterrupted, "repaired": logs.repaired, "restarted": logs.restarted}


def seconds(log: Log, *, wall: float) -> dict[str, float]:
    """The shares of a run of `wall` seconds, in seconds."""
    return {name: share * wall for name, share in metrics.shares(log.timeline()).items()}


def without(log: Log, event: str, **fields: Any) -> Log:
    """`log` without the events of that name and those fields."""
    log.events = [
        each
        for each in log.events
        if each.event != event
        or any(getattr(each, name) != value for name, value in fields.items())
    ]
    return log


class TestShares:
    """Where the wall time went."""

    def test_uninterrupted(self) -> None:
        """Start-up, updates, the checkpoint and what lies between make up an undisturbed run."""
        expected = {
            "start-up": 5.0,
            "productive": 5.0,
            "replay": 0.0,
            "discarded": 0.0,
            "checkpoint save": 0.5,
            "detection": 0.0,
            "recovery": 0.0,
            "other": 4.0,
        }

        assert pytest.approx(expected) == seconds(logs.uninterrupted(), wall=14.5)

    def test_repair_in_place(self) -> None:
        """The rank that waited for the absent one detects until its notice, then recovers."""
        expected = {
            "start-up": 5.0,
            "productive": 5.0,
            "replay": 0.0,
            "discarded": 0.0,
            "checkpoint save": 0.5,
            "detection": 3.0,
            "recovery": 0.5,
            "other": 3.5,
        }

        assert pytest.approx(expected) == seconds(logs.repaired(), wall=17.5)

    def test_restart_with_replay(self) -> None:
        """Recovery lasts until the first replayed update begins; what is replayed is a share."""
        expected = {
            "start-up": 5.0,
            "productive": 5.0,
            "replay": 2.0,
            "discarded": 0.0,
            "checkpoint save": 0.5,
            "detection": 3.0,
            "recovery": 5.5,
            "other": 5.5,
        }

        assert pytest.approx(expected) == seconds(logs.restarted(), wall=26.5)

    def test_fault_before_the_peers_commit(self) -> None:
        """A rank that is still in its update when another stays away detects from its commit on."""
        log = without(logs.repaired(), "fault")
        log.add(9.5, "fault", logs.ABSENT, update=3, role="absent")
        found = seconds(log, wall=17.5)

        assert pytest.approx(5.0) == found["productive"]
        assert pytest.approx(3.5) == found["detection"]

    def test_second_fault_is_detected_too(self) -> None:
        """Every planned fault of another rank begins a detection, not only the first."""
        log = without(without(logs.repaired(), "finish"), "end")
        log.add(17.5, "fault", logs.ABSENT, update=5, role="absent")
        log.add(20.5, "failure", logs.PEER, update=5).add(20.5, "notice", logs.PEER, update=5)
        log.update(21, 22, 6).supervise(23, "end", code=0)
        found = seconds(log, wall=23)

        assert pytest.approx(3.0 + 3.0) == found["detection"]
        assert pytest.approx(0.5 + 0.5) == found["recovery"]
        assert pytest.approx(23) == sum(found.values())

    def test_update_taken_back_is_discarded(self) -> None:
        """What was executed before the fault is lost work; then it is detection, and recovery."""
        log = logs.start(Log())
        log.add(11, "begin", update=4).add(12, "fault", 3, update=3, phase="backward")
        log.add(15, "failure", 1, update=4, error="RuntimeError: x").add(15, "notice", 1, update=3)
        log.add(15.5, "discard", update=4).update(16, 18, 4).add(19, "finish", update=4)
        found = seconds(log, wall=19)

        assert pytest.approx(1.0) == found["discarded"]
        assert pytest.approx(3.0) == found["detection"]
        assert pytest.approx(1.0) == found["recovery"]
        assert pytest.approx(3.0 + 2.0) == found["productive"]
        assert 0 == found["replay"]

    def test_update_cut_short_is_other(self) -> None:
        """An update that failed was neither productive nor replay."""
        log = logs.start(Log())
        log.add(11, "begin", update=4).add(12, "failure", 0, update=4, error="RuntimeError: x")
        log.supervise(15, "end", code=1)
        found = seconds(log, wall=15)

        assert pytest.approx(3.0) == found["productive"]
        assert pytest.approx(6.5) == found["other"]

    @pytest.mark.parametrize("name", LOGS)
    def test_add_up_wherever_the_run_ended(self, name: str) -> None:
        """A run that is killed after any of its events has shares that add up to 1."""
        events = sorted(LOGS[name]().events, key=lambda event: event.t)
        sums = []
        for count in range(1, len(events)):
            log = Log()
            log.events = events[:count]
            log.supervise(events[count - 1].t - logs.CLOCK + 0.5, "end")
            sums.append(sum(metrics.shares(log.timeline()).values()))

        assert pytest.approx([1.0] * (len(events) - 1)) == sums

    def test_of_the_time_to_the_slowest_finish(self) -> None:
        """What a rank does after the last one has finished is no part of the wall time."""
        log = without(logs.repaired(), "finish").add(17.0, "finish", 0, 1, update=5)
        log.add(17.5, "finish", 2, 3, update=5).add(18, "begin", logs.PEER, update=6)

        assert pytest.approx(3.5) == seconds(log, wall=17.5)["other"]

    def test_unfinished_run_is_divided_to_its_end(self) -> None:
        """Where one rank did not finish, the end of the processes counts."""
        log = without(logs.uninterrupted(), "finish", rank=2)

        assert pytest.approx(5.5) == seconds(log, wall=16)["other"]

    def test_none_without_an_end(self) -> None:
        """A supervisor that was killed before the ranks finished leaves nothing to divide."""
        log = without(without(logs.uninterrupted(), "finish"), "end")

        assert {} == metrics.shares(log.timeline())

    def test_critical_rank(self) -> None:
        """Time is divided on the first rank whose collective failed; without a fault on rank 0."""
        found = [metrics.critical_rank(make().timeline()) for make in LOGS.values()]

        assert [0, logs.PEER, logs.PEER] == found
