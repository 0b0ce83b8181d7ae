"""Samples: every token of an epoch once as a label, the same order everywhere, documents known, splits disjoint."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.data.indexed import IndexedDataset, IndexedWriter
from megacore.data.samples import Purpose, Samples, draw, shuffled, split_documents


def dataset_of(prefix, lengths, sequences: int = 1) -> IndexedDataset:
    """Documents of these lengths, whose tokens are counted up through all of them."""
    ends = np.cumsum(lengths)
    with IndexedWriter(prefix, 2**20) as writer:
        for length, end in zip(lengths, ends, strict=True):
            writer.write(*np.array_split(np.arange(end - length, end), sequences))
    return IndexedDataset(prefix)


def test_the_random_words_are_pinned():
    # A run that is resumed years later, under another numpy, must see the same data.
    assert [int(word) >> 40 for word in draw(4, 1234, Purpose.SAMPLES, 5)] == [14148020, 10264220, 1726764, 6322912]
    assert shuffled(8, 1234, Purpose.DOCUMENTS).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]


def test_streams_differ_by_seed_purpose_and_epoch():
    keys = [(1, Purpose.DOCUMENTS, 0), (2, Purpose.DOCUMENTS, 0), (1, Purpose.SAMPLES, 0), (1, Purpose.DOCUMENTS, 1)]
    assert len({tuple(shuffled(50, *key).tolist()) for key in keys}) == 4
    assert draw(10, 7, Purpose.SPLIT).tolist() == draw(20, 7, Purpose.SPLIT).tolist()[:10]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    length=st.integers(1, 9),
    sequences=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_an_epoch_labels_every_token_once(tmp_path, lengths, length, sequences, seed):
    if sum(lengths) <= length:
        lengths = [*lengths, length + 1]
    dataset = dataset_of(tmp_path / "a", lengths, sequences)
    samples = Samples(dataset, length, seed)
    assert samples.per_epoch == (sum(lengths) - 1) // length
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    starts = set((np.cumsum(lengths) - lengths).tolist())
    for epoch in range(2):
        drawn = [samples.sample(epoch * samples.per_epoch + i) for i in range(samples.per_epoch)]
        labels = np.concatenate([sample.tokens[1:] for sample in drawn])
        assert labels.size == np.unique(labels).size == samples.per_epoch * length
        by_first = {int(sample.tokens[0]): sample for sample in drawn}
        for sample in drawn:
            assert sample.tokens.shape == sample.documents.shape == (length + 1,)
            steps = np.diff(sample.documents)
            assert sample.documents[0] == 0 and set(steps.tolist()) <= {0, 1}
            assert np.array_equal(steps == 1, np.diff(document_of[sample.tokens]) != 0)
            inside = steps == 0
            assert (np.diff(sample.tokens)[inside] == 1).all()  # within a document the tokens follow each other
            assert set(sample.tokens[1:][~inside].tolist()) <= starts  # and another begins at its beginning
        # One sample's last token is the next one's first: together they are one stream, with but one end.
        assert sum(int(sample.tokens[-1]) not in by_first for sample in drawn) == 1


def test_epochs_differ_and_any_order_of_access_gives_the_same(tmp_path):
    dataset = dataset_of(tmp_path / "a", [5] * 40)
    one, other = Samples(dataset, 8, seed=3), Samples(dataset, 8, seed=3)
    n = one.per_epoch
    forward = [one.sample(i).tokens.tolist() for i in range(3 * n)]
    backward = [other.sample(i).tokens.tolist() for i in reversed(range(3 * n))]
    assert forward == backward[::-1]
    assert forward[:n] != [Samples(dataset, 8, seed=4).sample(i).tokens.tolist() for i in range(n)]
    # Documents in another order are cut into other samples; one document's samples are the same in another order.
    assert sorted(forward[:n]) != sorted(forward[n : 2 * n]) != sorted(forward[2 * n :])
    alone = Samples(dataset_of(tmp_path / "b", [200]), 8, seed=3)
    first, second = ([alone.sample(e * 24 + i).tokens.tolist() for i in range(24)] for e in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_samples_and_documents_are_both_shuffled(tmp_path):
    samples = Samples(dataset_of(tmp_path / "a", [10] * 100), 20, seed=0)
    drawn = [samples.sample(i) for i in range(samples.per_epoch)]
    first = np.array([sample.tokens[0] for sample in drawn])
    followed = sum(drawn[i].tokens[-1] == drawn[i + 1].tokens[0] for i in range(len(drawn) - 1))
    assert followed < 5  # neighbours in the stream are apart in the order of training
    jumps = np.concatenate([np.diff(sample.tokens)[np.diff(sample.documents) == 1] for sample in drawn])
    assert (jumps == 1).sum() < 10 and first.size == 49  # and neighbours on disk are apart in the stream


def test_a_subset_of_documents(tmp_path):
    samples = Samples(dataset_of(tmp_path / "a", [10] * 10), 4, seed=0, documents=np.array([2, 7]))
    tokens = {int(token) for i in range(samples.per_epoch) for token in samples.sample(i).tokens}
    assert samples.tokens == 20 and tokens <= {*range(20, 30), *range(70, 80)}


def test_too_few_tokens_are_named(tmp_path):
    dataset = dataset_of(tmp_path / "a", [4, 4])
    with pytest.raises(ValueError, match=r"news has 8 tokens in 2 document\(s\), and one sample of length 8 takes 9"):
        Samples(dataset, 8, seed=0, name="news")
    assert Samples(dataset, 7, seed=0).per_epoch == 1


@given(st.integers(2, 400), st.floats(1e-9, 1 - 2**-53), st.integers(0, 2**64 - 1))
def test_a_split_is_a_partition_with_two_sides(documents, fraction, seed):
    split = split_documents(documents, fraction, seed)
    assert split.train.size and split.validation.size
    assert sorted([*split.train, *split.validation]) == list(range(documents))


def test_a_split_follows_its_fraction_is_scattered_and_survives_appending():
    split = split_documents(10_000, 0.1, 5)
    assert 900 < split.validation.size < 1100
    assert all((split.validation // 1000 == block).sum() > 60 for block in range(10))
    grown = split_documents(20_000, 0.1, 5)
    assert np.array_equal(grown.validation[grown.validation < 10_000], split.validation)
    assert not np.array_equal(split_documents(10_000, 0.1, 6).validation, split.validation)


def test_bad_splits_are_named():
    assert split_documents(1, 0, 0).train.tolist() == [0] and split_documents(1, 0, 0).validation.size == 0
    with pytest.raises(ValueError, match=r"a fraction of 0.1 from 1 document\(s\)"):
        split_documents(1, 0.1, 0)
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="choose it from"):
            split_documents(9, fraction, 0)
