"""Packing: each example once and whole in every epoch, little room left, and any row at once."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.data.batches import collate
from megacore.data.packing import Packed, best_fit
from megacore.parallel.labels import IGNORE


@dataclass
class Numbered:
    """Example i holds 1000 i + 1, 1000 i + 2, ...; every third of its tokens does not count."""

    lengths: npt.NDArray[np.int64]
    count: int = field(init=False)
    documents: int = 1
    reference: None = None

    def __post_init__(self) -> None:
        self.count = len(self.lengths)

    def example(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        size = int(self.lengths[index])
        return 1000 * index + 1 + np.arange(size), np.arange(size) % 3 > 0

    def images(self, index: int) -> tuple[()]:
        return ()


def packed(lengths: list[int], length: int, **options: object) -> Packed:
    return Packed(Numbered(np.array(lengths)), length, seed=3, **options)  # type: ignore[arg-type]


lengths = st.lists(st.integers(2, 20), min_size=1, max_size=40)


@given(lengths, st.integers(20, 40))
def test_best_fit_overfills_no_row_and_opens_none_in_vain(sizes: list[int], room: int) -> None:
    """What opens a row did not fit into any before it, so no two rows would fit into one."""
    sizes = sorted(sizes, reverse=True)
    rows = best_fit(sizes, room)
    held = np.bincount(rows, weights=sizes)
    assert held.max() <= room and set(rows.tolist()) == set(range(held.size))
    assert held.size == 1 or sum(sorted(held)[:2]) > room


def test_the_row_that_is_filled_most_is_taken() -> None:
    assert best_fit([7, 6, 4, 3, 3, 2], 10).tolist() == [0, 1, 1, 0, 2, 2]
    assert best_fit([], 5).size == 0


@given(lengths, st.booleans())
def test_an_epoch_has_each_example_once_and_whole(sizes: list[int], pack: bool) -> None:
    source = packed(sizes, 24, pack=pack)
    for epoch in range(2):
        seen = []
        for index in range(epoch * source.per_epoch, (epoch + 1) * source.per_epoch):
            sample = source.sample(index)
            assert sample.tokens.shape == sample.documents.shape == sample.counted.shape == (25,)
            for document in range(int(sample.documents.max()) + 1):
                own = sample.documents == document
                tokens, counted = sample.tokens[own], sample.counted[own]
                if tokens[0] == 0:
                    assert not tokens.any() and not counted.any() and document == sample.documents[-1]
                else:
                    number = int(tokens[0]) // 1000
                    want, counts = Numbered(np.array(sizes)).example(number)
                    assert tokens.tolist() == want.tolist() and counted.tolist() == counts.tolist()
                    seen.append(number)
            assert (np.diff(sample.documents) >= 0).all()
        assert sorted(seen) == list(range(len(sizes)))
    if not pack:
        assert source.per_epoch == len(sizes)


def test_rows_are_a_function_of_seed_and_index_and_their_order_differs_between_epochs() -> None:
    sizes = (np.arange(200) % 19 + 2).tolist()
    one, two = packed(sizes, 32), packed(sizes, 32)
    first = [one.sample(index).tokens.tolist() for index in range(one.per_epoch)]
    assert [two.sample(index).tokens.tolist() for index in reversed(range(two.per_epoch))] == first[::-1]
    second = [one.sample(index + one.per_epoch).tokens.tolist() for index in range(one.per_epoch)]
    assert first != second and sorted(first) == sorted(second)
    other = Packed(Numbered(np.array(sizes)), 32, seed=4)  # type: ignore[arg-type]
    assert [other.sample(index).tokens.tolist() for index in range(other.per_epoch)] != first


def test_little_is_left_empty() -> None:
    """Lengths as chats have them."""
    drawn = np.random.default_rng(1).lognormal(5.2, 0.8, 4000).astype(int).clip(8, 2049)
    source = packed(drawn.tolist(), 2048)
    assert 0.99 < source.fill <= 1
    assert source.fill == pytest.approx(drawn.sum() / (source.per_epoch * 2048), rel=1e-3)
    alone = packed(drawn.tolist(), 2048, pack=False)
    assert alone.fill < 0.2


def test_a_choice_of_examples() -> None:
    source = packed([5] * 10, 12, chosen=np.array([2, 7]))
    sample = source.sample(0)
    assert {int(token) // 1000 for token in sample.tokens[sample.tokens > 0]} == {2, 7}


def test_in_a_batch_positions_restart_and_what_is_empty_has_no_label() -> None:
    source = packed([5, 4], 11)
    batch = collate([source.sample(0)], separate_documents=True)
    assert batch.documents == (5, 4, 2)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]]
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 1001, 1002, 1003, 1004, 0, 0]]
    no = IGNORE
    assert batch.labels.tolist() == [[2, 3, no, 5, no, 1002, 1003, no, no, no, no]]
    full = packed([12], 11)
    assert collate([full.sample(0)], separate_documents=True).documents == (11,)


@pytest.mark.parametrize("separate", [False, True])
def test_padding_is_what_no_example_has_filled(separate: bool) -> None:
    """Whether it has a label does not matter."""
    partly, full = packed([5, 4], 11).sample(0), packed([11], 11).sample(0)
    batch = collate([full, partly], separate)
    assert batch.padding is not None and batch.padding.tolist() == [[False] * 11, [False] * 9 + [True] * 2]
    assert collate([full], separate).padding is None
