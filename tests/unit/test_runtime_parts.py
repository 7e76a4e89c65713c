"""The small parts of the runtime, each alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from accelpact import Settings, _discover
from accelpact.__main__ import main
from accelpact._boundary import Boundary
from accelpact._collectives import Call, functions, is_communication_failure
from accelpact._events import EventLog
from accelpact._redirect import Redirects

if TYPE_CHECKING:
    from pathlib import Path


class _Thing:
    pass


class _Derived(_Thing):
    pass


class TestLiving:
    """What is found on the heap."""

    def test_objects_of_the_class_and_of_derived_ones(self) -> None:
        """However it is held; the classes themselves, and other objects, are not among them."""
        made = {"one": _Thing(), "other": (_Derived(),)}
        found = list(_discover.living(__name__, "_Thing"))

        assert {made["one"], *made["other"]} == set(found)
        assert 2 == len(found)

    def test_module_that_was_never_imported(self) -> None:
        """It has made nothing, and is not imported for that."""
        assert [] == list(_discover.living("no.such.module", "Thing"))


class TestSettings:
    """What can be set."""

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"deadline": 0}, "deadline: expected seconds above 0; found 0"),
            ({"patience": -1.0}, "patience: expected seconds above 0; found -1.0"),
            (
                {"replacement": "swap"},
                "replacement: expected auto, rebuild, reconfigure; found 'swap'",
            ),
            ({"drive": "me"}, "drive: expected auto, manual; found 'me'"),
        ],
    )
    def test_names_the_field(self, setting: dict[str, object], message: str) -> None:
        """The error says which, what was expected and what was found."""
        with pytest.raises(ValueError, match=message):
            Settings(**setting)  # type: ignore[arg-type]


class TestCommandLine:
    """`python -m accelpact`."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere.py"], "script: expected a Python file; found no file nowhere.py"),
            (["--deadline", "0", "nowhere.py"], "deadline: expected seconds above 0"),
            ([], "the following arguments are required: script"),
        ],
    )
    def test_mistake_is_one_message(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Status 2, and no traceback."""
        with pytest.raises(SystemExit) as ended:
            main(arguments)

        assert 2 == ended.value.code
        assert message in capsys.readouterr().err


class TestBoundary:
    """Where a rank is."""

    def test_gradients_that_the_step_applied_are_not_outstanding(self) -> None:
        """Others are, even with the same values."""
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        boundary = Boundary()
        boundary.notice_forward(layer)
        boundary.notice_step(optimizer)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        applied = [("w", layer.weight.grad), ("b", layer.bias.grad)]
        assert boundary.entered

        assert [] == boundary.outstanding(applied)
        assert layer.weight.grad is not None
        assert ["w"] == boundary.outstanding([("w", layer.weight.grad.clone())])
        layer.weight.grad.add_(1)
        assert ["w"] == boundary.outstanding(applied)

    def test_evaluation_does_not_enter_an_update(self) -> None:
        """A forward pass without gradients leaves the boundary."""
        layer = torch.nn.Linear(2, 2)
        boundary = Boundary()
        boundary.notice_forward(layer)
        with torch.no_grad():
            layer(torch.ones(1, 2))
        assert boundary.declared
        layer(torch.ones(1, 2))

        assert not boundary.declared


class TestCollectives:
    """Functions of torch.distributed."""

    def test_have_their_group_where_it_is_said(self) -> None:
        """By name and by position, the group of a call can be read and replaced."""
        known = {each.name: each for each in functions()}
        first, second = object(), object()
        by_name = Call(known["all_reduce"], (torch.ones(1),), {"group": first})
        by_place = Call(known["all_reduce"], (torch.ones(1), dist.ReduceOp.SUM, first), {})
        for call in (by_name, by_place):
            assert first is call.group
            call.group = second  # type: ignore[assignment]
            assert second is call.group
        assert {"all_reduce", "barrier", "broadcast", "get_rank"} <= known.keys()
        assert not known["get_rank"].is_collective

    def test_input_of_a_failed_reduction_is_restored(self) -> None:
        """What is both input and output gets its bits back."""
        known = {each.name: each for each in functions()}
        value = torch.tensor([1.0, -0.0])
        call = Call(known["all_reduce"], (value,), {})
        copies = call.copy_input()
        value.fill_(7)
        call.restore_input(copies)

        assert [1.0, -0.0] == value.tolist()
        assert value.signbit().tolist() == [False, True]

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), True),
            (dist.DistBackendError("NCCL error"), True),
            (ValueError("gloo: bad shape"), False),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        ],
    )
    def test_a_users_mistake_is_no_communication_failure(
        self, error: Exception, *, expected: bool
    ) -> None:
        """Only a backend's errors are."""
        assert expected == is_communication_failure(error)


class TestRedirects:
    """Calls with retired groups."""

    def test_follow_later_replacements(self) -> None:
        """The first group leads to the last; a group that is gone leaves no entry."""
        groups = [dist.ProcessGroup(dist.HashStore(), 0, 1) for _ in range(3)]
        redirects = Redirects()
        redirects.add(groups[0], groups[1])
        redirects.add(groups[1], groups[2])

        assert all(groups[2] is redirects.current(group) for group in groups)
        assert redirects.current(None) is None


class TestEventLog:
    """The runtime's record."""

    def test_every_event_has_all_fields(self, tmp_path: Path) -> None:
        """What an event does not speak of is empty, not missing."""
        log = EventLog(str(tmp_path / "new"), rank=3)
        log.write("attach", ranks=[0, 1])
        log.close()
        log.write("exit")
        (entry,) = map(json.loads, (tmp_path / "new" / "rank3.jsonl").read_text().splitlines())

        assert ("attach", 3, [0, 1], {}) == tuple(
            entry[key] for key in ("event", "rank", "ranks", "phases_ms")
        )
        assert {"rebound": [], "redirected": [], "left": []} == entry["holders"]

    def test_without_a_folder_nothing_is_written(self, tmp_path: Path) -> None:
        """The variable is not set."""
        EventLog(None, rank=0).write("attach")

        assert [] == list(tmp_path.iterdir())


def test_functions_are_those_of_this_torch() -> None:
    """None that takes a group and is public is left out."""
    names = {each.name for each in functions()}

    assert {"send", "recv", "get_world_size", "destroy_process_group"} <= names
    assert all(hasattr(c10d, name) for name in names)
