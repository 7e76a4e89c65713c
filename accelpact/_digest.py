"""Bitwise digests of tensors, computed where the tensors live, and a tree over them.

A digest is XXH3-128 over a header (dtype, shape, length) and then the data. In CPU memory the data
are the tensor's bytes, hashed in place. On any other device they are read there as 64-bit words in
rows of `_ROW`. Each row gives two hashes that are linear modulo 2**64,

    h1 = sum(x_i * u_i)          h2 = sum((x_i >> 32) * v_i)

with fixed pseudo-random odd weights u and v. Only these row hashes, 1/512 of the data, go to the
host, into XXH3-128 after the header.

A digest is a check against errors: a bit that flipped, an update lost or applied twice, a value in
another's place. Any of these goes unseen with a probability of about 2**-128 in CPU memory. On
other devices one word that differs is always seen by h1, and several go unseen by a hash with a
probability of about 2**-(63 - z), where z is the number of zero bits below the lowest one that
differs: at most 31 in h1 if that bit is in a low half, at most 31 in h2 if all differences are in
high halves. Two hashes, since one is blind: odd weights cancel on the top bit,
2**63 * (u_i + u_j) = 0, so a pair of -0.0 that became 0.0 leaves h1 as it was. Neither way is a
check against an adversary, who can solve for the weights and make XXH3 collide.

Equal bits give equal digests on every device of a kind and with any number of threads: integers
alone are added and multiplied, so order of summation does not matter. A digest of a tensor on the
CPU and one of a tensor elsewhere always differ: compare like with like.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import TYPE_CHECKING, TypeAlias

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROW = 1024
"""Words in a row. Longer rows mean less for the host to do, shorter ones less padding."""

_WORD_BYTES = 8
_ROW_BYTES = _ROW * _WORD_BYTES

_CHUNK = 4096
"""Rows multiplied at a time: bounds the scratch memory at 32 MiB."""

_FORMAT = "accelpact-2"
"""Read first by every hash; another one when digests of equal states change."""

_SEED = 0x616363656C706163
_MASK = 2**64 - 1

# A private prototype: the types of `ctypes.pythonapi`'s own are shared by the whole process.
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100

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
    zero do. Of a `DTensor` the local shard is digested. A contiguous tensor is read in place (on
    other devices than the CPU: if its offset is one of whole words); any other is copied first, on
    its own device.

    Digests of tensors on the CPU do not compare with those of tensors elsewhere.

    Raises:
        TypeError: `t` has no plain bytes to read: it is sparse, quantized, nested or on the meta
            device.
    """
    local = _local(t)
    return _finish(local, _begin(local))


def tree_digest(state: Mapping[str, Leaf]) -> StateDigest:
    """Return the digest of `state`, a mapping of names to tensors, integers, bytes or text.

    The order of the entries does not count. A name, an entry too many or too few, and the type
    of an entry (`1`, `"1"` and `b"1"` differ) do.

    Raises:
        TypeError: an entry is of another type, or a tensor without plain bytes; names the entry.
    """
    # All devices are given their work before the first result is waited for.
    begun = []
    for name in sorted(state):
        leaf = _checked(name, state[name])
        begun.append((name, leaf, _begin(leaf)))
    tensors = {name: _finish(leaf, rows) for name, leaf, rows in begun}
    root = _hasher(f"tree {len(tensors)}")
    for name, digest in tensors.items():
        _feed(root, name.encode())
        _feed(root, bytes.fromhex(digest))
    return StateDigest(root=root.hexdigest(), tensors=tensors)


def _checked(name: str, value: Leaf) -> Leaf:
    """Return an entry, made local if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int | bytes | str):
            return value
        raise TypeError(
            f"state entry {name!r}: expected a tensor, int, bytes or str; found "
            f"{type(value).__name__}; convert it to one of these"
        )
    try:
        return _local(value)
    except TypeError as error:
        raise TypeError(f"state entry {name!r}: {error}") from None


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


def _begin(leaf: Leaf) -> torch.Tensor | None:
    """Start on an entry: row hashes of a tensor that is not in CPU memory, else None."""
    if isinstance(leaf, torch.Tensor) and not leaf.is_cpu:
        return _row_hashes(leaf)
    return None


def _finish(leaf: Leaf, rows: torch.Tensor | None) -> str:
    """Digest of an entry that `_begin` started on."""
    if isinstance(leaf, torch.Tensor):
        return _seal_bytes(leaf) if rows is None else _seal_rows(leaf, rows)
    # bool is an int, but True and 1 are told apart: the tag is the exact type.
    hasher = _hasher(f"leaf {type(leaf).__name__}")
    _feed(hasher, leaf if isinstance(leaf, bytes) else str(leaf).encode())
    return hasher.hexdigest()


def _seal_bytes(local: torch.Tensor) -> str:
    """Digest of a tensor in CPU memory from its bytes."""
    hasher = _hasher(f"bytes {_shape(local)}")
    dense = local.contiguous()
    _read(hasher, dense)
    return hasher.hexdigest()


def _seal_rows(local: torch.Tensor, rows: torch.Tensor) -> str:
    """Digest of a tensor from its row hashes; waits for the device and copies them once."""
    hasher = _hasher(f"rows {_shape(local)}")
    _read(hasher, rows.cpu().contiguous())
    return hasher.hexdigest()


def _shape(t: torch.Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)} {t.nbytes}"


def _hasher(header: str) -> xxhash.xxh3_128:
    """Return a hash that has read `header`, which says what may follow and how much of it."""
    hasher = xxhash.xxh3_128()
    _feed(hasher, f"{_FORMAT} {header}".encode())
    return hasher


def _feed(hasher: xxhash.xxh3_128, part: bytes) -> None:
    """Give `hasher` one part with its length before it, so that no two lists read alike."""
    hasher.update(len(part).to_bytes(8, "little") + part)


def _read(hasher: xxhash.xxh3_128, dense: torch.Tensor) -> None:
    """Give `hasher` the bytes of a contiguous tensor in CPU memory, where they are.

    Through their address, since torch hands out its memory as a buffer only where numpy is there
    and for the dtypes that numpy knows.
    """
    if dense.nbytes:
        hasher.update(_memory(dense.data_ptr(), dense.nbytes, _READ_ONLY))


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
    """Return both hashes of every row, shape (2, rows)."""
    low, high = _weights(str(words.device))
    hashes = torch.empty((2, len(words)), dtype=torch.int64, device=words.device)
    scratch = torch.empty_like(words[:_CHUNK])
    for rows, out in zip(words.split(_CHUNK), hashes.split(_CHUNK, dim=1), strict=True):
        product = torch.mul(rows, low, out=scratch[: len(rows)])
        torch.sum(product, dim=1, out=out[0])
        product = torch.bitwise_right_shift(rows, 32, out=product).mul_(high)
        torch.sum(product, dim=1, out=out[1])
    return hashes


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
