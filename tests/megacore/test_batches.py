"""Batches: the same samples in every layout, labels shifted by one, documents kept apart; the prefetch thread."""

import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.data.batches import Batches, Prefetch, TokenError, collate, filled_up, in_vain
from megacore.data.samples import Sample
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.labels import IGNORE


def sample(tokens, documents=None, counted=None) -> Sample:
    """One document, and all of it counts, where nothing else is said."""
    documents = np.zeros(tokens.size) if documents is None else documents
    counted = np.ones(tokens.size) if counted is None else counted
    return Sample(tokens, np.asarray(documents, np.int32), np.asarray(counted, np.bool_))


@dataclass(frozen=True)
class Numbered:
    """Sample i holds the tokens 10 i, 10 i + 1, ..."""

    length: int = 3

    def sample(self, index: int) -> Sample:
        return sample(np.arange(self.length + 1) + 10 * index)


def indices(batch) -> list[int]:
    return (batch.tokens[:, 0] // 10).tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_a_microbatch_is_where_the_formula_says(micro, size, whole, step, separate):
    """And where the global batch has ended, its last sample fills it up, of which nothing counts."""
    end, computed = (step + 1) * whole, filled_up(whole, micro, size)
    assert whole <= computed < whole + micro * size
    for rank in range(size):
        batches = Batches(Numbered(), whole, micro, rank, size, separate).microbatches(step)
        assert len(batches) * micro * size == computed
        for m, batch in enumerate(batches):
            first = step * whole + (m * size + rank) * micro
            assert indices(batch) == [min(each, end - 1) for each in range(first, first + micro)]
            counts = np.arange(first, first + micro) < end
            assert batch.blank == micro - counts.sum() and batch.tokens.shape == (micro, 3)
            assert ((batch.labels != IGNORE) == counts[:, None]).all()
            assert (batch.padding is None) == counts.all()
            assert batch.padding is None or (batch.padding == ~counts[:, None]).all()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_a_replica_has_a_successive_part_whatever_its_ranks(micro, ranks, replicas, times, step):
    whole = micro * ranks * replicas * times
    for replica in range(replicas):
        of_all = [
            Batches(Numbered(), whole, micro, rank, ranks * replicas, replicas=replicas).microbatches(step)
            for rank in range(replica * ranks, (replica + 1) * ranks)
        ]
        first, share = step * whole + replica * whole // replicas, whole // replicas
        together = [i for batches in zip(*of_all, strict=True) for batch in batches for i in indices(batch)]
        assert together == list(range(first, first + share))


phases = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)), max_size=4)


@given(whole=st.integers(1, 48), phases=phases)
def test_resuming_in_another_layout_neither_repeats_nor_skips(whole, phases):
    seen, step = [], 0
    for micro, size, steps in phases:
        for _ in range(steps):
            ranks = [Batches(Numbered(), whole, micro, rank, size).microbatches(step) for rank in range(size)]
            # One microbatch of all ranks after the other, as every layout with one rank would read them.
            of_all = [batch for together in zip(*ranks, strict=True) for batch in together]
            seen += [i for batch in of_all for i in indices(batch)[: len(batch.tokens) - batch.blank]]
            step += 1
    assert seen == list(range(step * whole))
    # Another global batch goes on at the same sample.
    assert indices(Batches(Numbered(), 4, 2, 0, 1).microbatches_from(10)[1]) == [12, 13]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(2, 12))
def test_separate_documents(rows, length):
    samples = []
    for runs in rows:
        documents = np.repeat(np.arange(len(runs) + 1), [*runs, length + 1])[: length + 1].astype(np.int32)
        samples.append(sample(np.arange(length + 1), documents))
    batch = collate(samples, separate_documents=True)
    assert batch.documents == tuple(len([*g]) for s in samples for _, g in itertools.groupby(s.documents[:-1]))
    for row, each in enumerate(samples):
        inputs, after = each.documents[:-1], each.documents[1:]
        position = 0
        for t in range(length):
            position = position + 1 if t and inputs[t] == inputs[t - 1] else 0
            assert batch.positions[row, t] == position
            assert batch.labels[row, t] == (each.tokens[t + 1] if inputs[t] == after[t] else IGNORE)


@pytest.mark.parametrize("separate", [False, True])
def test_labels_that_do_not_count_are_ignored(separate):
    batch = collate([sample(np.arange(5), counted=[1, 0, 1, 0, 1]), sample(np.arange(5), counted=[0] * 5)], separate)
    assert batch.labels.tolist() == [[IGNORE, 2, IGNORE, 4], [IGNORE] * 4]
    assert batch.tokens.tolist() == [[0, 1, 2, 3]] * 2


def test_what_is_computed_in_vain_is_told():
    assert not [*in_vain(8, 2, 4)]
    assert [*in_vain(8, 1, 3)] == [
        "batch.global_size (8) is not shared out evenly by batch.micro_size x dp x ep = 1 x 3: a step computes 9 "
        "sequences, 1 of them blank (11%); none is with 6 or 9"
    ]
    assert next(in_vain(3, 4, 2)).endswith("a step computes 8 sequences, 5 of them blank (62%); none is with 8")


def test_ranks_of_cp_are_given_their_own_tokens():
    """With the labels, positions and rows that they have in the whole, which the prefetch thread cuts up."""
    (whole,) = Batches(Numbered(7), 1, 2, 0, 1).microbatches(3)
    seen = list[int]()
    for rank in range(2):
        (own,) = Batches(Numbered(7), 1, 2, 0, 1, context=ContextParallel(2), context_rank=rank).microbatches(3)
        assert own.split is not None and own.rows is not None
        assert own.blank == 1 and own.tokens.shape == (7,)
        at = own.split.indices(rank)
        for name in ("tokens", "labels", "positions", "padding"):
            assert np.array_equal(getattr(own, name), getattr(whole, name).ravel()[at])
        assert own.rows is not None and np.array_equal(own.rows, at // 7)
        seen += at.tolist()
    assert sorted(seen) == list(range(14))


def test_steps_are_prefetched_in_order_up_to_their_end_or_failure():
    """What the items raise is raised after the items before it, and the end stays the end."""
    with Prefetch(Batches(Numbered(), 2, 1, 0, 1).steps(6)) as steps:
        assert [indices(batch) for batch in itertools.chain(next(steps), next(steps))] == [[6], [7], [8], [9]]
    ahead = Prefetch(iter(range(5)))
    assert list(ahead) == [0, 1, 2, 3, 4] and list(ahead) == []

    def items():
        yield 1
        raise OSError("disk gone")

    ahead = Prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_prefetch_is_bounded_and_closes():
    made = []

    def items():
        for i in itertools.count():
            made.append(i)
            yield i

    before = threading.active_count()
    with Prefetch(items(), depth=2) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == [0, 1, 2, 3]  # one taken, two ready, one in the thread's hand
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.quick
def test_ids_that_the_model_does_not_have_are_named() -> None:
    batches = Batches(Numbered(), 2, 1, 0, 1, vocabulary=34)  # sample 3 holds 30 to 33, sample 4 begins with 40
    assert indices(batches.microbatches(1)[1]) == [3]
    with pytest.raises(TokenError, match=r"sample 4 has the token id 40, and the model's vocabulary ends at 33"):
        batches.microbatches(2)
    with pytest.raises(TokenError, match="sample 0 has the token id -1"):
        Batches(Negative(), 1, 1, 0, 1, vocabulary=34).microbatches(0)


class Negative(Numbered):
    def sample(self, index: int) -> Sample:
        return sample(np.array([3, -1, 2, 1]))
