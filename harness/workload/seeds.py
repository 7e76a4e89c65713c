"""Seeds that belong to a purpose, so that no two purposes share a random stream."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on `parts` and on nothing else.

    A hash, because generators seeded with neighbouring integers (seed + rank,
    seed + epoch) collide as soon as two purposes both count upwards.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
