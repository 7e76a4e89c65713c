"""Starts the ranks of one run: torch's elastic launcher, tied to the supervisor's life.

Usage: python -m harness.launcher NUM_RANKS MAX_RESTARTS INTERVAL FOLDER MODULE [ARGUMENT...]

MODULE is `torch.distributed.run` or another whose `main` takes the same arguments, and more.
"""

from __future__ import annotations

import importlib
import sys

from harness.processes import die_with_parent, end_with_parent


def main(arguments: list[str]) -> None:
    """Run the launcher in this process; it starts `harness.worker` once per rank."""
    die_with_parent()
    num_ranks, max_restarts, monitor_interval, folder, module, *more = arguments
    importlib.import_module(module).main(
        [
            *more,
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


if __name__ == "__mp_main__":  # imported by a process that the launcher has spawned
    end_with_parent()
if __name__ == "__main__":
    main(sys.argv[1:])
