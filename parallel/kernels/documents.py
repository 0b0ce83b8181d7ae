"""Causal attention that stays within documents, several of which stand one after the other in a row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels import bands, flash
from megacore.parallel.kernels.scoring import PLAIN, Scoring, attend
from megacore.parallel.kernels.upcast import upcasts


@dataclass(frozen=True, eq=False)
class Documents:
    """The places where the documents of t tokens begin, and where the last one ends.

    A tensor rather than numbers, so that what is compiled for one packing serves all others.

    Args:
        host: int32 [documents + 1], from 0 to t.
        device: The same, where the tokens are.
        varlen: Whether the device has torch's kernel for documents.
        groups: Whether queries may share keys and values there, as in torch 2.11 they may not.
    """

    host: Tensor
    device: Tensor
    varlen: bool = False
    groups: bool = True

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        """Make them of the documents' lengths; nobody waits for the device."""
        host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        if device.type != "cuda":
            return cls(host, host.to(device))
        varlen = flash.available(device)
        groups = varlen and flash.shares()
        return cls(host, host.pin_memory().to(device, non_blocking=True), varlen, groups)

    def in_chunks(self, chunk: int) -> Documents:
        """Return the pieces of so many tokens that documents are cut into, the last one of each what is left."""
        return _in_chunks(tuple(self.host.diff().tolist()), chunk, self.device.device)

    def varlen_takes(self, q: Tensor) -> bool:
        """Return whether torch's kernel takes heads like q's, [t, heads, head]."""
        return self.varlen and flash.fits(q)


@lru_cache(maxsize=16)
def _in_chunks(lengths: tuple[int, ...], chunk: int, device: torch.device) -> Documents:
    """Kept, as every layer asks for them, forward and backward."""
    return Documents.of([min(chunk, n - start) for n in lengths for start in range(0, n, chunk)], device)


# -- each: q: [t, heads, head], k, v: [t, kv, head] -> [t, heads, head]; softmax in fp32 (fp64 for fp64)


def with_varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, longest: int, scale: float | None = None
) -> Tensor:
    """Attend by torch's kernel for CUDA; ``longest`` may be above the longest document's length."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler along, a second of imports

    more: dict[str, Any] = {"enable_gqa": k.shape[1] < q.shape[1]} if documents.groups else {}
    if not documents.groups:
        k, v = _shared(k, q), _shared(v, q)
    starts = documents.device
    y = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), **more)
    assert isinstance(y, Tensor)
    return y


def one_by_one(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scoring: Scoring = PLAIN) -> Tensor:
    """Launch a kernel for each document; compiled, it would be for these documents alone."""
    lengths = documents.host.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_one(*part, scoring) for part in parts])


def _one(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product(q, k, v, scoring)[0].transpose(0, 1)


def masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents, sequences: int, scoring: Scoring = PLAIN) -> Tensor:
    """Compute all scores of each of the sequences; those between documents are thrown away."""
    number = torch.bucketize(torch.arange(len(q), device=q.device), documents.device, right=True)
    number = number.view(sequences, 1, -1)
    mask = (number[..., None] == number[..., None, :]).tril()
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product(q, k, v, scoring, mask).transpose(1, 2).flatten(0, 1)


def image_mask(
    documents: Documents, sequences: int, image_of: Tensor, window: int | None, anywhere: bool, dtype: torch.dtype
) -> Tensor:
    """Return what is added to scores of attention in a dtype, [sequences, s, s]: 0 where a token looks, else minus
    infinity. It looks at those before it in its document, and at those of its image there; what is far before a window
    hides, of an image too unless they look ``anywhere``. image_of: [t], the number of each token's image, or below
    0."""
    place = torch.arange(len(image_of), device=image_of.device)
    number = torch.bucketize(place, documents.device, right=True).view(sequences, -1, 1)
    image, place = image_of.view(sequences, -1, 1), place.view(sequences, -1, 1)
    before = place - place.mT
    shown, seen = (image == image.mT) & (image >= 0), before >= 0
    if window is not None:
        seen &= before < window
        shown &= (before < window) | anywhere
    seen = (number == number.mT) & (seen | shown)
    # As torch's attention would make it of booleans, in each layer, which keep theirs for the backward.
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return (mask.float() if upcasts(mask) else mask).masked_fill_(~seen, float("-inf"))


def both_ways(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Compute all scores of each of the sequences, of which those count that :func:`image_mask` adds 0 to."""
    q, k, v = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))
    softcap = scoring.softcap is not None  # which torch's attention does not know
    y = attend(q, k, v, mask == 0, scoring) if softcap else scaled_dot_product(q, k, v, scoring, mask[:, None])
    return y.transpose(1, 2).flatten(0, 1)


def in_bands(q: Tensor, k: Tensor, v: Tensor, documents: Documents, sequences: int, scoring: Scoring) -> Tensor:
    """Attend by blocks of queries and the keys that they see, on a CPU of their documents, else of their sequence."""
    kernel = bands.by_formula if scoring.dropout else bands.attention
    rows = 1 if kernel is bands.attention and q.device.type == "cpu" else sequences
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    return kernel(q, k, v, scoring, documents.device).transpose(1, 2).flatten(0, 1)


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, mask: Tensor | None = None) -> Tensor:
    """q: [b, heads, s, head], k, v: [b, kv, s, head] -> [b, heads, s, head]; causal without a mask."""
    if upcasts(q):
        # Torch's kernels are slow here in the backward, and forward where weights are dropped.
        wide = scaled_dot_product(q.float(), k.float(), v.float(), scoring, mask)
        return wide.to(q.dtype)
    if not fused_takes_groups(q.device.type, q.dtype, mask is not None):
        k, v = _shared(k, q), _shared(v, q)
    gqa = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scale,
        enable_gqa=gqa,
    )


