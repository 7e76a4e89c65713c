"""The digest of a state sees a change of any entry, its name and its type, and says which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from accelpact._digest import tensor_digest, tree_digest

if TYPE_CHECKING:
    from accelpact._digest import Leaf


class TestTree:
    def state(self) -> dict[str, Leaf]:
        generator = torch.Generator().manual_seed(1)
        state: dict[str, Leaf] = {"frontier": 15, "cursor": 480, "data": "ab", "raw": b"ab"}
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            for layer in range(2):
                state[f"{kind}/{layer}"] = torch.randn(40, generator=generator)
        return state

    def test_equal_states(self) -> None:
        """Equal states have equal digests in whatever order they are given."""
        state = self.state()
        backwards = dict(reversed(state.items()))

        assert tree_digest(state) == tree_digest(backwards)
        assert sorted(state) == list(tree_digest(backwards).tensors)

    def test_entries_are_tensor_digests(self) -> None:
        """A tensor's entry is its own digest, so that a report can name what differs."""
        state = self.state()
        weight = state["weight/1"]
        assert isinstance(weight, torch.Tensor)
        digest = tree_digest(state)

        assert tensor_digest(weight) == digest.tensors["weight/1"]
        assert {32} == {len(value) for value in [digest.root, *digest.tensors.values()]}

    @pytest.mark.parametrize("name", ["exp_avg/1", "exp_avg_sq/0", "frontier", "cursor"])
    def test_missing_entry(self, name: str) -> None:
        """A moment or a counter that is missing changes the root and no other entry."""
        state = self.state()
        before = tree_digest(state)
        del state[name]
        after = tree_digest(state)

        assert before.root != after.root
        assert {name} == before.tensors.keys() - after.tensors.keys()

    def test_extra_entry(self) -> None:
        """An entry too many changes the root, an empty one too."""
        state = self.state()

        assert tree_digest(state).root != tree_digest(state | {"z": torch.empty(0)}).root
        assert tree_digest({}).root != tree_digest({"": b""}).root

    def test_renamed_and_exchanged(self) -> None:
        """Names count, and which value is whose."""
        state = self.state()
        renamed = self.state()
        renamed["weight/2"] = renamed.pop("weight/1")
        exchanged = self.state()
        exchanged["exp_avg/0"], exchanged["exp_avg/1"] = state["exp_avg/1"], state["exp_avg/0"]
        roots = {tree_digest(s).root for s in (state, renamed, exchanged)}

        assert 3 == len(roots)

    def test_types_are_told_apart(self) -> None:
        """Values that read alike but differ in type differ."""
        tensor = torch.tensor(list(b"1"), dtype=torch.uint8)
        values: list[Leaf] = [1, "1", b"1", True, "True", tensor, -1, 10**30]
        roots = {tree_digest({"x": value}).root for value in values}

        assert len(values) == len(roots)

    def test_framing(self) -> None:
        """A boundary that moves between name and name, or between entries, shows."""
        roots = {
            tree_digest(state).root
            for state in ({"a": 1, "b": 2}, {"ab": 1, "": 2}, {"a": 12}, {"a": 1, "b": 2, "c": 0})
        }

        assert 4 == len(roots)

    def test_changed_tensor_is_found(self) -> None:
        """Only the entry that changed has another digest."""
        state = self.state()
        before = tree_digest(state)
        moment = state["exp_avg/1"]
        assert isinstance(moment, torch.Tensor)
        moment.view(torch.int32)[3] ^= 1
        after = tree_digest(state)

        assert before.root != after.root
        assert ["exp_avg/1"] == [n for n in before.tensors if before.tensors[n] != after.tensors[n]]
