"""The samples of training and validation that a recipe's data section names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megacore.config import Config, CorpusConfig
from megacore.data import own_rows, text_streams
from megacore.data.blend import Blend
from megacore.data.corpus import Corpus
from megacore.data.data_sets import files_of, text_files_of
from megacore.data.examples import Examples, Facts, Preparation
from megacore.data.indexed import IndexedDataset
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.packing import Packed
from megacore.data.samples import Epochs, Source, of_least, parts, split_documents
from megacore.data.text import InputError
from megacore.store.io.strict_json import StoreError

NO_FILES = ModelFiles({}, {}, 0)
EXAMPLES = "examples"
"""The folder of a run that prepared examples are kept in."""
_LOOKED_AT = 1000
"""Texts that are looked at for padding at their ends."""
OrderedSource = own_rows.StreamedRows | text_streams.StreamedTexts
"""Samples that are read in order: from their beginning, or from a state, which is JSON."""
Known = IndexedDataset | Examples | own_rows.IndexedRows | OrderedSource
Split = Callable[[float, str], tuple[Source, Source | None]]
"""(fraction, name) -> the samples of a corpus, so named, and those of a fraction that is held out, None for 0."""


@dataclass(frozen=True)
class Corpora:
    """The samples to train on, and those held out (None without any); each endless, in a fixed order. separate: whether
    documents are kept apart. remarks: lines for the user about the data. corpora: those to train on."""

    train: Source
    validation: Source | None
    separate: bool = False
    remarks: tuple[str, ...] = ()
    corpora: tuple[Known, ...] = ()

    @cached_property
    def identities(self) -> list[str]:
        """The digest of each corpus to train on: tells whether a run goes on with the tokens that it began with."""
        return [corpus.identity for corpus in self.corpora]

    @property
    def have_images(self) -> bool:
        """Whether chats have images."""
        return has_images(self.train) or has_images(self.validation)

    @classmethod
    def open(cls, config: Config, model: ModelFiles | None = None, checked: bool = False) -> Corpora:
        """Map the token files and split them; of files of examples, those that are made for ``model``. ``model``: the
        files that prepare examples; ``checked``: whether another process of this machine reads the indexes of the token
        files, so that this one need not. Raises ValueError: a file is damaged, or too short for one sample; examples
        are bad, or the model's tokenizer or template does not serve."""
        data, length, remarks = config.data, config.data.sequence_length, list[str]()

        def opened(corpus: CorpusConfig) -> tuple[Known, Split]:
            if corpus.is_imported:
                rows = own_rows.opened(config, corpus)
                return rows, rows.split
            if corpus.streams is not None and model is not None:
                texts = _texts(config, corpus, model)
                streamed = text_streams.StreamedTexts(texts, length, config.batch.global_size, data.workers)
                return streamed, streamed.split
            if not corpus.has_examples and corpus.streams is None:
                tokens, path, least = IndexedDataset(Path(corpus.path), checked), corpus.path, corpus.least
                return tokens, lambda fraction, _: parts(tokens, length, data.seed, fraction, path, least, data.shuffle)
            if model is None:
                raise InputError(f"{corpus.path} has examples, and there is no model to prepare them for")
            source, folder = files_of(config, corpus), Path(config.out) / EXAMPLES
            examples = Preparation(source, folder, config.chat, config.example_tokens - 1, model).examples()
            name = corpus.path if corpus.split is None else f"{corpus.path} ({corpus.split})"
            remarks.extend(_remarks(name, examples.facts, config.example_tokens, _unit(config)))
            if config.scores:
                remarks.extend(_padding_at_ends(examples, model.config.get("pad_token_id")))
            return examples, partial(_split_examples, config, corpus, examples, remarks)

        files = [opened(corpus) for corpus in data.train]
        fraction = 0.0 if data.validation else data.validation_fraction
        sides = [split(fraction, "to train on") for _, split in files]
        validation = [opened(corpus)[1](0.0, "to validate on")[0] for corpus in data.validation]
        held_out = [held for _, held in sides if held is not None]
        validation = validation or (held_out if len(held_out) == len(sides) else [])
        if config.evaluate.every and not validation:
            raise InputError(
                "evaluate.every has nothing to evaluate, for nothing can be held out of a data set that is iterated, "
                "or of texts that are streamed: name data.validation, or set evaluate.every=0"
            )
        return cls(
            _blend([train for train, _ in sides], data.train, data.temperature),
            _blend(validation, data.validation or data.train, data.temperature) if validation else None,
            data.within_documents or data.train[0].has_examples,
            tuple(remarks),
            tuple(known for known, _ in files),
        )

    @classmethod
    def look(cls, config: Config) -> Iterator[str]:
        """Yield the problems of the data that take no tokenizer; of files of examples, those of their first rows."""
        for corpus in dict.fromkeys((*config.data.train, *config.data.validation)):
            try:
                if corpus.streams is not None:
                    _texts(config, corpus, NO_FILES).look()
                elif corpus.has_examples:
                    files_of(config, corpus).look(config.chat.bad_lines)
                elif not corpus.is_imported:  # what the user's own code makes is made once
                    IndexedDataset(Path(corpus.path))
            except ValueError as error:
                yield str(error)

    def samples_of(self, epochs: float) -> int:
        """Return the number of first samples in which each corpus to train on has been passed so often."""
        blend = self.train if isinstance(self.train, Blend) else None
        last = [0]
        for number, source in enumerate(blend.sources if blend else [self.train]):
            if not isinstance(source, Epochs):
                raise InputError(
                    "train.epochs counts passes, and the data has no end: leave it out, and set train.steps"
                )
            count = math.ceil(epochs * source.per_epoch)
            last.append(blend.until(number, count) if blend else count)
        return max(last)


