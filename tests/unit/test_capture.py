"""What is captured at a boundary, and putting it back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accelpact._capture import Capturing


class Cursor:
    """A loader that counts, and changes the dictionary it has handed out."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"cursor": 0, "order": [3, 1, 2]}

    def advance(self) -> None:
        self.state["cursor"] += 1
        self.state["order"].reverse()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def draw() -> list[Any]:
    """Return the next numbers of every generator; numpy's normal deviates come in pairs."""
    return [
        torch.rand(7).tolist(),
        torch.randn(20).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(),  # noqa: NPY002  the global generator is what is captured
        np.random.rand(3).tolist(),  # noqa: NPY002
    ]


class TestCapture:
    """Round trips."""

    @pytest.mark.parametrize("before", range(4))
    def test_restores_every_generator_bitwise(self, before: int) -> None:
        """The numbers after a boundary come again, as often as it is restored."""
        capturing = Capturing()
        for _ in range(before):
            draw()
            capturing.take(0)
        captured = capturing.take(5)
        expected = [draw(), draw()]
        for _ in range(2):
            captured.restore()

            assert expected == [draw(), draw()]
        assert 5 == captured.frontier

    def test_draws_no_number(self) -> None:
        """Numbers are the same with a capture between them."""
        capturing = Capturing()
        start = capturing.take(0)
        expected = [draw(), draw()]
        start.restore()
        found = [draw()]
        capturing.take(1)
        found.append(draw())

        assert expected == found

    def test_is_of_its_own_boundary(self) -> None:
        """An earlier capture stays what it was, also when numpy alone has moved."""
        capturing = Capturing()
        first = capturing.take(0)
        expected = draw()
        np.random.rand()  # noqa: NPY002
        capturing.take(1)
        first.restore()

        assert expected == draw()

    def test_sees_a_waiting_deviate_go(self) -> None:
        """Handing out the second of a pair of normal deviates does not move numpy's generator."""
        np.random.seed(1)  # noqa: NPY002
        capturing = Capturing()
        np.random.standard_normal()  # noqa: NPY002
        capturing.take(0)
        np.random.standard_normal()  # noqa: NPY002
        captured = capturing.take(1)
        expected = draw()
        captured.restore()

        assert expected == draw()

    def test_is_kilobytes(self) -> None:
        """Torch's state is 5 kB, numpy's 2.5 kB, and Python's 625 numbers."""
        captured = Capturing().take(0)

        assert captured.cpu.nbytes < 6000
        assert 624 == captured.numpy["state"]["key"].size
        assert 625 == len(captured.python[1])


class TestLoader:
    """The position in the data."""

    def test_goes_back_as_often_as_restored(self) -> None:
        """Nothing that the loader does later reaches what was captured."""
        loader = Cursor()
        loader.advance()
        captured = Capturing(loader).take(1)
        expected = {"cursor": 1, "order": [2, 1, 3]}
        for _ in range(2):
            loader.advance()
            captured.restore()

            assert expected == loader.state

    @pytest.mark.parametrize(
        ("loader", "message"),
        [
            ([1], "found a list without state_dict and load_state_dict$"),
            (torch.utils.data.DataLoader([1]), "found a DataLoader without state_dict and load"),
            (type("Half", (Cursor,), {"load_state_dict": 3})(), "a Half without load_state_dict$"),
        ],
    )
    def test_without_state_dict_is_refused(self, loader: Any, message: str) -> None:
        """One line, which names what was expected and found."""
        expected = r"^loader: expected an object with state_dict\(\) and load_state_dict\(\); "
        with pytest.raises(TypeError, match=expected + ".*" + message) as refusal:
            Capturing(loader)

        assert "\n" not in str(refusal.value)


class TestBuffers:
    @pytest.mark.parametrize("updates", [0, 1, 3])
    def test_running_statistics_are_put_back(self, updates: int) -> None:
        """Batch normalization changes them and no version counter, from the first update on."""
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        capturing = Capturing(None, model)
        capture = capturing.take(0)
        for update in range(updates):
            model(torch.randn(4, 3))
            capture = capturing.take(update + 1)
        before = {name: each.clone() for name, each in model.named_buffers()}

        model(torch.randn(4, 3))
        changed = [n for n, each in model.named_buffers() if not torch.equal(each, before[n])]
        capture.restore()

        assert sorted(before) == sorted(changed)
        assert all(torch.equal(each, before[n]) for n, each in model.named_buffers())

    def test_what_never_changes_is_copied_once(self) -> None:
        """A mask or a table of positions costs nothing after the first update."""
        model = torch.nn.Linear(3, 3)
        model.register_buffer("table", torch.ones(5))
        capturing = Capturing(None, model)
        copies = [capturing.take(update).buffers for update in range(3)]

        assert [1, 0, 0] == [len(each.copies) for each in copies if each is not None]
