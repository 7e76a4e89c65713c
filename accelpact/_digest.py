"""Bitwise digests of tensors, computed where the tensors live, and a tree over them.

The bytes of a tensor are read as 64-bit words in rows of `_ROW`. Each row gives two hashes that
are linear modulo 2**64,

    h1 = sum(x_i * u_i)          h2 = sum((x_i >> 32) * v_i)

with fixed pseudo-random odd weights u and v. Only these row hashes, 1/512 of the data, go to the
host, into blake2b together with dtype, shape and length.

Two hashes, since one is blind: odd weights cancel on the top bit, 2**63 * (u_i + u_j) = 0, so a
pair of -0.0 that became 0.0 leaves h1 as it was. One word that differs is always seen by h1.
Several go unseen by a hash with a probability of about 2**-(63 - z) over the weights, where z
is the number of zero bits below the lowest one that differs: at most 31 in h1 if that bit is in
a low half, at most 31 in h2 if all differences are in high halves. This is a check against
errors, not against an adversary, who can solve for the weights.

Integers alone are added and multiplied, so order of summation does not matter and equal bits
give equal digests on every device and with any number of threads.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROW = 1024
"""Words in a row. Longer rows mean less for the host to do, shorter ones less padding."""

_WORD_BYTES = 8
_ROW_BYTES = _ROW * _WORD_BYTES

_CPU_CHUNK = 256
"""Rows shifted at a time on a CPU: 2 MiB, so that the shifted words are read back from cache."""

_DEVICE_CHUNK = 4096
"""Rows multiplied at a time elsewhere: bounds the scratch memory at 32 MiB."""

_DIGEST_BYTES = 16
_SEED = 0x616363656C706163
_MASK = 2**64 - 1

Leaf: TypeAlias = "torch.Tensor | int | bytes | str"
"""What a state is made of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateDigest:
    """Digest of a whole state: one root, and one digest per entry to tell what differs."""

    root: str
    """32 hexadecimal digits over all names and digests."""

    tensors: dict[str, str]
    """Name -> 32 hexadecimal digits, sorted by name; integers, bytes and text included."""


def tensor_digest(t: torch.Tensor) -> str:
    """Return 128 bits over dtype, shape and bytes of `t`, as 32 hexadecimal digits.

    `t` may have any shape, strides and dtype, and may need gradients. Strides and storage do not
    count, only the elements in logical order; their bits count, so NaN payloads and the sign of
    zero do. Of a `DTensor` the local shard is digested. A contiguous tensor at an offset of
    whole words is read in place; any other is copied first, on its own device.

    Raises:
        TypeError: `t` has no plain bytes to read: it is sparse, quantized, nested or on the meta
            device.
    """
    local = _local(t)
    return _seal(local, _row_hashes(local))


def tree_digest(state: Mapping[str, Leaf]) -> StateDigest:
    """Return the digest of `state`, a mapping of names to tensors, integers, bytes or text.

    The order of the entries does not count. A name, an entry too many or too few, and the type
    of an entry (`1`, `"1"` and `b"1"` differ) do.

    Raises:
        TypeError: an entry is of another type, or a tensor without plain bytes; names the entry.
    """
    # All devices are given their work before the first result is waited for.
    hashed = [(name, *_begin(name, state[name])) for name in sorted(state)]
    tensors = {name: _finish(value, rows) for name, value, rows in hashed}
    root = _hasher("tree", len(tensors))
    for name, digest in tensors.items():
        _feed(root, name.encode(), bytes.fromhex(digest))
    return StateDigest(root=root.hexdigest(), tensors=tensors)