def _split_examples(
    config: Config, corpus: CorpusConfig, examples: Examples, remarks: list[str], fraction: float, name: str
) -> tuple[Source, Source | None]:
    """Split prepared examples, see :data:`Split`; those of a chat are on one side."""
    data, chats = config.data, examples.chats

    def packed(chosen: npt.NDArray[np.int64], name: str) -> Source:
        if corpus.least:
            chosen = of_least([(chosen, examples.lengths[chosen])], corpus.least, f"{corpus.path} {name}")
        made = Packed(examples, data.sequence_length, data.seed, chosen, config.chat.pack, config.example_tokens)
        rows = f"{made.per_epoch:,} rows of {made.length:,} tokens, {made.fill:.1%} full"
        remarks.append(f"  {name}: {chosen.size:,} {_unit(config)} in {rows}")
        return made

    sides = split_documents(int(chats.max(initial=-1)) + 1, fraction, data.seed)
    kept, held = (np.flatnonzero(np.isin(chats, side)) for side in sides)
    return packed(kept, name), packed(held, "held out") if held.size else None


def _unit(config: Config) -> str:
    return "examples" if config.preference is None else "pairs"


def _remarks(path: str, known: Facts, most: int, what: str = "examples") -> list[str]:
    kinds = ", ".join(
        f"{name} in {count:,} rows" if len(known.formats) > 1 else name for name, count in known.formats.items()
    )
    lines = [f"{path}: {kinds}: {known.examples:,} {what} of {known.tokens:,} tokens, {known.counted:,} of which count"]
    if known.split:
        lines.append(f"  {known.split:,} chats are several examples, as the template rewrites what is past")
    if known.cut or known.dropped:
        lines.append(f"  longer than {most:,} tokens: {known.cut:,} cut, {known.dropped:,} dropped")
    if known.skipped:
        lines.append(f"  {known.skipped:,} bad lines skipped, such as {known.faults[0]}")
    return lines


def _blend(sources: list[Source], corpora: tuple[CorpusConfig, ...], temperature: float) -> Source:
    if len(sources) == 1:
        return sources[0]
    largest = max(corpus.weight for corpus in corpora)  # a small temperature's powers of it would have no float
    return Blend(
        sources,
        [corpus.weight if temperature == 1 else (corpus.weight / largest) ** (1 / temperature) for corpus in corpora],
    )


def _padding_at_ends(examples: Examples, padding: object) -> Iterator[str]:
    """Say whether texts end with the token that transformers takes for padding behind them."""
    looked_at = min(examples.count * examples.documents, _LOOKED_AT)
    if found := sum(int(examples.example(index)[0][-1]) == padding for index in range(looked_at)):
        yield (
            f"  {found:,} of the first {looked_at:,} texts end with token {padding}, the model's pad_token_id: their "
            "score is learned there, and transformers would read it at the token before: name a pad_token_id that ends "
            "none in the config.json of the export"
        )


def _texts(config: Config, corpus: CorpusConfig, model: ModelFiles) -> text_streams.TextFiles:
    """Return the files of a corpus that is streamed, tokenized by what ``model`` has."""
    assert corpus.streams is not None
    held = replace(model, files={name: file.held() for name, file in model.files.items()})
    name = corpus.path if corpus.split is None else f"{corpus.path} ({corpus.split})"
    return text_streams.TextFiles(
        name,
        tuple(text_files_of(config, corpus)),
        corpus.streams,
        held,
        key=config.data.map.get("text", "text"),
        seed=config.data.seed if config.data.shuffle else None,
        skip=config.chat.bad_lines == "skip",
        least=corpus.least,
    )


def streams(source: Source, index: int) -> Iterator[tuple[OrderedSource, int]]:
    """Yield each stream that samples are taken of, with the first one that those from ``index`` on take of it."""
    if isinstance(source, Blend):
        for each, count in zip(source.sources, source.counts(index), strict=True):
            yield from streams(each, int(count))
    elif isinstance(source, OrderedSource):
        yield source, index


def packed_of(source: Source) -> list[Packed]:
    """Return what of the samples to train on, or of those held out, is rows of examples."""
    sources = source.sources if isinstance(source, Blend) else (source,)
    return [each for each in sources if isinstance(each, Packed)]


def has_images(source: Source | None) -> bool:
    """Return whether there are images in some of them."""
    return source is not None and any(each.examples.has_images for each in packed_of(source))


def end_of_text(config: Config, corpora: Sequence[Known]) -> int | None:
    """Return the token that ends each document of all corpora to train on, which are open; None where they have none,
    or several."""
    found = set[int | None]()
    for corpus, known in zip(config.data.train, corpora, strict=False):
        if isinstance(known, text_streams.StreamedTexts):
            found.add(known.end)
        elif not corpus.has_examples:
            found.add(written.end_of_document if (written := Corpus.beside(Path(corpus.path))) else None)
    return found.pop() if len(found) == 1 else None


def vocabulary_problems(config: Config, vocab_size: int) -> Iterator[str]:
    """Yield the corpora with token ids that the model does not have."""
    for key, corpora in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for corpus in corpora:
            try:
                known = Corpus.beside(Path(corpus.path))
            except StoreError as error:
                yield f"{key}: {error}"
                continue
            if known and known.vocabulary > vocab_size:
                yield (
                    f"{key}: the token ids of {corpus.path} go up to {known.vocabulary - 1}, and the model's "
                    f"vocabulary has {vocab_size}: set model.vocab_size to {known.vocabulary} or more"
                )
