"""Measures of a run, against hand-made event logs."""

from __future__ import annotations

from typing import Any

import pytest

from harness import metrics, summarize
from harness.records import Ledger, Resources
from harness.timeline import Timeline
from tests.unit import logs
from tests.unit.logs import Log

LOGS = {"uninterrupted": logs.uninterrupted, "repaired": logs.repaired, "restarted": logs.restarted}


def times(log: Log) -> dict[str, Any]:
    """Everything that the summary says in seconds about a run that reached its frontier."""
    return summarize._times(log.timeline(), reached=True)


def without(log: Log, event: str, **fields: Any) -> Log:
    """`log` without the events of that name and those fields."""
    log.events = [
        each
        for each in log.events
        if each.event != event
        or any(getattr(each, name) != value for name, value in fields.items())
    ]
    return log


class TestGoodput:
    """Tokens of the committed history over wall time."""

    @pytest.mark.parametrize(
        ("name", "wall_s"), [("uninterrupted", 14.5), ("repaired", 17.5), ("restarted", 26.5)]
    )
    def test_by_hand(self, name: str, wall_s: float) -> None:
        """5 updates of 4 ranks with 128 tokens each count once, replayed or not."""
        found = times(LOGS[name]())

        assert 2560 == metrics.committed(LOGS[name]().timeline())
        assert pytest.approx(wall_s) == found["wall_s"]
        assert pytest.approx(1.5) == found["teardown_s"]
        assert pytest.approx(2560 / wall_s) == found["goodput_tokens_s"]
        assert pytest.approx(5 / wall_s) == found["runtime_goodput"]

    def test_only_of_runs_that_got_there(self) -> None:
        """A run that ended early has no wall time and no goodput to compare."""
        found = summarize._times(logs.uninterrupted().timeline(), reached=False)

        assert found.get("wall_s") is None
        assert found.get("goodput_tokens_s") is None
        assert found["runtime_goodput"] is None

    def test_update_that_one_rank_lacks_is_not_committed(self) -> None:
        """The committed history ends where the last rank's does."""
        log = without(logs.uninterrupted(), "commit", update=5, rank=2)

        assert 4 == log.timeline().committed
        assert 4 * 4 * 128 == metrics.committed(log.timeline())

    def test_curve_counts_an_update_once(self) -> None:
        """Replayed updates do not move the curve; each point is the slowest rank's commit."""
        expected = [(0.0, 0), (6, 512), (8, 1024), (10, 1536), (24, 2048), (26, 2560)]
        repaired = metrics.curve(logs.repaired().timeline())

        assert expected == metrics.curve(logs.restarted().timeline())
        assert pytest.approx((15.05, 2048)) == repaired[4]


class TestReplay:
    """Updates that were executed and committed again."""

    @pytest.mark.parametrize(
        ("name", "replayed"), [("uninterrupted", 0), ("repaired", 0), ("restarted", 2)]
    )
    def test_counted(self, name: str, replayed: int) -> None:
        """Updates between the checkpoint and the fault are replayed by a restart alone."""
        assert replayed == metrics.replayed_updates(LOGS[name]().timeline())

    def test_of_the_rank_with_most(self) -> None:
        """One rank that replays is enough."""
        log = logs.uninterrupted().update(15, 15.5, 5, 2)

        assert 1 == metrics.replayed_updates(log.timeline())


class TestWayBack:
    """Seconds from the fault to each milestone."""

    def test_repair_in_place(self) -> None:
        """The absent rank has its notice last and begins last; the frontier is everybody's."""
        found = times(logs.repaired())

        assert pytest.approx(10.5) == found["fault_s"]
        assert pytest.approx(3.1) == found["detection_s"]
        assert pytest.approx(3.6) == found["fault_to_resume_s"]
        assert pytest.approx(4.55) == found["fault_to_next_update_s"]
        assert pytest.approx(6.5) == found["fault_to_frontier_s"]

    def test_restart(self) -> None:
        """Neither a replayed update nor the begin that was cut short ends the way."""
        found = times(logs.restarted())

        assert pytest.approx(3.1) == found["detection_s"]
        assert pytest.approx(12.7) == found["fault_to_resume_s"]
        assert pytest.approx(13.5) == found["fault_to_next_update_s"]
        assert pytest.approx(15.5) == found["fault_to_frontier_s"]

    def test_slowest_rank_is_healthy(self) -> None:
        """A healthy rank that begins last decides, like any other."""
        log = without(logs.repaired(), "begin", update=4, rank=0).add(14.5, "begin", 0, update=4)

        assert pytest.approx(4.0) == times(log)["fault_to_resume_s"]

    def test_begin_after_the_commit_does_not_count(self) -> None:
        """The begin that led to the commit counts, not one of a later replay."""
        log = logs.repaired().add(18, "begin", 2, update=4)

        assert pytest.approx(3.6) == times(log)["fault_to_resume_s"]

    def test_committed_again_later(self) -> None:
        """An update counts from the first time on that every rank has it."""
        found = times(logs.repaired().commit(17.2, 4, 0).commit(17.2, 5, 0))

        assert pytest.approx(4.55) == found["fault_to_next_update_s"]
        assert pytest.approx(6.5) == found["fault_to_frontier_s"]

    def test_none_if_a_rank_never_got_there(self) -> None:
        """As long as one rank lacks update F + 1 nothing has resumed."""
        log = without(logs.repaired(), "commit", update=4, rank=0)
        found = summarize._times(log.timeline(), reached=False)

        assert pytest.approx(3.1) == found["detection_s"]
        assert found["fault_to_resume_s"] is None
        assert found["fault_to_next_update_s"] is None
        assert found["fault_to_frontier_s"] is None

    def test_notice_before_the_fault_is_another_one(self) -> None:
        """Only notices that follow the fault end its detection."""
        log = without(logs.repaired(), "notice").add(9, "notice", 0, update=3)

        assert times(log)["detection_s"] is None

    def test_without_fault(self) -> None:
        """An uninterrupted run has no way back."""
        found = times(logs.uninterrupted())

        assert not {name for name in found if name.startswith(("fault_", "detection_"))}


