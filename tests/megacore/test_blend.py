"""Blends: a closed form whose every prefix keeps to the weights, and which skips no sample of any corpus."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megacore.data.blend import BLOCK, Blend, quotas
from megacore.data.samples import Sample


@dataclass(frozen=True)
class Numbered:
    """A source whose every sample says which corpus and which sample it is."""

    corpus: int
    length: int = 1

    def sample(self, index: int) -> Sample:
        return Sample(np.array([self.corpus, index]), np.zeros(2, np.int32), np.ones(2, np.bool_))


def blend(*weights: float) -> Blend:
    return Blend([Numbered(corpus) for corpus in range(len(weights))], weights)


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@example([1.0, 1.0, 1.0])
@example([1.0] * 12)
@example([0.01, 100.0])
@given(weights)
def test_every_prefix_keeps_to_the_weights_and_each_corpus_to_its_order(weights):
    n = 2 * BLOCK + 1000
    corpus, within = blend(*weights).locate(np.arange(n))
    shares = np.array(weights) / np.sum(weights)
    so_far = np.arange(1, n + 1)
    for c, share in enumerate(shares):
        mine = corpus == c
        assert np.array_equal(within[mine], np.arange(mine.sum()))
        quantised = quotas(weights)[c] / BLOCK
        bound = (1 + len(weights) * quantised) / 2 + 1e-6
        assert (np.abs(np.cumsum(mine) - quantised * so_far) <= bound).all()
        assert abs(quantised - share) <= 1 / BLOCK


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_locate_has_no_memory_and_takes_any_shape(indices):
    mixed = blend(5, 3, 1)
    corpus, within = mixed.locate(np.array(indices).reshape(1, -1))
    assert corpus.shape == within.shape == (1, len(indices))
    assert [(int(c), int(k)) for c, k in map(mixed.locate, indices)] == list(zip(corpus[0], within[0], strict=True))


def test_the_order_is_pinned():
    # A run that is resumed years later must see the same data.
    assert "".join(str(c) for c in blend(0.5, 0.3, 0.2).locate(np.arange(30))[0]) == "012010021001201002100120100210"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "weights of a blend are"),
        ([1, 0], "each must be a positive number"),
        ([1, float("nan")], "each must be a positive number"),
        ([1, float("inf")], "each must be a positive number"),
        ([1, 1e-6], "weight 1e-06 of corpus 1 is 1e-06 of the blend, below the least share, 1/65536"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        blend(*weights)
