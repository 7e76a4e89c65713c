"""Which settings of NCCL keep a process from outliving a failed collective."""

from __future__ import annotations

import pytest

from accelpact._communicator._backends._nccl_settings import has_watchdog, wrong_settings

CLEANING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}
"""Everything right, with a watchdog."""


def names(
    environment: dict[str, str], *, is_legacy: bool = True, deadline: float = 30
) -> list[str]:
    """Return the variables that are found wrong."""
    wrong = wrong_settings(environment, is_legacy=is_legacy, deadline=deadline)
    return [each.partition(" ")[0] for each in wrong]


class TestWatchdog:
    """Groups whose collectives are watched, which is the default."""

    def test_all_right(self) -> None:
        """Nothing is named."""
        assert [] == names(CLEANING)
        assert has_watchdog(CLEANING)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
            ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
            ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
            ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "on"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
            ({"TORCH_NCCL_ENABLE_MONITORING": "True"}, "TORCH_NCCL_ENABLE_MONITORING"),
            ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, "TORCH_NCCL_RETHROW_CUDA_ERRORS"),
            ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, "TORCH_NCCL_DESYNC_DEBUG"),
            ({"NCCL_DESYNC_DEBUG": "y"}, "NCCL_DESYNC_DEBUG"),
            ({"TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1"}, "TORCH_NCCL_EXTRA_DUMP_ON_EXEC"),
            (
                {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"},
                "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
            ),
        ],
    )
    def test_each_is_named(self, change: dict[str, str], named: str) -> None:
        """Alone, if it alone is wrong."""
        assert [named] == names(CLEANING | change)

    def test_defaults_are_wrong(self) -> None:
        """Four variables must be set, whatever torch's defaults are called."""
        assert list(CLEANING) == names({})

    def test_deadline_bounds_the_dump(self) -> None:
        """The watchdog holds the group for four times as long, which half a deadline must cover."""
        assert [] == names(CLEANING, deadline=8)
        assert ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == names(CLEANING, deadline=7)

    def test_old_name_counts_only_without_the_new_one(self) -> None:
        """As torch reads them."""
        old = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
        rest = {name: value for name, value in CLEANING.items() if "ASYNC" not in name}

        assert ["NCCL_ASYNC_ERROR_HANDLING"] == names(rest | old)
        assert [] == names(CLEANING | old)

    def test_says_what_was_found_and_what_to_set(self) -> None:
        """One text that needs no manual."""
        (found,) = wrong_settings(
            CLEANING | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, is_legacy=True, deadline=30
        )
        rest = {name: value for name, value in CLEANING.items() if "ASYNC" not in name}
        (unset,) = wrong_settings(rest, is_legacy=True, deadline=30)

        assert found.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING is '1': set 2 (")
        assert unset.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING is unset, which means 3: set 2 (")

    def test_second_backend_has_no_monitor(self) -> None:
        """It reads how to handle an error, and nothing of the monitor's."""
        assert [] == names({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, is_legacy=False)
        assert ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == names({}, is_legacy=False)


class TestBlockingWait:
    """Groups without a watchdog: who waits is told."""

    @pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
    @pytest.mark.parametrize("is_legacy", [True, False])
    def test_nothing_else_matters(self, name: str, *, is_legacy: bool) -> None:
        """Not what torchrun sets, either."""
        environment = {name: "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

        assert [] == names(environment, is_legacy=is_legacy)
        assert not has_watchdog(environment)

    def test_dump_on_abort_does(self) -> None:
        """An abort would write one first, whoever calls it."""
        environment = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1"}

        assert ["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == names(environment)