def fused_takes_groups(device: str, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether torch has a fused kernel for queries that share keys and values; else it would make s x s scores.

    On CUDA it is flash attention, for numbers of two bytes and without a mask. The other one takes both, and no groups.
    """
    return device != "cuda" or (dtype.itemsize == 2 and not masked)


def on_cpu(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None = None) -> Tensor:
    """Attend by a kernel for all documents of about one length, one operator for all: autograd and the compiler see no
    document."""
    return forward(q, k, v, documents.host, scale)[0]


# Documents whose lengths are the same in multiples of so many tokens go together.
_STEP = 64


@dataclass(frozen=True, eq=False)
class _DocumentBatch:
    """Documents of about one length, as one batch. No query sees what is behind its document's end, for that is later.

    Args:
        shape: (documents, length of the longest).
        tokens: [documents * longest], which token is at each place; behind the end of a document its last one.
        behind: The places behind the ends.
    """

    shape: tuple[int, int]
    tokens: Tensor
    behind: Tensor

    def of(self, x: Tensor) -> Tensor:
        """x: [t, heads, ...] -> [documents, heads, longest, ...]."""
        return x.index_select(0, self.tokens).unflatten(0, self.shape).transpose(1, 2)

    def of_gradient(self, dy: Tensor) -> Tensor:
        """dy: [t, heads, ...] -> [documents, heads, longest, ...], zero behind the ends."""
        return dy.index_select(0, self.tokens).index_fill_(0, self.behind, 0).unflatten(0, self.shape).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _DocumentBatches:
    """All documents, and ``places`` [t]: where each token is in the batches, one after the other."""

    parts: tuple[_DocumentBatch, ...]
    places: Tensor

    @classmethod
    def of(cls, starts: Tensor) -> _DocumentBatches:
        return _batches(tuple(starts.tolist()))

    def tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """parts: [documents, heads, longest, ...] of each batch -> [t, heads, ...]."""
        return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in parts]).index_select(0, self.places)


@lru_cache(maxsize=16)
def _batches(starts: tuple[int, ...]) -> _DocumentBatches:
    """Kept, as every layer asks for them, forward and backward."""
    first, lengths = torch.tensor(starts[:-1]), torch.tensor(starts).diff()
    rounded, found, places, base = -(-lengths // _STEP), [], torch.empty(starts[-1], dtype=torch.int64), 0
    for about in rounded.unique().tolist():
        own = rounded == about
        length, place = lengths[own, None], torch.arange(int(lengths[own].max()))
        tokens = first[own, None] + torch.minimum(place, length - 1)
        inside = place < length
        places[tokens[inside]] = base + inside.flatten().nonzero()[:, 0]
        found.append(_DocumentBatch((len(tokens), len(place)), tokens.flatten(), (~inside).flatten().nonzero()[:, 0]))
        base += tokens.numel()
    return _DocumentBatches(tuple(found), places)


@torch.library.custom_op("megacore::attention_within_documents", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """-> out: [t, heads, head], log_sum: [t, heads], of the exponentials of the scores, in fp32 at least."""
    batches = _DocumentBatches.of(starts)
    made = []
    for batch in batches.parts:
        queries = batch.of(q)
        keys, values = (_shared(batch.of(x), queries) for x in (k, v))
        made.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, True, scale=scale)
        )
    out, log_sum = (batches.tokens(parts) for parts in zip(*made, strict=True))
    return out, log_sum


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    log_sum = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return q.new_empty(q.shape), log_sum


@torch.library.custom_op("megacore::attention_within_documents_backward", mutates_args=())
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    starts: Tensor,
    scale: float | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv.

    Args:
        dy, q, k, v, out, log_sum, starts, scale: Those of :func:`forward`, and what it gives.
        exact: Whether scores stay in fp32, as they must where they are far below the log_sum: where it is that of other
            keys too.
    """
    batches = _DocumentBatches.of(starts)
    made = []
    for batch in batches.parts:
        log_sums = batch.of(log_sum).contiguous()
        given, queries, keys, values, outputs = batch.of_gradient(dy), *(batch.of(x) for x in (q, k, v, out))
        made.append(bands.causal_backward(given, queries, keys, values, outputs, log_sums, scale=scale, exact=exact))
    dq, dk, dv = (batches.tokens(parts) for parts in zip(*made, strict=True))
    return dq, dk, dv


@backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, starts, out, log_sum = ctx.saved_tensors
    return *backward(dy, q, k, v, out, log_sum, starts, ctx.scale), None, None


forward.register_autograd(_backward, setup_context=_save)


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """x: [documents, kv, longest, head] -> [documents, heads, longest, head], each for the queries that share it."""
    share = q.shape[1] // x.shape[1]
    return x.repeat_interleave(share, 1) if share > 1 else x
