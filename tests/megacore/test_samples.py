"""Samples: every token of an epoch once as a label, the same order everywhere, documents known, splits disjoint."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.data.indexed import IndexedDataset, IndexedWriter
from megacore.data.samples import BLOCKS, Purpose, Runs, Samples, draw, parts, shuffled, split_documents, split_runs


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
    # Streams differ by seed, purpose and epoch.
    keys = [(1, Purpose.DOCUMENTS, 0), (2, Purpose.DOCUMENTS, 0), (1, Purpose.SAMPLES, 0), (1, Purpose.DOCUMENTS, 1)]
    assert len({tuple(shuffled(50, *key).tolist()) for key in keys}) == 4
    assert draw(10, 7, Purpose.SPLIT).tolist() == draw(20, 7, Purpose.SPLIT).tolist()[:10]


CORPORA = {
    "lengths": st.lists(st.integers(0, 12), min_size=1, max_size=12),
    "length": st.integers(1, 9),
    "sequences": st.integers(1, 3),
    "seed": st.integers(0, 2**64 - 1),
}
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(**CORPORA, kept=st.lists(st.booleans(), min_size=13, max_size=13))
def test_a_sample_is_a_piece_of_the_ring_of_documents(tmp_path, lengths, length, sequences, seed, kept):
    """Held against a stream that is put together by hand, for any documents, sequences, and documents left out."""
    kept = np.array(kept[: len(lengths)])
    if sum(np.array(lengths)[kept]) <= length:
        lengths, kept = [*lengths, length + 1], np.append(kept, True)
    dataset = dataset_of(tmp_path / "a", lengths, sequences)
    spans = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]))).reshape(-1, 2)
    samples = Samples(dataset, length, seed, Runs(spans))
    ends = np.cumsum(lengths)
    chosen = [np.arange(ends[d] - lengths[d], ends[d]) for d in np.flatnonzero(kept)]
    stream = np.concatenate(chosen)
    document = np.repeat(np.arange(len(chosen)), [part.size for part in chosen])
    assert samples.tokens == stream.size and samples.per_epoch == (stream.size - 1) // length
    for epoch in range(2):
        labelled: list[int] = []
        for i in range(samples.per_epoch):
            sample = samples.sample(epoch * samples.per_epoch + i)
            places = (np.flatnonzero(stream == sample.tokens[0])[0] + np.arange(length + 1)) % stream.size
            assert np.array_equal(sample.tokens, stream[places])
            # Another document, or the same one from its beginning where the stream goes on at its own.
            other = (np.diff(document[places]) != 0) | (np.diff(places) < 0)
            assert sample.documents.tolist() == [0, *np.cumsum(other)] and sample.counted.all()
            labelled += places[1:].tolist()
        assert len(labelled) == len(set(labelled)) == samples.per_epoch * length


def test_epochs_differ_and_any_order_of_access_gives_the_same(tmp_path):
    dataset = dataset_of(tmp_path / "a", [5] * 40)
    one, other = Samples(dataset, 8, seed=3), Samples(dataset, 8, seed=3)
    n = one.per_epoch
    forward = [one.sample(i).tokens.tolist() for i in range(3 * n)]
    backward = [other.sample(i).tokens.tolist() for i in reversed(range(3 * n))]
    assert forward == backward[::-1]
    assert forward[:n] != [Samples(dataset, 8, seed=4).sample(i).tokens.tolist() for i in range(n)]
    # Each epoch cuts the stream into other samples.
    assert sorted(forward[:n]) != sorted(forward[n : 2 * n]) != sorted(forward[2 * n :])


def test_what_is_left_out_of_an_epoch_is_somewhere_else_in_each(tmp_path):
    samples = Samples(dataset_of(tmp_path / "a", [7] * 5), 16, seed=1)
    assert samples.per_epoch == 2
    labels = [{int(t) for i in (0, 1) for t in samples.sample(2 * epoch + i).tokens[1:]} for epoch in range(60)]
    assert set.union(*labels) == set(range(35)) and len({min(set(range(35)) - each) for each in labels}) > 10


def test_the_order_is_pinned(tmp_path):
    samples = Samples(dataset_of(tmp_path / "a", [10] * 10), 9, seed=7)
    assert [int(samples.sample(i).tokens[0]) for i in range(22)] == [
        *(73, 55, 64, 36, 18, 45, 0, 82, 27, 91, 9),
        *(92, 83, 74, 37, 55, 46, 19, 28, 10, 1, 64),
    ]


@given(st.integers(2, 40_000), st.floats(1e-9, 1 - 2**-53), st.integers(0, 2**64 - 1))
def test_runs_of_documents_are_a_split(documents, fraction, seed):
    train, held_out = split_runs(documents, fraction, seed)
    sides = np.zeros(documents, np.int64)
    for runs, side in ((train, 1), (held_out, 2)):
        for first, stop in runs.bounds:
            assert (sides[first:stop] == 0).all() and first < stop
            sides[first:stop] = side
    assert (sides > 0).all() and set(sides) == {1, 2} and train.documents == (sides == 1).sum()
    assert len(train.bounds) + len(held_out.bounds) <= BLOCKS
    if documents <= BLOCKS:
        assert np.array_equal(np.flatnonzero(sides == 2), split_documents(documents, fraction, seed)[1])


def test_runs_hold_out_their_fraction_and_survive_appending():
    _, held_out = split_runs(10_000_000, 0.1, 5)
    assert 0.08 < held_out.documents / 10_000_000 < 0.12
    assert split_runs(9, 0, 5)[0].bounds.tolist() == [[0, 9]] and split_runs(9, 0, 5)[1].documents == 0
    first, grown = (split_runs(documents, 0.1, 5)[1].bounds for documents in (5000, 8000))
    assert grown[: len(first) - 1].tolist() == first[:-1].tolist()


def test_without_a_seed_samples_are_successive_pieces_of_the_ring(tmp_path):
    samples = Samples(dataset_of(tmp_path / "a", [10] * 3), 8, seed=None)
    for i in range(9):
        assert samples.sample(i).tokens.tolist() == [(8 * i + j) % 30 for j in range(9)]
    whole, _ = parts(dataset_of(tmp_path / "a", [10] * 3), 8, 5, 0.0, "a", shuffle=False)
    assert whole.sample(1).tokens.tolist() == samples.sample(1).tokens.tolist()
