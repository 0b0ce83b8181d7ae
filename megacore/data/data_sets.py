"""The files of a corpus of examples: a file, a split of a folder, or one of a data set of the hub.

A split is known by names alone, ``SPLIT.jsonl``, ``SPLIT-00000-of-00005.parquet`` or a folder ``SPLIT``, as the hub and
`datasets` have them: no card is read, and no code is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from megacore.config import EXAMPLES, Config, CorpusConfig, has_examples
from megacore.data import text
from megacore.data.examples import ExampleFiles
from megacore.data.text import InputError, snapshot, without_link
from megacore.say import brief
from megacore.store.io import hub
from megacore.store.io.files import leaves
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError, read_json

HELD_OUT = ("validation", "valid", "dev", "test")
"""Splits to validate on, of which the first that is there is taken."""
STATE = "state.json"
"""Beside the tables that `datasets` saved: which files they are."""
_CARD = ("README.md", "LICENSE*")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_LISTED = 20  # names in a message


def resolved(config: Config, begun: Sequence[str] = ()) -> Config:
    """Return a config whose data sets of the hub are named with their commits, and whose sets all name their splits.
    ``begun``: the paths of the data that the run began with, if it goes on: a data set stays at its commit. Raises
    InputError: a set has no such split, or it is not clear which; StoreError: as of
    :func:`megacore.store.io.hub.fetch`."""
    known = [HubName.parse(path, "dataset") for path in begun]
    before = {name.repository: name for name in known if name is not None and name.is_pinned}

    def one(corpus: CorpusConfig, splits: Sequence[str]) -> CorpusConfig:
        name = corpus.hub_name
        if name is not None and not name.is_pinned:
            pinned = before.get(name.repository) or name.at(hub.fetch(name, _CARD))
            return one(replace(corpus, path=str(pinned)), splits)
        whole = corpus.streams is not None and name is None  # a folder of texts has no splits but those that are named
        chooses = corpus.is_set and corpus.split is None and not whole
        return replace(corpus, split=_choice(corpus, splits)) if chooses else corpus

    data = config.data
    train = tuple(one(corpus, (data.split,)) for corpus in data.train)
    validation = tuple(one(corpus, HELD_OUT) for corpus in data.validation)
    return replace(config, data=replace(data, train=train, validation=validation))


def files_of(config: Config, corpus: CorpusConfig) -> ExampleFiles:
    """Return the files of a corpus of a resolved config. Those of the hub are fetched, unless they are in its cache.
    Raises InputError, StoreError: as of :func:`resolved`."""
    pairs = config.preference is not None
    if not corpus.is_set:
        return ExampleFiles(corpus.path, [without_link(Path(corpus.path))], config.data.map, pairs)
    split, name = corpus.split or "*", corpus.hub_name
    folder = Path(corpus.path) if name is None else hub.fetch(name, _patterns(split), shown=True)
    files = [folder / file for file in _of_split(corpus, split, list(_walk(folder)))]
    for file in files:
        if leaves(file, snapshot(file) or file.parent):
            raise InputError(f"{file} is a link that leads out of its folder: put the file itself there")
    return ExampleFiles(corpus.path, files, config.data.map, pairs)


def held_out_files(path: str, split: str | None) -> Sequence[Path]:
    """Return the files to evaluate on: of a data set of the hub those of a split, or of the one that is there to
    validate on; of a folder those of a split; else the path itself. Raises InputError: it has no splits; and, as
    :func:`resolved`, StoreError."""
    plain, corpora = Config(), (CorpusConfig(path),)
    if corpora[0].hub_name is None and split is None:
        return [Path(path)]
    if not corpora[0].is_set:
        raise InputError(f"{path} has no splits: they are of folders and of data sets of the hub (OWNER/NAME@REVISION)")
    data = replace(plain.data, validation=corpora) if split is None else replace(plain.data, train=corpora, split=split)
    config = resolved(replace(plain, data=data))
    (corpus,) = (*config.data.train, *config.data.validation)
    return files_of(config, corpus).files


def text_files_of(config: Config, corpus: CorpusConfig) -> list[Path]:
    """Return the files of a corpus of a resolved config that is streamed: of a path, those that `megacore tokenize`
    would read, in its order; of a split, those of :func:`files_of`. Raises as that does."""
    if corpus.hub_name is not None or corpus.split is not None:
        return list(files_of(config, corpus).files)
    return list(text.find_files([Path(corpus.path)]))


def _listing(corpus: CorpusConfig) -> list[str]:
    """Return the names of all files of a set; where the hub cannot be asked, of those that are in its cache."""
    name = corpus.hub_name
    if name is None:
        return list(_walk(Path(corpus.path)))
    try:
        found = list(hub.files_of(name))
    except StoreError:
        found = list(_walk(hub.fetch(name, _CARD)))
    return sorted(filter(has_examples, found))


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files of examples below a folder, in order, by their paths in it."""
    for home, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        inside = Path(home)
        saved = _saved(inside) if STATE in names else None
        for name in sorted(names):
            if has_examples(name) and not name.startswith(".") and (saved is None or name in saved):
                yield str((inside / name).relative_to(folder))
        if saved and (missing := saved - {*names}):
            raise InputError(f"{inside} is not whole: {STATE} names {brief(sorted(missing)[0])}, which is not there")


