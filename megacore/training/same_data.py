"""Whether a run that goes on has the tokens that it was trained on: the same tokenizer's, and of the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.config import Config, CorpusConfig
from megacore.data.corpora import Corpora
from megacore.store.io.strict_json import parse_json, short
from megacore.store.tensor_files.companions import Companion, companions
from megacore.store.weight_folders.folder import WeightFolder
from megacore.training.progress import DATA
from megacore.training.resume import Start

TOKENIZER = "tokenizer.json"
_WAY_OUT = "begin another run by checkpoint.init"


def changed_data(start: Start, config: Config, corpora: Corpora) -> Iterator[str]:
    """Yield what is wrong with the data of a run that goes on: token files of another tokenizer, and other tokens under
    the name of a corpus that it was trained on, unless ``data.allow_changed`` says that these are meant."""
    held = start.adapters or start.source
    if start.trainer is None or held is None:
        return
    wrong = dict[str, str]()
    for corpus in config.data.train:
        if not (corpus.has_examples or corpus.is_imported or corpus.streams) and (
            problem := _other_tokenizer(held, Path(corpus.path).parent)
        ):
            wrong[corpus.path] = problem
    if not config.data.allow_changed:
        for corpus in _changed(start.trainer, config, corpora):
            wrong.setdefault(
                corpus.path,
                f"{corpus.path} holds other tokens than those that the run was trained on: put back those, let "
                f"data.allow_changed=true go on with these, or {_WAY_OUT}",
            )
    yield from (f"data.train: {problem}" for problem in wrong.values())


def _changed(trainer: Mapping[str, Any], config: Config, corpora: Corpora) -> Iterator[CorpusConfig]:
    """Yield the corpora that stand where they stood in the recipe of the run, by the same name, and are others."""
    before, recipe = trainer.get(DATA), trainer["recipe"]
    if not before or not corpora.identities:  # older checkpoints have none
        return
    # Examples become other tokens by these too, which is told.
    same = recipe.get("chat") == asdict(config.chat)
    same = same and recipe.get("data", {}).get("sequence_length") == config.data.sequence_length
    named = recipe.get("data", {}).get("train", [])
    for corpus, was, one, other in zip(config.data.train, named, before, corpora.identities, strict=False):
        if one != other and was.get("path") == corpus.path and (same or not corpus.has_examples):
            yield corpus


def _other_tokenizer(held: WeightFolder, folder: Path) -> str | None:
    """Return what is wrong where ids have another meaning beside a corpus than in a checkpoint of the run; ids that are
    known to one of the two alone are not."""
    theirs, ours = held.companions().get(TOKENIZER), companions(folder, folder, (TOKENIZER,)).get(TOKENIZER)
    if theirs is None or ours is None or theirs.read() == ours.read():
        return None
    before, here = _tokens(theirs), _tokens(ours)
    other = [token for token in before.keys() & here.keys() if before[token] != here[token]]
    if not other:
        return None
    token, size = min(other), len(before.keys() | here.keys())
    alike = len(before.keys() & here.keys()) - len(other)
    return (
        f"{folder / TOKENIZER} is another tokenizer than the run's, {theirs.path}: {alike:,} of {size:,} tokens are "
        f"alike, and {token} is {short(here[token])} and was {short(before[token])}: make the token files by "
        f"`megacore tokenize --tokenizer {theirs.path.parent}`, or {_WAY_OUT}"
    )


def _tokens(file: Companion) -> dict[int, str]:
    """Return {id: token} of a ``tokenizer.json``, none of one that is none. Raises StoreError: it cannot be read."""
    tree = parse_json(file.read(), file.path, wide=True)
    model = tree.get("model") if isinstance(tree, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram's, of [token, score]
        vocabulary = {each[0]: index for index, each in enumerate(vocabulary) if isinstance(each, list) and each}
    added = tree.get("added_tokens") if isinstance(tree, dict) else None
    known = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    known += [(each.get("content"), each.get("id")) for each in added or () if isinstance(each, dict)]
    return {index: token for token, index in known if type(index) is int and isinstance(token, str)}
