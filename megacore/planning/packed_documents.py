"""The documents of microbatches as a corpus and its packing have them: a few are drawn, and some stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megacore.data.batches import Batches
from megacore.data.indexed import IndexedDataset
from megacore.data.samples import parts
from megacore.planning.peak_memory import peaks
from megacore.planning.setting import ExchangeWork, Setting
from megacore.planning.step_time import Cluster, estimate
from megacore.recipe import ConfigError

DRAWN = 32
"""Microbatches that are drawn."""


def drawn(corpus: str, length: int, micro_size: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each of some microbatches, the first ones that training would have of the
    token file with the prefix ``corpus``; ``seed`` is that of the order of samples. Raises ValueError: the file is
    damaged, or too short for one sample; FileNotFoundError: there is none."""
    source, _ = parts(IndexedDataset(Path(corpus)), length, seed, 0.0, corpus)
    batches = Batches(source, DRAWN * micro_size, micro_size, 0, 1, separate_documents=True)
    return tuple(batch.documents or () for batch in batches.microbatches(0))


def with_documents(setting: Setting, corpus: str | None, seed: int) -> tuple[Setting, Sequence[tuple[int, ...]]]:
    """Return the setting with the documents of the median of some microbatches of a corpus, and those of all, by the
    scores of the busiest part of cp. Raises ConfigError: as of :func:`drawn`."""
    if corpus is None:
        return setting, ()
    try:
        found = drawn(corpus, setting.sequence_length, setting.micro_size, seed)
    except (OSError, ValueError) as error:
        raise ConfigError([f"--documents {corpus}: {error}"]) from error
    by_scores = sorted(found, key=lambda each: _work(setting, each).busiest)
    return replace(setting, documents=by_scores[len(by_scores) // 2]), by_scores


def _work(setting: Setting, documents: tuple[int, ...]) -> ExchangeWork:
    """Return the work of the parts of cp in a layer without a window, of one head."""
    return replace(setting.packing, documents=documents).exchange(None)


@dataclass(frozen=True)
class PackedMicrobatch:
    """A microbatch that stands out of those that were drawn, and a step if all were like it: the number of its
    documents, the length of the longest, the scores of the busiest part of cp, of a head, these over the mean of all
    parts, the tokens whose keys the part takes that takes most, the peak of the fullest stage in bytes, and a step's
    seconds."""

    which: str
    documents: int
    longest: int
    scores: int
    imbalance: float
    keys: int
    peak: int
    seconds: float

    @classmethod
    def of(cls, which: str, setting: Setting, cluster: Cluster) -> PackedMicrobatch:
        """Return what there is to know of the documents of a setting."""
        work, documents = setting.packing.exchange(None), setting.documents or ()
        return cls(
            which,
            len(documents),
            max(documents),
            work.busiest,
            work.imbalance,
            int(work.taken.sum(1).max()),
            max(peaks(setting)),
            estimate(setting, cluster).total,
        )


def standing_out(
    setting: Setting, by_scores: Sequence[tuple[int, ...]], cluster: Cluster
) -> tuple[PackedMicrobatch, ...]:
    """Return the microbatch that the setting has, the one with most scores, and the one whose parts take most keys."""
    chosen = {"median": setting.documents, "most scores": by_scores[-1]}
    if setting.context.parts > 1:
        chosen["most keys"] = max(by_scores, key=lambda each: _work(setting, each).taken.sum(1).max())
    return tuple(
        PackedMicrobatch.of(which, replace(setting, documents=documents), cluster)
        for which, documents in chosen.items()
    )