def _saved(folder: Path) -> set[str]:
    """Return the files of the table that `datasets` saved in a folder; beside them lie others, of its cache."""
    state = read_json(folder / STATE, folder)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = {str(each.get("filename")) for each in listed if isinstance(each, dict)} if isinstance(listed, list) else {}
    if not names:
        raise InputError(f"{folder / STATE} does not say which files `datasets` saved: save them anew")
    return set(names)


def _patterns(split: str) -> list[str]:
    """Return the patterns of a split's files, by their paths; what is in them of a name goes over folders."""
    if split == "*":
        return [f"*{ending}" for ending in EXAMPLES]
    name = escape(split)
    if split.endswith(EXAMPLES):
        return [name, f"*/{name}"]
    ends = [f"{between}{ending}" for ending in EXAMPLES for between in ("", "-[0-9]*", "/*")]
    return [f"{outer}{name}{end}" for outer in ("", "*/") for end in ends]


def _matching(split: str, names: Sequence[str]) -> list[str]:
    patterns = _patterns(split)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _of_split(corpus: CorpusConfig, split: str, names: Sequence[str]) -> list[str]:
    """Return those of a split; InputError if there are none, or some that need not be of one set."""
    found = _matching(split, names)
    if not found:
        raise InputError(_no_split(corpus, [split], names))
    kinds = {(_group(name).rpartition(split)[0], "".join(Path(name).suffixes[-2:])) for name in found}
    if split != "*" and len(kinds) > 1:
        known = ", ".join(f"{before}{split} ({ending})" for before, ending in sorted(kinds)[:_LISTED])
        raise InputError(
            f"{corpus.path} has {split} several times, {known}: name one by data.split, with its folder "
            "(main/train) or as a file (main/train.jsonl)"
        )
    return found


def _choice(corpus: CorpusConfig, splits: Sequence[str]) -> str:
    """Return the first of some splits that a set has, or what it has alone, if that is not to be held out."""
    names = _listing(corpus)
    split = next((each for each in splits if _matching(each, names)), None)
    groups = {_group(name) for name in names}
    if split is None and len(groups) == 1 and not groups & {*HELD_OUT} and splits in (("train",), HELD_OUT):
        (split,) = groups
    if split is None:
        raise InputError(_no_split(corpus, splits, names))
    _of_split(corpus, split, names)
    return split


def _group(name: str) -> str:
    """Return the name of a file without its number and endings."""
    ending = max((each for each in EXAMPLES if name.endswith(each)), key=len)
    return _SHARD.sub("", name.removesuffix(ending))


def _no_split(corpus: CorpusConfig, splits: Sequence[str], names: Sequence[str]) -> str:
    if not names:
        return f"{corpus.path} has no files of examples ({', '.join(EXAMPLES)})"
    groups = sorted({_group(name) for name in names})
    more = [f"and {len(groups) - _LISTED:,} more"] if len(groups) > _LISTED else []
    known = ", ".join([*map(brief, groups[:_LISTED]), *more])
    return (
        f"{corpus.path} has no split {' or '.join(splits)} among {known}: name one by data.split (or split, beside its "
        "path; of evaluate, --split), or take all by *"
    )
