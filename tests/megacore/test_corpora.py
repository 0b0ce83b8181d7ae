"""From the data section to samples: the split, blends, what is known of a corpus and what does not fit."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from engine import VOCAB, write_corpus

from megacore.config import Config, CorpusConfig, DataConfig
from megacore.data.blend import Blend
from megacore.data.corpora import Corpora, vocabulary_problems
from megacore.data.corpus import CORPUS, Corpus
from megacore.data.indexed import IndexedWriter
from megacore.data.samples import Source

FACTS = Corpus("corpus", 60, 1440, 5000, 3.5, VOCAB, None, 4.0, 0, 0)


def write(prefix: Path, *lengths: int, start: int = 0) -> str:
    """Documents of the given lengths, their tokens counted on from ``start``."""
    with IndexedWriter(prefix, 60000) as writer:
        for length in lengths:
            writer.write(np.arange(start, start + length))
            start += length
    return str(prefix)


def config(
    *train: str | CorpusConfig, validation: tuple[str, ...] = (), fraction: float = 0.0, length: int = 8
) -> Config:
    corpora = tuple(each if isinstance(each, CorpusConfig) else CorpusConfig(each) for each in train)
    held_out = tuple(map(CorpusConfig, validation))
    return Config(data=DataConfig(corpora, held_out, fraction, length))


def tokens(source: Source, count: int) -> set[int]:
    return {int(token) for i in range(count) for token in source.sample(i).tokens[:-1]}


def test_what_is_held_out_is_a_fraction_or_other_corpora_or_nothing(tmp_path: Path) -> None:
    """And shares no token with training."""
    a, b = write(tmp_path / "a", *[10] * 50), write(tmp_path / "b", *[10] * 50, start=1000)
    corpora = Corpora.open(config(a, fraction=0.3))
    assert corpora.validation is not None
    train, held_out = tokens(corpora.train, 30), tokens(corpora.validation, 10)
    assert len(train) > 200 and len(held_out) > 60 and not train & held_out
    whole, other = Corpora.open(config(a)), Corpora.open(config(a, validation=(b,), fraction=0.3))
    assert len(tokens(whole.train, 62)) == len(tokens(other.train, 62)) == 62 * 8
    assert whole.validation is None and other.validation is not None
    assert min(tokens(other.validation, 62)) >= 1000


def test_several_corpora_are_blended_by_weight_on_both_sides(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", *[10] * 50), write(tmp_path / "b", *[10] * 50, start=1000)
    corpora = Corpora.open(config(CorpusConfig(a, 3.0), CorpusConfig(b, 1.0), fraction=0.3))
    for source in (corpora.train, corpora.validation):
        assert isinstance(source, Blend)
        of_b = [source.sample(i).tokens[0] >= 1000 for i in range(40)]
        assert sum(of_b) == 10


@pytest.mark.parametrize(("temperature", "share"), [(2.0, 15), (1e9, 30), (0.5, 1), (1e-9, None)])
def test_a_temperature_moves_the_shares_of_a_blend(tmp_path: Path, temperature: float, share: int | None) -> None:
    """To w^(1/T) of weights of 9 and 1, of 60 samples; a share of nothing is refused."""
    a, b = write(tmp_path / "a", *[10] * 50), write(tmp_path / "b", *[10] * 50, start=1000)
    asked = config(CorpusConfig(a, 9.0), CorpusConfig(b, 1.0))
    asked = replace(asked, data=replace(asked.data, temperature=temperature))
    if share is None:
        with pytest.raises(ValueError, match=r"each must be a positive number"):
            Corpora.open(asked)
        return
    source = Corpora.open(asked).train
    assert sum(source.sample(i).tokens[0] >= 1000 for i in range(60)) == share


def test_documents_are_kept_apart_where_that_is_asked_for(tmp_path: Path) -> None:
    plain = config(write(tmp_path / "a", *[10] * 50))
    apart = Config(data=DataConfig(plain.data.train, (), 0.0, 8, within_documents=True))
    assert Corpora.open(apart).separate and not Corpora.open(plain).separate


MIXED = [3, 40, 10, 25, 9, 30] * 12
"""Lengths of documents; those of 25 and more begin at tokens that these sums say."""
LONG = {
    token
    for begin, length in zip(np.cumsum([0, *MIXED[:-1]]).tolist(), MIXED, strict=True)
    if length >= 25
    for token in range(begin, begin + length)
}


def test_documents_of_a_least_length_alone(tmp_path: Path) -> None:
    """On both sides of what is held out, which are the same with and without; and where a corpus is named for it."""
    path = write(tmp_path / "a", *MIXED)
    whole, long = (Corpora.open(config(CorpusConfig(path, least=least), fraction=0.3)) for least in (0, 25))
    sides = []
    for every, some in ((whole.train, long.train), (whole.validation, long.validation)):
        assert every is not None and some is not None
        sides.append(tokens(some, 300))
        assert sides[-1] <= tokens(every, 300) and sides[-1] <= LONG
    assert sides[0] | sides[1] == LONG, "none is lost"
    twice = config(CorpusConfig(path), CorpusConfig(path, least=25), fraction=0.3)
    corpora = Corpora.open(twice)
    assert corpora.validation is not None
    assert not tokens(corpora.train, 600) & tokens(corpora.validation, 600), "named twice, it holds the same ones out"
    given = DataConfig((CorpusConfig(path),), (CorpusConfig(path, least=31),), 0.3, 8)
    named = Corpora.open(Config(data=given)).validation
    assert named is not None and len(tokens(named, 300)) == 12 * 40


def test_a_sample_of_long_documents_is_a_function_of_its_number(tmp_path: Path) -> None:
    """So a run that is resumed goes on with the sample that it would have had."""
    path = write(tmp_path / "a", *MIXED)
    plain = config(CorpusConfig(path, least=25), fraction=0.3)
    first, again = Corpora.open(plain).train, Corpora.open(plain).train
    drawn = [first.sample(i) for i in range(150)]
    for i in (149, 7, 80):
        sample = again.sample(i)
        assert (sample.tokens == drawn[i].tokens).all() and (sample.documents == drawn[i].documents).all()
        ends = np.flatnonzero(np.diff(sample.tokens) != 1)
        assert (np.diff(sample.documents)[ends] == 1).all() and sample.documents[-1] == ends.size


@pytest.mark.parametrize(
    ("least", "fraction", "words"),
    [
        (41, 0.0, r"none of the 72 document\(s\) of .*a has the 41 tokens of least, the longest has 40: lower least"),
        (41, 0.3, r"none of the \d\d document\(s\) of the train part of .*the longest has 40"),
        (40, 0.01, r"none of the 2 document\(s\) of the validation part of .*give this split a larger fraction"),
    ],
)
def test_a_least_length_that_leaves_nothing_is_refused(tmp_path: Path, least: int, fraction: float, words: str) -> None:
    corpus = CorpusConfig(write(tmp_path / "a", *MIXED), least=least)
    with pytest.raises(ValueError, match=words):
        Corpora.open(config(corpus, fraction=fraction))


@pytest.mark.parametrize(
    ("lengths", "fraction", "words"),
    [
        ((8,), 0.0, ("short has", "8 tokens in 1 document", "takes 9")),
        ((), 0.0, ("short has", "0 tokens in 0 document")),
        ((50, 3), 0.3, ("part of", "3 tokens in 1 document")),
        ((50,), 0.3, ("hold out", "1 document")),
    ],
    ids=["short", "empty", "short-validation", "one-document"],
)
def test_what_is_too_short_is_named(
    tmp_path: Path, lengths: tuple[int, ...], fraction: float, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        Corpora.open(config(write(tmp_path / "short", *lengths), fraction=fraction))
    assert all(word in str(error.value) for word in words), error.value


# -- what is known of a corpus


def test_facts_are_those_of_this_pair(tmp_path: Path) -> None:
    """Another pair in the same folder may be of another tokenizer."""
    assert Corpus.beside(tmp_path / "corpus") is None
    FACTS.write(tmp_path)
    assert Corpus.beside(tmp_path / "corpus") == FACTS
    assert Corpus.beside(tmp_path / "other") is None
    assert json.loads((tmp_path / CORPUS).read_text()) == asdict(FACTS)


def test_a_vocabulary_that_is_too_small_is_named_with_the_way_out(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus")
    FACTS.write(tmp_path)
    both = config(prefix, validation=(prefix,))
    assert list(vocabulary_problems(both, VOCAB)) == []
    found = list(vocabulary_problems(both, VOCAB - 1))
    assert [problem.partition(":")[0] for problem in found] == ["data.train", "data.validation"]
    for problem in found:
        assert "go up to 60" in problem and "has 60" in problem and "model.vocab_size to 61 or more" in problem