class TestPhases:
    """What the way from notice to next update consists of."""

    def test_restart_tiles_the_way(self) -> None:
        """Phases of a restart are cut where the last rank got to, and add up exactly."""
        log = logs.restarted()
        expected = {
            "restart": 1600,
            "import": 2000,
            "connect": 300,
            "build": 500,
            "restore": 750,
            "replay": 4450,
            "next update": 800,
        }
        found, way = metrics.phases_ms(log.timeline()), times(log)
        recovery_s = way["fault_to_resume_s"] - way["detection_s"]
        next_s = way["fault_to_next_update_s"] - way["fault_to_resume_s"]

        assert pytest.approx(expected) == found
        assert pytest.approx(recovery_s * 1e3) == sum(found.values()) - found["next update"]
        assert pytest.approx(next_s * 1e3) == found["next update"]

    def test_restart_in_process(self) -> None:
        """Where no new interpreter starts, the restart ends when the ranks are connected."""
        log = without(without(logs.restarted(), "process", attempt=1), "imported", attempt=1)
        found = metrics.phases_ms(log.timeline())

        assert {"restart", "build", "restore", "replay", "next update"} == found.keys()
        assert pytest.approx(3900) == found["restart"]
        assert pytest.approx(9600) == sum(found.values()) - found["next update"]

    def test_restart_of_one_replica(self) -> None:
        """Only the ranks that were started again are waited for, and nothing is replayed."""
        expected = {
            "restart": 750,
            "import": 2000,
            "connect": 500,
            "build": 500,
            "restore": 500,
            "heal": 500,
            "resume": 250,
            "next update": 1250,
        }

        assert pytest.approx(expected) == metrics.phases_ms(logs.healed().timeline())
        assert 0 == metrics.replayed_updates(logs.healed().timeline())

    def test_restart_that_began_before_the_last_notice(self) -> None:
        """What was over by then belongs to the detection; the rest is cut as always."""
        log = logs.healed().add(13.75, "notice", 0, update=3)
        expected = {
            "restart": 250,
            "build": 500,
            "restore": 500,
            "heal": 500,
            "resume": 250,
            "next update": 1250,
        }

        assert pytest.approx(expected) == metrics.phases_ms(log.timeline())

    def test_discarded_is_not_replayed(self) -> None:
        """What is executed and thrown away before the next update has its own name."""
        log = without(logs.repaired(), "phase").add(13.7, "begin", logs.PEER, update=4)
        log.add(13.9, "discard", logs.PEER, update=4)

        assert {"discarded", "next update"} == metrics.phases_ms(log.timeline()).keys()

    def test_repair_is_the_slowest_ranks(self) -> None:
        """Phases are those of the rank that took longest in all, and the rest has a name."""
        expected = {"guard": 0.1, "rebuild": 2.0, "resume": 497.9, "next update": 950}

        assert pytest.approx(expected) == metrics.phases_ms(logs.repaired().timeline())

    def test_none_without_fault(self) -> None:
        """Nothing to divide where nothing failed."""
        assert {} == metrics.phases_ms(logs.uninterrupted().timeline())

    def test_repair_and_floor(self) -> None:
        """A repair lasts from the last member's start to the last release; a floor is a median."""
        timeline = logs.repaired().timeline()

        assert pytest.approx(1.9) == metrics.repair_ms(timeline)
        assert pytest.approx(2.0) == metrics.floor_ms(timeline)

    def test_repair_that_nobody_started(self) -> None:
        """Phases without the call that they belong to give no duration."""
        log = without(logs.repaired(), "recover", rank=logs.PEER)

        assert metrics.repair_ms(log.timeline()) is None

    def test_no_repair_no_floor(self) -> None:
        """A restart has neither."""
        timeline = logs.restarted().timeline()

        assert metrics.repair_ms(timeline) is None
        assert metrics.floor_ms(timeline) is None

    def test_references(self) -> None:
        """Every rank of the repaired group says what it rebound and what was left."""
        found = metrics.references(logs.repaired().timeline())

        assert [(logs.PEER, 5, 0), (logs.ABSENT, 5, 0)] == [
            (each.rank, each.rebound, each.left) for each in found
        ]
        assert ["root"] == found[0].holders


