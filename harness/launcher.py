"""Starts the ranks of one run: torch's elastic launcher, tied to the supervisor's life.

Usage: python -m harness.launcher NUM_RANKS MAX_RESTARTS MONITOR_INTERVAL FOLDER
"""

from __future__ import annotations

import sys

from harness.processes import die_with_parent


def main(arguments: list[str]) -> None:
    """Run `torchrun` in this process; it starts `harness.worker` once per rank."""
    die_with_parent()
    num_ranks, max_restarts, monitor_interval, folder = arguments
    from torch.distributed.run import main as torchrun

    torchrun(
        [
            "--nnodes=1",
            f"--nproc-per-node={num_ranks}",
            f"--max-restarts={max_restarts}",
            f"--monitor-interval={monitor_interval}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "-m",
            "harness.worker",
            folder,
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
