"""The samples of training and validation that a recipe's data section names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megacore.config import Config, CorpusConfig
from megacore.data import samples
from megacore.data.batches import Batches
from megacore.data.blend import Blend
from megacore.data.corpus import Corpus
from megacore.data.examples import Examples, Facts, Preparation
from megacore.data.indexed import IndexedDataset
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.packing import Packed
from megacore.data.samples import Source, parts, split_documents
from megacore.data.text import InputError
from megacore.store.strict_json import StoreError
from parallel.context_split import ContextParallel

EXAMPLES = "examples"
"""The folder of a run that prepared examples are kept in."""


@dataclass(frozen=True)
class Corpora:
    """The samples to train on, and those held out (None without any); each endless, in a fixed order.

    separate: whether documents are kept apart. remarks: lines for the user about the data. corpora: those to train on.
    """

    train: Source
    validation: Source | None
    separate: bool = False
    remarks: tuple[str, ...] = ()
    corpora: tuple[IndexedDataset | Examples, ...] = ()

    @cached_property
    def identities(self) -> list[str]:
        """The digest of each corpus to train on: tells whether a run goes on with the tokens that it began with."""
        return [corpus.identity for corpus in self.corpora]

    @classmethod
    def open(cls, config: Config, model: ModelFiles | None = None, checked: bool = False) -> Corpora:
        """Map the token files and split them; of files of examples, those that are made for ``model``.

        Args:
            model: The files that prepare examples.
            checked: Whether another process of this machine reads the indexes of the token files, so that this one
                need not.

        Raises:
            ValueError: a file is damaged, or too short for one sample; examples are bad, or the model's tokenizer or
                template does not serve.
        """
        data = config.data
        if data.train[0].has_examples:
            if model is None:
                raise InputError(f"{data.train[0].path} has examples, and there is no model to prepare them for")
            return cls._of_examples(config, model)
        train: list[Source] = []
        held_out: list[Source] = []
        opened = tuple(IndexedDataset(Path(corpus.path), checked) for corpus in data.train)
        for corpus, dataset in zip(data.train, opened, strict=True):
            kept, held = parts(dataset, data.sequence_length, data.seed, _held_out(config), corpus.path, corpus.least)
            train.append(kept)
            held_out += [held] if held else []
        validation: list[Source] = [
            parts(
                IndexedDataset(Path(each.path), checked), data.sequence_length, data.seed, 0.0, each.path, each.least
            )[0]
            for each in data.validation
        ]
        made = cls._blended(config, train, validation or held_out, data.within_documents)
        return replace(made, corpora=opened)

    @classmethod
    def look(cls, config: Config, model: ModelFiles) -> Iterator[str]:
        """Yield the problems of the data of a run that will not start as it is; of files of examples, those of their
        first rows. Nothing is kept."""
        data = config.data
        for corpus in (*data.train, *data.validation):
            try:
                if corpus.has_examples:
                    Preparation(Path(corpus.path), Path(), config.chat, data.sequence_length, model).look()
                else:
                    IndexedDataset(Path(corpus.path))
            except ValueError as error:
                yield str(error)

    @classmethod
    def _of_examples(cls, config: Config, model: ModelFiles) -> Corpora:
        data = config.data
        folder, remarks = Path(config.out) / EXAMPLES, list[str]()

        def prepared(corpus: CorpusConfig) -> Examples:
            examples = Preparation(Path(corpus.path), folder, config.chat, data.sequence_length, model).examples()
            remarks.extend(_remarks(corpus.path, examples.facts, data.sequence_length))
            return examples

        def packed(examples: Examples, chosen: npt.NDArray[np.int64], name: str, corpus: CorpusConfig) -> Source:
            if corpus.least:
                known = [(chosen, examples.lengths[chosen])]
                chosen = samples.of_least(known, corpus.least, f"{corpus.path} {name}")
            made = Packed(examples, data.sequence_length, data.seed, chosen, config.chat.pack, name)
            rows = f"{made.per_epoch:,} rows of {made.length:,} tokens, {made.fill:.1%} full"
            remarks.append(f"  {name}: {chosen.size:,} examples in {rows}")
            return made

        train: list[Source] = []
        held_out: list[Source] = []
        known = tuple(prepared(corpus) for corpus in data.train)
        for corpus, examples in zip(data.train, known, strict=True):
            chats = int(examples.chats.max(initial=-1)) + 1
            split = split_documents(chats, _held_out(config), data.seed)  # the examples of a chat are on one side
            kept, held = (np.flatnonzero(np.isin(examples.chats, side)) for side in (split.train, split.validation))
            train.append(packed(examples, kept, "to train on", corpus))
            if held.size:
                held_out.append(packed(examples, held, "held out", corpus))
        validation: list[Source] = []
        for corpus in data.validation:
            examples = prepared(corpus)
            validation.append(packed(examples, np.arange(examples.count), "to validate on", corpus))
        made = cls._blended(config, train, validation or held_out, separate=True)
        return replace(made, remarks=tuple(remarks), corpora=known)

    @classmethod
    def _blended(cls, config: Config, train: list[Source], held_out: list[Source], separate: bool) -> Corpora:
        data = config.data
        validation = _blend(held_out, data.validation or data.train) if held_out else None
        return cls(_blend(train, data.train), validation, separate)

    def batches(
        self,
        source: Source,
        config: Config,
        data_rank: int,
        data_size: int,
        vocabulary: int | None = None,
        context: ContextParallel = ContextParallel(),  # noqa: B008
        context_rank: int = 0,
    ) -> Batches:
        """Return the batches of one data-parallel rank, or what a rank of cp holds of them; ids beyond the vocabulary
        raise a TokenError when met."""
        sizes = config.batch.global_size, config.batch.micro_size, data_rank, data_size
        return Batches(source, *sizes, self.separate, vocabulary, context, context_rank)


def _held_out(config: Config) -> float:
    """Return the fraction that is held out; 0 where there are validation corpora."""
    return 0.0 if config.data.validation else config.data.validation_fraction


def _remarks(path: str, known: Facts, length: int) -> list[str]:
    lines = [f"{path}: {known.examples:,} examples of {known.tokens:,} tokens, {known.counted:,} of which count"]
    if known.split:
        lines.append(f"  {known.split:,} chats are several examples, as the template rewrites what is past")
    if known.cut or known.dropped:
        lines.append(f"  longer than {length + 1:,} tokens: {known.cut:,} cut, {known.dropped:,} dropped")
    if known.skipped:
        lines.append(f"  {known.skipped:,} bad lines skipped, such as {known.faults[0]}")
    return lines


def _blend(sources: list[Source], corpora: tuple[CorpusConfig, ...]) -> Source:
    return sources[0] if len(sources) == 1 else Blend(sources, [corpus.weight for corpus in corpora])


def facts(corpus: CorpusConfig) -> Corpus | None:
    """Return the facts that `megacore tokenize` has written about a corpus; None for token files of other origin."""
    return Corpus.beside(Path(corpus.path))


def end_of_text(config: Config) -> int | None:
    """Return the token that ends each document of all corpora to train on; None where they have none, or several."""
    known = [facts(corpus) for corpus in config.data.train if not corpus.has_examples]
    found = {each.end_of_document if each else None for each in known}
    return found.pop() if len(found) == 1 else None


def vocabulary_problems(config: Config, vocab_size: int) -> Iterator[str]:
    """Yield the corpora with token ids that the model does not have."""
    for key, corpora in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for corpus in corpora:
            try:
                known = facts(corpus)
            except StoreError as error:
                yield f"{key}: {error}"
                continue
            if known and known.vocabulary > vocab_size:
                yield (
                    f"{key}: the token ids of {corpus.path} go up to {known.vocabulary - 1}, and the model's "
                    f"vocabulary has {vocab_size}: set model.vocab_size to {known.vocabulary} or more"
                )