class TestLedger:
    """Every sample's place in the committed history."""

    @pytest.mark.parametrize("name", LOGS)
    def test_complete(self, name: str) -> None:
        """A history in which the last commit of an update counts lacks nothing, has none twice."""
        assert Ledger(missing=0, duplicated=0) == metrics.data_ledger(LOGS[name]().timeline())

    def test_skipped_place(self) -> None:
        """A place that one rank skipped in its last word on an update is missing."""
        log = logs.restarted()
        log.events = [
            logs.changed(event, samples=[16])
            if (event.event, event.update, event.rank, event.attempt) == ("commit", 3, 0, 1)
            else event
            for event in log.events
        ]

        assert Ledger(missing=1, duplicated=0) == metrics.data_ledger(log.timeline())

    def test_place_served_twice(self) -> None:
        """A rank that takes another's samples leaves its own out and repeats the other's."""
        log = logs.uninterrupted()
        log.events = [
            logs.changed(event, samples=logs.places(4, 0))
            if (event.event, event.update, event.rank) == ("commit", 4, 1)
            else event
            for event in log.events
        ]

        assert Ledger(missing=2, duplicated=2) == metrics.data_ledger(log.timeline())

    def test_first_execution_does_not_count(self) -> None:
        """What an update that was replayed had consumed before is no part of the history."""
        log = logs.restarted()
        log.events = [
            logs.changed(event, samples=[7, 7])
            if (event.event, event.update, event.attempt) == ("commit", 3, 0)
            else event
            for event in log.events
        ]

        assert Ledger(missing=0, duplicated=0) == metrics.data_ledger(log.timeline())


class TestUpdateSeconds:
    """How long an update takes."""

    def test_leaves_out_the_first_and_the_one_after_the_fault(self) -> None:
        """Of 9, 1, 2, 50 and 4 s, the 9 are lazy initialization and the 50 hold the repair."""
        log = Log().update(0, 9, 1).update(10, 11, 2).update(12, 14, 3)
        log.add(14.5, "fault", logs.ABSENT, update=3)
        log.update(15, 65, 4).update(66, 70, 5)

        assert pytest.approx(2.0) == metrics.update_seconds(log.timeline())

    def test_leaves_out_the_first_after_a_restart(self) -> None:
        """Every attempt pays for its own first update."""
        log = Log().update(0, 9, 1).update(10, 11, 2)
        log.update(20, 40, 2, attempt=1).update(41, 44, 3, attempt=1)

        assert pytest.approx(2.0) == metrics.update_seconds(log.timeline())

    def test_of_the_slowest_rank(self) -> None:
        """An update lasts as long as its last rank takes."""
        log = Log().update(0, 1, 1).update(2, 3, 2, 0, 1, 2).update(2, 5, 2, 3)

        assert pytest.approx(3.0) == metrics.update_seconds(log.timeline())

    def test_none_of_nothing(self) -> None:
        """One update alone is the first one."""
        assert metrics.update_seconds(Log().update(0, 1, 1).timeline()) is None
        assert metrics.update_seconds(Timeline([], world_size=4)) is None


class TestResources:
    """What the processes hold."""

    def test_largest_over_ranks_last_of_attempts(self) -> None:
        """A rank's last attempt counts, the largest rank is shown, and before comes first."""
        records = [
            self.record(rank=0, attempt=0, at="after", threads=99),
            self.record(rank=0, attempt=1, at="after", threads=7, device_bytes=5),
            self.record(rank=1, attempt=1, at="after", threads=8, descriptors=41),
            self.record(rank=0, attempt=0, at="before", threads=6),
        ]
        found = metrics.resources(records)

        assert ["before", "after"] == list(found)
        assert {"threads": 6, "descriptors": 40, "rss_bytes": 1000, "groups": 3} == found["before"]
        assert 8 == found["after"]["threads"]
        assert 41 == found["after"]["descriptors"]
        assert 5 == found["after"]["device_bytes"]

    @staticmethod
    def record(**fields: Any) -> Resources:
        return Resources(**{"t": 1.0, "descriptors": 40, "rss_bytes": 1000, "groups": 3, **fields})
