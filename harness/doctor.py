"""What this machine can run, and why not the rest."""

from __future__ import annotations

import shutil
from typing import Any

import strategies
from harness import environment
from strategies import Platform


def examine() -> dict[str, Any]:
    """Probe torch, backends, devices, contenders and privileges; never raises."""
    import psutil
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "python": environment.describe(device="cpu", backend="gloo")["python"],
        "torch": torch.__version__,
        "backends": [name for name, there in (
            ("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available() and gpus > 0),
        ) if there],
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "contenders": {row["name"]: row for row in list_strategies()},
        "network_namespaces": _network_namespaces(),
    }  # fmt: skip


def list_strategies(device: str = "cpu") -> list[dict[str, Any]]:
    """Name, availability, reason, version and summary of every contender."""
    platform = Platform(device=device, backend="gloo" if device == "cpu" else "nccl")
    rows = []
    for name in strategies.names():
        kind = strategies.find(name)
        answer = kind().availability(platform)
        rows.append(
            {
                "name": name,
                "available": answer.available,
                "reason": answer.reason,
                "version": answer.version,
                "summary": kind.summary,
            }
        )
    return rows


def _network_namespaces() -> str:
    """Whether faults of the network could be made here."""
    import os

    if os.geteuid() != 0:
        return "no: needs root"
    return "yes" if shutil.which("ip") else "no: the ip command is not installed"
