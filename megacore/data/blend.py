"""Several corpora mixed by weight, in an order that is a formula: no state, no file, any position at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megacore.data.samples import Sample, Source

BLOCK = 2**16


def quotas(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the number of the BLOCK samples of a block that each corpus gives, [corpora]: within 1 of its share of the
    weights."""
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"the weights of a blend are {list(weights)}: each must be a positive number")
    shares = np.array(weights) / np.sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1
    if (counts == 0).any():
        least = int(np.argmin(shares))
        raise ValueError(
            f"weight {weights[least]} of corpus {least} is {shares[least] / BLOCK:.2g} of the blend, "
            f"below the least share, 1/{BLOCK}: raise it, or leave the corpus out"
        )
    return counts


class Blend:
    """Samples of several corpora, each corpus consumed in its own order 0, 1, 2, ...

    One block of BLOCK samples is ordered once and repeats: the j-th of the q samples of a corpus is due at time
    (j + 1/2) / q. At any time a corpus is within 1/2 of its due count and all C of them within C/2, so among the
    first n samples a corpus with q / BLOCK = w has w n, give or take (1 + C w) / 2, and w is the weight within
    1 / BLOCK.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self._quotas = quotas(weights)
        corpus = np.repeat(np.arange(len(sources)), self._quotas)
        rank = np.concatenate([np.arange(quota) for quota in self._quotas])
        order = np.lexsort((corpus, (rank + 0.5) / self._quotas[corpus]))
        self._corpus, self._rank = corpus[order], rank[order]

    def locate(self, index: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus of the samples at `index` [...], and their numbers in it: two arrays of the same shape."""
        block, place = np.divmod(np.asarray(index, np.int64), BLOCK)
        corpus = self._corpus[place]
        return corpus, block * self._quotas[corpus] + self._rank[place]

    def until(self, corpus: int, count: int) -> int:
        """Return the number of first samples among which are so many of a corpus."""
        block, rank = divmod(count - 1, int(self._quotas[corpus]))
        return block * BLOCK + int(np.flatnonzero(self._corpus == corpus)[rank]) + 1

    def counts(self, index: int) -> npt.NDArray[np.int64]:
        """Return how many of the first `index` samples are of each corpus, [corpora]."""
        block, place = divmod(index, BLOCK)
        return block * self._quotas + np.bincount(self._corpus[:place], minlength=len(self.sources))

    def sample(self, index: int) -> Sample:
        corpus, within = self.locate(index)
        return self.sources[int(corpus)].sample(int(within))
