"""Cold restart under NVIDIA's launcher, which also ends ranks that have gone silent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from strategies.cold import Cold

if TYPE_CHECKING:
    from strategies._base import Job, Settings, Timeouts


class ColdFt(Cold):
    """As `cold`, by ft_launcher: ranks send heartbeats, and one that stops is killed."""

    name = "cold_ft"
    summary = "as cold, by NVRx's ft_launcher, which also restarts ranks that hang"
    distribution = "nvidia-resiliency-ext"
    on_request = True
    variants = {"monitor-0.1s": {"monitor_interval": 0.1}}

    def __init__(self, *, variant: str | None = None) -> None:
        """Choose a variant."""
        super().__init__(variant=variant)
        self._client: Any = None

    def settings(self, timeouts: Timeouts, *, num_faults: int, backend: str) -> Settings:
        """Have the launcher wait for heartbeats as long as the slowest collective may take."""
        found = super().settings(timeouts, num_faults=num_faults, backend=backend)
        silence = timeouts.world + timeouts.group
        launcher = {
            "launcher": "nvidia_resiliency_ext.fault_tolerance.launcher",
            "launcher_arguments": [
                f"--ft-rank-heartbeat-timeout={silence:g}",
                f"--ft-initial-rank-heartbeat-timeout={max(silence, timeouts.barrier):g}",
                "--ft-workload-check-interval=0.5",
                "--ft-enable-nic-monitor=false",
            ],
        }
        note = f"a rank that sends no heartbeat for {silence:g} s is killed"
        return dataclasses.replace(
            found, options={**found.options, **launcher}, notes=(*found.notes, note)
        )

    def attach(self, job: Job) -> None:
        """Connect to the launcher's monitor of this rank."""
        from nvidia_resiliency_ext import fault_tolerance

        self._client = fault_tolerance.RankMonitorClient()
        self._client.init_workload_monitoring()

    def begin(self, job: Job) -> None:
        """Tell the monitor that this rank is alive."""
        self._client.send_heartbeat()

    def close(self, job: Job) -> None:
        """Tell the monitor that it need not wait for more."""
        self._client.shutdown_workload_monitoring()
