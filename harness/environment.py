"""What a comparison ran on: versions, processor, memory, commit. No names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "torchft",
    "nvidia-resiliency-ext",
    "numpy",
    "msgspec",
    "psutil",
    "matplotlib",
    "scipy",
)


def describe(*, device: str, backend: str) -> dict[str, Any]:
    """Collect what a reader needs to judge or repeat the figures."""
    import psutil

    return {
        "device": device,
        "backend": backend,
        "devices": _device_names() if device == "cuda" else [],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "load_before": list(os.getloadavg()),
        "commit": _commit(),
    }


def version(package: str) -> str | None:
    """Installed version of `package`; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def backend_for(device: str, *, world_size: int) -> str:
    """`nccl` where every rank has a GPU of its own; else `gloo`, which lets ranks share one."""
    if device != "cuda":
        return "gloo"
    import torch

    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


def _device_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> str | None:
    """The checkout's commit, with a mark if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
