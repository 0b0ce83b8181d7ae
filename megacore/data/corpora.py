"""From the recipe's data section to the samples of training and validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megacore.config import Config, Corpus
from megacore.data.batches import Batches
from megacore.data.blend import Blend
from megacore.data.corpus import CORPUS
from megacore.data.corpus import Corpus as Facts
from megacore.data.indexed import IndexedDataset
from megacore.data.samples import Samples, Source, split_documents


@dataclass(frozen=True)
class Corpora:
    """The samples to train on, and those held out (None without any); each endless, in a fixed order."""

    train: Source
    validation: Source | None

    @classmethod
    def open(cls, config: Config) -> Corpora:
        """Map the token files and split them.

        Raises:
            ValueError: a file is damaged, or too short for one sample.
        """
        data = config.data
        train: list[Samples] = []
        held_out: list[Samples] = []
        for corpus in data.train:
            dataset = IndexedDataset(Path(corpus.path))
            fraction = 0.0 if data.validation else data.validation_fraction
            split = split_documents(dataset.documents, fraction, data.seed)
            for part, documents, made in (("train", split.train, train), ("validation", split.validation, held_out)):
                if documents.size or part == "train":
                    name = f"the {part} part of {corpus.path}"
                    made.append(Samples(dataset, data.sequence_length, data.seed, documents, name))
        validation = [
            Samples(IndexedDataset(Path(c.path)), data.sequence_length, data.seed, name=c.path) for c in data.validation
        ]
        return cls(
            _blend(train, data.train),
            _blend(validation, data.validation) if validation else _blend(held_out, data.train) if held_out else None,
        )

    def batches(
        self, source: Source, config: Config, data_rank: int, data_size: int, vocabulary: int | None = None
    ) -> Batches:
        """The batches of one data-parallel rank; ids beyond the vocabulary raise a TokenError when they are met."""
        batch, separate = config.batch, config.data.within_documents
        return Batches(source, batch.global_size, batch.micro_size, data_rank, data_size, separate, vocabulary)


def _blend(samples: list[Samples], corpora: tuple[Corpus, ...]) -> Source:
    return samples[0] if len(samples) == 1 else Blend(samples, [corpus.weight for corpus in corpora])


def facts(corpus: Corpus) -> Facts | None:
    """What `megacore tokenize` has written about a corpus; None for token files of other origin."""
    prefix = Path(corpus.path)
    known = Facts.read(prefix.parent) if (prefix.parent / CORPUS).is_file() else None
    return known if known and known.name == prefix.name else None


def vocabulary_problems(config: Config, vocab_size: int) -> Iterator[str]:
    """Corpora with token ids that the model does not have."""
    for key, corpora in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for corpus in corpora:
            known = facts(corpus)
            if known and known.vocabulary > vocab_size:
                yield (
                    f"{key}: the token ids of {corpus.path} go up to {known.vocabulary - 1}, and the model's "
                    f"vocabulary has {vocab_size}: set model.vocab_size to {known.vocabulary} or more"
                )
