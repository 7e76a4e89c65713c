"""Which ranks depend on one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accelpact._chains import Chains

HSDP = [[0, 1], [2, 3], [0, 2], [1, 3]]
COLUMNS = [[0, 2], [1, 3]]


class TestChains:
    """Groups that share a rank are one chain."""

    def test_hsdp_is_one_chain(self) -> None:
        """Replicate and shard groups join all ranks, whichever of them is asked for."""
        assert [(0, 1, 2, 3)] * 4 == [Chains(4, HSDP).closure([rank]) for rank in range(4)]

    def test_columns_are_chains_of_their_own(self) -> None:
        """Replicas over separate groups have nothing to do with each other."""
        chains = Chains(4, COLUMNS)

        assert [(0, 2), (1, 3)] == [chains.closure([0]), chains.closure([3])]

    def test_group_across_chains_concerns_all_of_them(self) -> None:
        """A group that is not the model's may span several."""
        assert (0, 1, 2, 3) == Chains(4, COLUMNS).closure([2, 3])

    def test_rank_without_a_group_stands_alone(self) -> None:
        """It depends on nobody."""
        assert (4,) == Chains(5, COLUMNS).closure([4])

    @given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=8))
    def test_members_of_a_group_are_always_together(self, groups: list[list[int]]) -> None:
        """In whatever order the groups come, chains divide the ranks and split no group."""
        chains = Chains(10, groups)
        closures = [chains.closure([rank]) for rank in range(10)]

        for rank, closure in enumerate(closures):
            assert rank in closure
            assert all(closures[other] == closure for other in closure)
        assert all(set(group) <= set(closures[group[0]]) for group in groups)
        assert closures == [Chains(10, reversed(groups)).closure([rank]) for rank in range(10)]
