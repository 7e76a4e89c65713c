"""The corpus, the order in which ranks read it, and the ledger."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.spec import SpecError
from harness.workload import Training
from harness.workload.data import Corpus, Loader, Sequences, ledger, permutation, sample_at
from harness.workload.seeds import derive_seed

CPU = torch.device("cpu")
TEXT = "".join(f"line {number} of some text\n" for number in range(40)).encode()


def make_loader(
    *, rank: int = 0, world_size: int = 4, microbatch: int = 2, seed: int = 3, data: bytes = TEXT
) -> Loader:
    """Return a loader of short sequences."""
    training = Training(
        model=torch.nn.Identity(),
        optimizer=torch.optim.SGD,
        data=Sequences(Corpus(name="text", data=data), 8),
        loss=torch.nn.functional.mse_loss,
        microbatch=microbatch,
    )
    return Loader(
        training,
        rank=rank,
        world_size=world_size,
        seed=seed,
        device=CPU,
    )


class TestOrder:
    """Places and sequences."""

    @given(
        seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), num_sequences=st.integers(1, 400)
    )
    def test_an_epoch_is_a_bijection(self, seed: int, epoch: int, num_sequences: int) -> None:
        """Every sequence stands at exactly one place of every epoch."""
        order = permutation(seed, epoch, num_sequences)

        assert list(range(num_sequences)) == sorted(order.tolist())

    def test_depends_on_seed_and_epoch(self) -> None:
        """Other seeds and other epochs give other orders; equal ones the same."""
        orders = [permutation(1, 0, 50), permutation(2, 0, 50), permutation(1, 1, 50)]
        permutation.cache_clear()

        assert torch.equal(orders[0], permutation(1, 0, 50))
        assert not torch.equal(orders[0], orders[1])
        assert not torch.equal(orders[0], orders[2])

    def test_places_run_through_epochs(self) -> None:
        """Place n + i of n sequences is place i of the second epoch."""
        places = [sample_at(place, seed=1, num_samples=10) for place in range(10, 20)]

        assert permutation(1, 1, 10).tolist() == places

    def test_derived_seeds(self) -> None:
        """Purposes, and neighbouring numbers, have seeds that torch accepts and no other has."""
        parts = [("data", 1), ("data", 2), ("rank", 1), ("rank", 12), ("rank/1", 2)]
        seeds = {derive_seed(5, *each) for each in parts} | {derive_seed(51, "rank", 2)}

        assert 6 == len(seeds)
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestLoader:
    """What a rank is served."""

    @settings(max_examples=50)
    @given(
        world_size=st.integers(1, 6),
        microbatch=st.integers(1, 3),
        accumulation=st.integers(1, 3),
        updates=st.integers(1, 5),
    )
    def test_union_over_ranks_is_exact(
        self, world_size: int, microbatch: int, accumulation: int, updates: int
    ) -> None:
        """The ranks of n updates have read the first places, each once, across epochs too."""
        served: list[int] = []
        for rank in range(world_size):
            loader = make_loader(rank=rank, world_size=world_size, microbatch=microbatch)
            for _ in range(updates * accumulation):
                served += loader.next_batch()[1]
        expected = updates * world_size * microbatch * accumulation

        assert list(range(expected)) == sorted(served)
        assert (0, 0) == ledger(served, expected)

    def test_an_epoch_serves_every_sequence(self) -> None:
        """The tokens of one epoch, over all ranks, are the corpus."""
        data = bytes(range(65, 65 + 49))  # six sequences of 8 and a byte
        batches = [
            make_loader(rank=rank, world_size=3, microbatch=2, data=data).next_batch()[0]
            for rank in range(3)
        ]
        rows = sorted(bytes(row.tolist()) for batch in batches for row in batch)

        assert [data[start : start + 9] for start in range(0, 48, 8)] == rows

    def test_shape(self) -> None:
        """Microbatch x (seq_len + 1) tokens, int64."""
        tokens, places = make_loader(rank=1).next_batch()

        assert (2, 9) == tuple(tokens.shape)
        assert torch.int64 == tokens.dtype
        assert [1, 5] == places

    def test_same_microbatch_size_or_not(self) -> None:
        """What a rank reads depends on its cursor, not on how it got there."""
        ones, twos = make_loader(rank=3, microbatch=1), make_loader(rank=3, microbatch=2)
        single = torch.cat([ones.next_batch()[0] for _ in range(4)])
        double = torch.cat([twos.next_batch()[0] for _ in range(2)])

        assert torch.equal(single, double)

    def test_resumes_at_the_cursor(self) -> None:
        """A new loader that is given the state goes on where the old one stood."""
        old, new = make_loader(rank=2), make_loader(rank=2)
        for _ in range(7):
            old.next_batch()
        new.load_state_dict(old.state_dict())
        expected, places = old.next_batch()
        tokens, resumed = new.next_batch()

        assert {"cursor": 16} == new.state_dict()
        assert places == resumed
        assert torch.equal(expected, tokens)

    def test_goes_back(self) -> None:
        """An update that was thrown away is read again, the same."""
        loader = make_loader()
        loader.next_batch()
        state = loader.state_dict()
        first = loader.next_batch()
        loader.load_state_dict(state)
        again = loader.next_batch()

        assert first[1] == again[1]
        assert torch.equal(first[0], again[0])

    def test_leaves_global_random_state(self) -> None:
        """Reading data does not move the generator that recovery must preserve."""
        permutation.cache_clear()
        before = torch.get_rng_state()
        make_loader().next_batch()

        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("state", [{}, {"cursor": -1}, {"cursor": 1.5}, {"cursor": None}])
    def test_bad_state(self, state: dict[str, int]) -> None:
        """A state that is none is refused."""
        with pytest.raises(ValueError, match="cursor: expected a count of samples"):
            make_loader().load_state_dict(state)

    @pytest.mark.parametrize("rank", [-1, 4])
    def test_bad_rank(self, rank: int) -> None:
        """A rank outside the world is refused."""
        with pytest.raises(ValueError, match=f"rank: expected 0 to 3; found {rank}"):
            make_loader(rank=rank)

    def test_too_small(self) -> None:
        """One byte less than a microbatch for all ranks is refused; the need is named."""
        make_loader(data=b"x" * 65)
        with pytest.raises(SpecError, match=r"data: expected at least 8 samples.*found 7;"):
            make_loader(data=b"x" * 64)

    def test_too_little_text(self) -> None:
        """The command line says the same of a text, in bytes."""
        needs = {"seq_len": 8, "microbatch": 2, "world_size": 4}
        Corpus(name="text", data=b"x" * 65).check(**needs)
        with pytest.raises(SpecError, match=r"at least 65 bytes.*found 64 in text"):
            Corpus(name="text", data=b"x" * 64).check(**needs)

    def test_places_can_be_told_from_the_cursor(self) -> None:
        """Which samples a rank has consumed need not have been written down."""
        loader = make_loader(rank=1)
        served = [place for _ in range(3) for place in loader.next_batch()[1]]

        assert served == loader.places(loader.cursor - len(served), len(served))


class TestLedger:
    """Missing and duplicated places."""

    @pytest.mark.parametrize(
        ("samples", "expected", "counts"),
        [
            ([], 0, (0, 0)),
            ([], 3, (3, 0)),
            ([2, 0, 1], 3, (0, 0)),
            ([0, 1, 1, 1], 3, (1, 2)),
            ([0, 1, 2, 3], 3, (0, 1)),
            ([-1, 0], 1, (0, 1)),
        ],
    )
    def test_counts(self, samples: list[int], expected: int, counts: tuple[int, int]) -> None:
        """Each case by hand."""
        assert counts == ledger(samples, expected)

    @given(samples=st.lists(st.integers(-3, 20)), expected=st.integers(0, 15))
    def test_balance(self, samples: list[int], expected: int) -> None:
        """What was served is what was expected, less the missing, plus the duplicated."""
        missing, duplicated = ledger(samples, expected)

        assert len(samples) == expected - missing + duplicated


class TestCorpus:
    """Where the text comes from."""

    def test_documentation(self) -> None:
        """The default is text of this Python, the same bytes every time."""
        one, two = Corpus.load(), Corpus.load()

        assert one == two
        assert len(one.data) > 300_000
        assert one.data.index(b"The standard type hierarchy") > 0
        assert "pydoc_data.topics" in one.name

    def test_file(self, tmp_path: Path) -> None:
        """A file's bytes are the corpus, and the record identifies them."""
        (tmp_path / "a.txt").write_bytes(TEXT)
        corpus = Corpus.load(str(tmp_path / "a.txt"))

        assert TEXT == corpus.data
        assert {
            "name": "a.txt",
            "sha256": hashlib.sha256(TEXT).hexdigest(),
            "bytes": len(TEXT),
            "sequences": (len(TEXT) - 1) // 16,
            "seq_len": 16,
        } == corpus.record(16)

    def test_folder(self, tmp_path: Path) -> None:
        """Files are joined by their relative paths; hidden and empty ones are left out."""
        files = {"b.txt": "two", "a/z.md": "one \u00e9", "c": "three", "e": "", ".git/x": "no"}
        files |= {"a/.hidden": "no"}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")

        assert "one \u00e9\ntwo\nthree".encode() == Corpus.load(str(tmp_path)).data

    def test_hidden_root(self, tmp_path: Path) -> None:
        """What the user names is read even where its own path is hidden."""
        folder = tmp_path / ".cache"
        folder.mkdir()
        (folder / "a.txt").write_bytes(b"text")

        assert b"text" == Corpus.load(str(folder)).data

    def test_missing(self, tmp_path: Path) -> None:
        """A path with nothing at it is named."""
        with pytest.raises(SpecError, match=r"data: expected a text file.*found nothing at .*gone"):
            Corpus.load(str(tmp_path / "gone"))

    def test_empty_file(self, tmp_path: Path) -> None:
        """An empty file is refused."""
        (tmp_path / "a.txt").touch()
        with pytest.raises(SpecError, match=r"found an empty file: .*a\.txt"):
            Corpus.load(str(tmp_path / "a.txt"))

    def test_empty_folder(self, tmp_path: Path) -> None:
        """A folder with hidden files alone has no text."""
        (tmp_path / ".hidden").write_bytes(b"text")
        with pytest.raises(SpecError, match="found a folder without text: "):
            Corpus.load(str(tmp_path))

    def test_not_utf8(self, tmp_path: Path) -> None:
        """The file and the offset of the byte are named."""
        (tmp_path / "a.txt").write_bytes(b"good")
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "b.bin").write_bytes(b"abc\xff\xfe")
        with pytest.raises(SpecError, match=r"invalid byte at offset 3 of sub/b\.bin"):
            Corpus.load(str(tmp_path))

    def test_pipe(self, tmp_path: Path) -> None:
        """A pipe, which would block for ever, is refused."""
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SpecError, match="expected regular files; found pipe"):
            Corpus.load(str(tmp_path))

    def test_messages_are_one_line(self, tmp_path: Path) -> None:
        """A user's mistake is one line."""
        with pytest.raises(SpecError) as raised:
            Corpus.load(str(tmp_path))

        assert "\n" not in str(raised.value)
