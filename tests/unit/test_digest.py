"""Digests see every change of bits, place, type and name, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from accelpact import _digest
from accelpact._digest import tensor_digest, tree_digest

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = 1024
KNOWN = "ea88b693dbfccf44d5159f126af3091f"
"""Digest of the first 3 * ROW integers, as int64, in CPU memory."""

KNOWN_ELSEWHERE = "1772e5e891ef58e363ee64063858a3fc"
"""The same on any other device."""

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# Bytes: none, less than a word, odd, one row, one row and a bit, several chunks.
SIZES = [0, 1, 7, 8, 13, 8 * ROW - 1, 8 * ROW, 8 * ROW + 3, 8 * ROW * 600 + 5]


def random_bytes(size: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def random_words(rows: int, *, seed: int = 0) -> torch.Tensor:
    return random_bytes(rows * ROW * 8, seed=seed).view(torch.int64).view(rows, ROW)


def digest_elsewhere(t: torch.Tensor) -> str:
    """Digest of `t` as if it were not in CPU memory."""
    local = _digest._local(t)
    return _digest._seal_rows(local, _digest._row_hashes(local))


either_way = pytest.mark.parametrize(
    "digest", [tensor_digest, digest_elsewhere], ids=["bytes", "rows"]
)


@either_way
class TestEveryChangeShows:
    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_one_flipped_bit(
        self, data: st.DataObject, digest: Callable[[torch.Tensor], str]
    ) -> None:
        """One bit that flips anywhere changes the digest, and flipping back restores it."""
        size = data.draw(st.sampled_from([s for s in SIZES[:-1] if s]))
        bit = data.draw(st.integers(0, size * 8 - 1))
        t = random_bytes(size)
        before = digest(t)

        t[bit // 8] ^= 1 << (bit % 8)
        assert before != digest(t)

        t[bit // 8] ^= 1 << (bit % 8)
        assert before == digest(t)

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_several_flipped_bits(
        self, data: st.DataObject, digest: Callable[[torch.Tensor], str]
    ) -> None:
        """Any set of flipped bits changes the digest, the same bit of many words too."""
        t = random_words(2)
        before = digest(t)
        bits = st.integers(0, 63)
        same = data.draw(st.none() | bits)
        places = data.draw(st.sets(st.integers(0, t.numel() - 1), min_size=1, max_size=16))
        flat = t.view(-1)
        for place in places:
            bit = data.draw(bits) if same is None else same
            flat[place] ^= _digest._signed(1 << bit)

        assert before != digest(t)

    @settings(max_examples=100, deadline=None)
    @given(
        i=st.integers(0, 3 * ROW - 1),
        j=st.integers(0, 3 * ROW - 1),
    )
    def test_two_swapped_values(
        self, i: int, j: int, digest: Callable[[torch.Tensor], str]
    ) -> None:
        """Two different values that change places change the digest."""
        t = torch.arange(3 * ROW, dtype=torch.float32)
        swapped = t.clone()
        swapped[[i, j]] = t[[j, i]]

        assert (i == j) == (digest(t) == digest(swapped))

    @pytest.mark.parametrize("shift", [0, 16, 31, 32, 48, 63])
    def test_swapped_words_that_differ_in_high_bits_only(
        self, shift: int, digest: Callable[[torch.Tensor], str]
    ) -> None:
        """Words whose difference has many trailing zeros are still told apart by place."""
        t = torch.zeros(ROW, dtype=torch.int64)
        t[5] = _digest._signed(1 << shift)
        swapped = t.clone()
        swapped[[5, 700]] = t[[700, 5]]

        assert digest(t) != digest(swapped)

    def test_swapped_rows(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Two whole rows that change places change the digest."""
        t = random_words(4)

        assert digest(t) != digest(t[[0, 2, 1, 3]])

    def test_nan_payload(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Two NaNs with different payloads are different bits."""
        quiet, loud = (torch.tensor([b], dtype=torch.int32) for b in (0x7FC00000, 0x7FC00001))

        assert torch.isnan(loud.view(torch.float32)).all()
        assert digest(quiet.view(torch.float32)) != digest(loud.view(torch.float32))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("places", [(0,), (1,), (0, 2), (1, 3), (0, 1), (3, 7), (1, 1023)])
    def test_negative_zeros(
        self, dtype: torch.dtype, places: tuple[int, ...], digest: Callable[[torch.Tensor], str]
    ) -> None:
        """-0.0 is not 0.0, once or twice in a row, in either half of the words."""
        zeros = torch.zeros(ROW, dtype=dtype)
        negative = zeros.clone()
        negative[list(places)] = -0.0

        assert torch.equal(zeros, negative)
        assert digest(zeros) != digest(negative)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
    def test_dtype(self, dtype: torch.dtype, digest: Callable[[torch.Tensor], str]) -> None:
        """Equal bits under another dtype are another tensor."""
        t = torch.zeros(8, dtype=torch.uint32)

        assert digest(t) != digest(t.view(dtype))

    def test_shape(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Equal bits in another shape are another tensor, even where there are none."""
        shapes = [(6,), (2, 3), (3, 2), (1, 6), (6, 1)]
        digests = {digest(torch.zeros(shape)) for shape in shapes}
        digests |= {digest(torch.zeros(shape)) for shape in [(0,), (0, 3), (3, 0)]}

        assert len(shapes) + 3 == len(digests)

    def test_scalar(self, digest: Callable[[torch.Tensor], str]) -> None:
        """A tensor without dimensions is not a vector of one."""
        assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))

    @pytest.mark.parametrize("size", [1, 5, 8 * ROW - 1])
    def test_trailing_zero(self, size: int, digest: Callable[[torch.Tensor], str]) -> None:
        """A zero more at the end is not taken for padding."""
        assert digest(torch.zeros(size, dtype=torch.uint8)) != digest(
            torch.zeros(size + 1, dtype=torch.uint8)
        )