def _begin(name: str, value: Leaf) -> tuple[Leaf, torch.Tensor | None]:
    """Start on one entry: the entry itself, made local, and its row hashes if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int | bytes | str):
            return value, None
        raise TypeError(
            f"state entry {name!r}: expected a tensor, int, bytes or str; found "
            f"{type(value).__name__}; convert it to one of these"
        )
    try:
        local = _local(value)
    except TypeError as error:
        raise TypeError(f"state entry {name!r}: {error}") from None
    return local, _row_hashes(local)


def _finish(value: Leaf, rows: torch.Tensor | None) -> str:
    """Digest of an entry that `_begin` started on."""
    if isinstance(value, torch.Tensor):
        assert rows is not None
        return _seal(value, rows)
    # bool is an int, but True and 1 are told apart: the tag is the exact type.
    hasher = _hasher("leaf", type(value).__name__)
    _feed(hasher, value if isinstance(value, bytes) else str(value).encode())
    return hasher.hexdigest()


def _local(t: torch.Tensor) -> torch.Tensor:
    """Return the plain, strided tensor behind `t`."""
    to_local = getattr(t, "to_local", None)
    plain: torch.Tensor = (t if to_local is None else to_local()).detach()
    if plain.layout != torch.strided or plain.is_quantized or plain.is_nested or plain.is_meta:
        raise TypeError(
            f"digest: expected a strided tensor with data; found layout {plain.layout}, dtype "
            f"{plain.dtype} on device {plain.device}; digest the dense tensors it is made of"
        )
    # Lazily conjugated or negated views hold other bits than they show.
    return plain.resolve_conj().resolve_neg()


def _row_hashes(local: torch.Tensor) -> torch.Tensor:
    """Return both hashes of every row: int64, shape (2, rows), on the device of `local`."""
    if local.numel() == 0:
        return torch.empty((2, 0), dtype=torch.int64, device=local.device)
    # Flattened before the bytes are taken: view(uint8) refuses scalars.
    flat = local.contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // _ROW_BYTES * _ROW_BYTES
    parts = [_hash_words(_words(flat[:whole]))] if whole else []
    if whole < flat.numel():
        last = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=local.device)
        last[: flat.numel() - whole] = flat[whole:]
        parts.append(_hash_words(_words(last)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """View bytes, shape (rows * _ROW_BYTES,), as int64 words, shape (rows, _ROW)."""
    if data.storage_offset() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64).view(-1, _ROW)


def _hash_words(words: torch.Tensor) -> torch.Tensor:
    """Both hashes of every row by the fastest way there is on the device, shape (2, rows)."""
    if words.device.type == "cpu":
        return _hash_by_product(words)
    return _hash_by_sum(words)


def _hash_by_product(words: torch.Tensor) -> torch.Tensor:
    """Hash rows with integer matrix-vector products, which only CPUs have."""
    low, high = _weights(str(words.device))
    hashes = torch.empty((2, len(words)), dtype=torch.int64, device=words.device)
    shifted = torch.empty_like(words[:_CPU_CHUNK])
    torch.mv(words, low, out=hashes[0])
    for rows, out in _chunks(words, hashes, _CPU_CHUNK):
        upper = torch.bitwise_right_shift(rows, 32, out=shifted[: len(rows)])
        torch.mv(upper, high, out=out[1])
    return hashes


def _hash_by_sum(words: torch.Tensor) -> torch.Tensor:
    """Hash rows by multiplying and adding up: the same integers, on any device."""
    low, high = _weights(str(words.device))
    hashes = torch.empty((2, len(words)), dtype=torch.int64, device=words.device)
    scratch = torch.empty_like(words[:_DEVICE_CHUNK])
    for rows, out in _chunks(words, hashes, _DEVICE_CHUNK):
        product = torch.mul(rows, low, out=scratch[: len(rows)])
        torch.sum(product, dim=1, out=out[0])
        product = torch.bitwise_right_shift(rows, 32, out=product).mul_(high)
        torch.sum(product, dim=1, out=out[1])
    return hashes


def _chunks(
    words: torch.Tensor, hashes: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut `words`, shape (rows, _ROW), and `hashes`, shape (2, rows), into `size` rows each."""
    return zip(words.split(size), hashes.split(size, dim=1), strict=True)


@functools.lru_cache(maxsize=64)
def _weights(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights u and v of the module's text: int64, shape (_ROW,) each."""
    # Not inside inference mode, should the first caller be: the cached tensors outlive it.
    with torch.inference_mode(mode=False):
        stream = _splitmix64(_SEED)
        odd = [_signed(next(stream) | 1) for _ in range(2 * _ROW)]
        low, high = torch.tensor(odd, dtype=torch.int64, device=device).view(2, _ROW)
    return low, high


def _splitmix64(state: int) -> Iterator[int]:
    """Pseudo-random 64-bit integers: Steele, Lea and Flood, OOPSLA 2014, figure 14."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        yield z ^ (z >> 31)


def _signed(value: int) -> int:
    """Two's complement of a 64-bit integer."""
    return value - 2**64 if value >> 63 else value


def _seal(local: torch.Tensor, rows: torch.Tensor) -> str:
    """Digest of a tensor from its row hashes; waits for the device and copies them once."""
    hasher = _hasher("tensor", local.dtype, tuple(local.shape), local.numel() * local.itemsize)
    host = rows.cpu().contiguous()
    # Through its address, since torch hands out its memory as a buffer only where numpy is there.
    _feed(hasher, ctypes.string_at(host.data_ptr(), host.numel() * host.itemsize))
    return hasher.hexdigest()


def _hasher(*header: object) -> hashlib.blake2b:
    """Return a blake2b that has read the parts of `header`."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"accelpact-1")
    _feed(hasher, *(str(part).encode() for part in header))
    return hasher


def _feed(hasher: hashlib.blake2b, *parts: bytes) -> None:
    """Give `hasher` each part with its length before it, so that no two lists read alike."""
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
