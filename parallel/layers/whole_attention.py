"""Attention of tokens that a rank has whole: those of sequences, or of documents in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from einops import rearrange
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring


class MaskedAttention(Protocol):
    """An attention whose mask is settled: it knows which tokens look at each other."""

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value] -> [t, heads, value]; softmax in fp32 (fp64 for
        fp64).

        Args:
            name: The attention that asks.
            q, k, v: Those of this rank's heads.
            scoring: The rule by which scores become weights.
        """
        ...


@dataclass(frozen=True, eq=False)
class CausalAttention:
    """Each token looks at those before it in its sequence; there are ``sequences`` of equal length."""

    sequences: int

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        q, k, v = (rearrange(a, "(b s) heads head -> b heads s head", b=self.sequences) for a in (q, k, v))
        return rearrange(kernels.causal_attention(q, k, v, scoring), "b heads s head -> (b s) heads head")


@dataclass(frozen=True, eq=False)
class DocumentAttention:
    """Each token looks at those before it in its document; none lies in two of the ``sequences`` of equal length."""

    documents: Documents
    sequences: int

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return kernels.documents_attention(q, k, v, self.documents, self.sequences, scoring)


@dataclass(frozen=True, eq=False)
class ImageAttention:
    """As ``plain``, but in layers that look both ways tokens of one image look at each other whatever their order.
    ``masks``: that of each window, and of how they look, as of :func:`~parallel.kernels.documents.image_mask`."""

    plain: MaskedAttention
    masks: Mapping[tuple[int | None, str], Tensor]

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        if scoring.both_ways is None:
            return self.plain(name, q, k, v, scoring)
        return kernels.image_attention(q, k, v, self.masks[scoring.window, scoring.both_ways], scoring)