@either_way
class TestEqualBitsAreEqual:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, dtype: torch.dtype, digest: Callable[[torch.Tensor], str]) -> None:
        """A copy has the digest of the original, and a changed byte another."""
        raw = random_bytes(48) & 1 if dtype is torch.bool else random_bytes(48)
        changed = raw.clone()
        changed[17] ^= 1

        assert digest(raw.view(dtype)) == digest(raw.clone().view(dtype))
        assert digest(raw.view(dtype)) != digest(changed.view(dtype))

    def test_transposed(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Elements in logical order count, strides do not."""
        t = torch.randn(70, 130)

        assert digest(t.t()) == digest(t.t().contiguous())
        assert digest(t[::3, 1::2]) == digest(t[::3, 1::2].clone())
        assert digest(torch.ones(1).expand(9)) == digest(torch.ones(9))

    def test_channels_last(self, digest: Callable[[torch.Tensor], str]) -> None:
        """A memory format does not count."""
        t = torch.randn(2, 3, 4, 5)

        assert digest(t) == digest(t.to(memory_format=torch.channels_last))

    @pytest.mark.parametrize("offset", [*range(1, 9), 8 * ROW, 8 * ROW + 1])
    def test_view_at_any_offset(self, offset: int, digest: Callable[[torch.Tensor], str]) -> None:
        """A view at any offset of its storage has the digest of its copy."""
        size = 8 * ROW * 3 + 11
        view = random_bytes(size + offset)[offset:]

        assert digest(view.clone()) == digest(view)

    def test_unaligned_memory(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Memory that is not torch's own may begin anywhere."""
        raw = random_bytes(8 * ROW + 3)
        foreign = torch.frombuffer(bytearray(raw.tolist()), dtype=torch.uint8, offset=3)

        assert digest(raw[3:]) == digest(foreign)

    def test_lazy_conjugate_and_negative(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Views that only pretend to be conjugated or negated count as what they show."""
        t = torch.randn(33, dtype=torch.complex64)

        assert digest(t.conj().resolve_conj()) == digest(t.conj())
        assert digest(t.conj().imag.clone().resolve_neg()) == digest(t.conj().imag)
        assert digest(t) != digest(t.conj())

    def test_gradients_and_modes(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Parameters, no_grad and inference mode make no difference, whichever comes first."""
        _digest._weights.cache_clear()
        t = torch.randn(2 * ROW)
        with torch.inference_mode():
            inside = digest(t)

        assert inside == digest(torch.nn.Parameter(t))

    def test_number_of_threads(self, digest: Callable[[torch.Tensor], str]) -> None:
        """The order in which threads add up does not matter."""
        t = random_bytes(SIZES[-1])
        before, threads = digest(t), torch.get_num_threads()
        torch.set_num_threads(2 if threads == 1 else 1)
        try:
            after = digest(t)
        finally:
            torch.set_num_threads(threads)

        assert before == after

    def test_leaves_the_tensor_alone(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Digesting reads only."""
        t = random_bytes(SIZES[-1])
        before = t.clone()
        digest(t)

        assert torch.equal(before, t)

    def test_rng_state(self, digest: Callable[[torch.Tensor], str]) -> None:
        """RNG states, byte tensors of odd size, follow the generator."""
        generator = torch.Generator().manual_seed(7)
        before = digest(generator.get_state())
        restored = torch.Generator()
        restored.set_state(generator.get_state())
        torch.rand(1, generator=generator)

        assert before == digest(restored.get_state())
        assert before != digest(generator.get_state())


class TestWhatIsRead:
    def test_local_shard(self) -> None:
        """Of a distributed tensor the local shard is digested."""
        shard = torch.randn(12)
        code = (
            "import torch, torch.distributed as d;"
            "from torch.distributed.tensor import DTensor, Shard, init_device_mesh;"
            "from accelpact._digest import tensor_digest;"
            "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
            "mesh = init_device_mesh('cpu', (1,));"
            f"local = torch.tensor({shard.tolist()!r});"
            "print(tensor_digest(DTensor.from_local(local, mesh, [Shard(0)])));"
            "d.destroy_process_group()"
        )
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
        )

        assert tensor_digest(shard) == run.stdout.strip()

    def test_does_not_move(self) -> None:
        """The digests of known bits are the same in every version and process."""
        t = torch.arange(3 * ROW, dtype=torch.int64)

        assert KNOWN == tensor_digest(t)
        assert KNOWN_ELSEWHERE == digest_elsewhere(t)

    @pytest.mark.parametrize("size", SIZES)
    def test_header_and_bytes(self, size: int) -> None:
        """In CPU memory the digest is XXH3-128 of a framed header and then the bytes."""
        t = random_bytes(size)
        header = f"accelpact-2 bytes torch.uint8 ({size},) {size}".encode()
        framed = len(header).to_bytes(8, "little") + header + bytes(t.tolist())

        assert xxhash.xxh3_128_hexdigest(framed) == tensor_digest(t)

    def test_contiguous_is_read_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A contiguous tensor and a view with an odd offset are not copied; others are."""
        read: list[int] = []
        monkeypatch.setattr(_digest, "_read", lambda _, dense: read.append(dense.data_ptr()))
        t = random_bytes(100)
        for each in (t, t[3:], t[::2]):
            tensor_digest(each)

        assert [t.data_ptr(), t.data_ptr() + 3] == read[:2]
        assert t.data_ptr() != read[2]

    def test_copy_lives_as_long_as_it_is_read(self) -> None:
        """What had to be copied is hashed before its memory is given to others."""
        t = random_bytes(2**20).view(1024, 1024)
        expected = tensor_digest(t.t().contiguous())

        assert {expected} == {tensor_digest(t.t()) for _ in range(20)}


class TestOtherDevices:
    def test_is_chosen_by_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CPU memory is read as bytes; a tensor elsewhere is begun with row hashes."""
        monkeypatch.setattr(_digest, "_row_hashes", lambda _: "rows")
        elsewhere = torch.empty(3, device="meta")

        assert _digest._begin(torch.ones(3)) is None
        assert "rows" == _digest._begin(elsewhere)  # type: ignore[comparison-overlap]

    def test_does_not_pass_for_the_other(self) -> None:
        """Digests of the two ways differ even where there is nothing to hash."""
        for t in (torch.empty(0), torch.zeros(ROW)):
            assert tensor_digest(t) != digest_elsewhere(t)

    @pytest.mark.parametrize("rows", [1, 2, 4097])
    def test_against_exact_arithmetic(self, rows: int) -> None:
        """Both hashes are what the definition says, worked out in unbounded integers."""
        words = random_words(rows, seed=3)
        low, high = (w.tolist() for w in _digest._weights("cpu"))
        hashes = _digest._hash_words(words).T
        for place in {0, rows // 2, rows - 1}:
            row, found = words[place].tolist(), hashes[place].tolist()
            first = sum(x * w for x, w in zip(row, low, strict=True))
            second = sum((x >> 32) * w for x, w in zip(row, high, strict=True))

            assert [first % 2**64, second % 2**64] == [h % 2**64 for h in found]

    def test_top_bits_are_what_the_second_hash_is_for(self) -> None:
        """Two flipped top bits in one row leave the first hash alone and change the second."""
        words = random_words(1)
        flipped = words.clone()
        flipped[0, [3, 900]] ^= _digest._signed(1 << 63)
        before, after = _digest._hash_words(words), _digest._hash_words(flipped)

        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])

    def test_little_goes_to_the_host(self) -> None:
        """Sixteen bytes per row of 8 KiB are copied to the host, not the tensor."""
        hashes = _digest._row_hashes(random_bytes(8 * ROW * 64))

        assert (2, 64) == tuple(hashes.shape)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("size", SIZES)
    def test_cuda(self, size: int) -> None:
        """A CUDA device computes the integers that the CPU would."""
        t = random_bytes(size)

        assert digest_elsewhere(t) == tensor_digest(t.cuda())

    def test_weights(self) -> None:
        """Weights are odd, all different, and begin as splitmix64 does."""
        low, high = _digest._weights("cpu")
        weights = torch.cat([low, high])

        assert bool((weights & 1).all())
        assert 2 * ROW == len(weights.unique())
        assert 0xE220A8397B1DCDAF == next(_digest._splitmix64(0))


class TestRefused:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.empty(3, device="meta"),
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ],
        ids=["sparse", "meta", "quantized"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_no_plain_bytes(self, make: object) -> None:
        """What has no plain bytes is refused, by its name in a state."""
        assert callable(make)
        t = make()

        with pytest.raises(TypeError, match="strided tensor with data"):
            tensor_digest(t)
        with pytest.raises(TypeError, match="'exp_avg/w'"):
            tree_digest({"exp_avg/w": t})

    @pytest.mark.parametrize("value", [1.5, None, [1], SimpleNamespace()])
    def test_other_types(self, value: object) -> None:
        """An entry of another type is refused by name."""
        with pytest.raises(TypeError, match="'cursor'"):
            tree_digest({"cursor": value})  # type: ignore[dict-item]


def test_needs_no_numpy() -> None:
    """The digest works where numpy is not installed."""
    code = (
        "import sys; sys.modules['numpy'] = None; import torch;"
        "from accelpact._digest import tensor_digest; print(tensor_digest(torch.arange(3)))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    )

    assert tensor_digest(torch.arange(3)) == run.stdout.strip()
