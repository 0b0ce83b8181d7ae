"""Causal attention that stays within documents, several of which stand one after the other in a row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from parallel import cpu


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of t tokens begin, and where the last one ends.

    A tensor rather than numbers, so that what is compiled for one packing serves all others.

    Args:
        host: int32 [documents + 1], from 0 to t.
        device: The same, where the tokens are.
        varlen: Whether the device has torch's kernel for documents.
    """

    host: Tensor
    device: Tensor
    varlen: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Documents:
        """From the documents' lengths; nobody waits for the device."""
        host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        if device.type != "cuda":
            return cls(host, host.to(device))
        varlen = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device)[0] >= 8
        return cls(host, host.pin_memory().to(device, non_blocking=True), varlen)

    def varlen_takes(self, q: Tensor) -> bool:
        """Whether torch's kernel takes heads like q's, [t, heads, head]."""
        return self.varlen and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


# -- each: q: [t, heads, head], k, v: [t, kv, head] -> [t, heads, head]; softmax in fp32 (fp64 for fp64)


def with_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, longest: int) -> Tensor:
    """By torch's kernel for CUDA; ``longest`` may be above the longest document's length."""
    starts, gqa = documents.device, k.shape[1] < q.shape[1]
    y = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=gqa)
    assert isinstance(y, Tensor)
    return y


def one_by_one(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float) -> Tensor:
    """A kernel for each document; compiled, it would be for these documents alone."""
    lengths = documents.host.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_one(*part, dropout) for part in parts])


def _one(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    gqa = k.shape[1] < q.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=gqa)[0].transpose(0, 1)


def masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents, sequences: int, dropout: float) -> Tensor:
    """All scores of each of the sequences, of which those between documents are thrown away."""
    number = torch.bucketize(torch.arange(len(q), device=q.device), documents.device, right=True)
    number = number.view(sequences, 1, -1)
    mask = (number[..., None] == number[..., None, :]).tril()
    gqa = k.shape[1] < q.shape[1]
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
    return y.transpose(1, 2).flatten(0, 1)


def on_cpu(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """By a kernel for each document, all of them one operator: autograd and the compiler see no document."""
    y: Tensor = _on_cpu(q, k, v, documents.host)[0]
    return y


@torch.library.custom_op("megacore::attention_within_documents", mutates_args=())
def _on_cpu(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """-> out: [t, heads, head], log_sum: [t, heads], of the exponentials of the scores, in fp32 at least."""
    out, log_sum = q.new_empty(q.shape), _log_sum(q)
    for start, stop in pairwise(starts.tolist()):
        y, own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q, start, stop), *(_shared(_heads(x, start, stop), q) for x in (k, v)), 0.0, True
        )
        out[start:stop] = y[0].transpose(0, 1)
        log_sum[start:stop] = own[0].T
    return out, log_sum


@_on_cpu.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _log_sum(q)


@torch.library.custom_op("megacore::attention_within_documents_backward", mutates_args=())
def _on_cpu_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv."""
    gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for start, stop in pairwise(starts.tolist()):
        given = (_heads(x, start, stop) for x in (dy, q, k, v, out))
        parts = _one_backward(log_sum[start:stop].T[None].contiguous(), *given)
        for whole, part in zip(gradients, parts, strict=True):
            whole[start:stop] = part[0].transpose(0, 1)
    return gradients


@_on_cpu_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _one_backward(
    log_sum: Tensor, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one document: [1, heads, s, head] each."""
    if cpu.is_faster(q):
        return cpu.causal_attention_backward(dy, q, k, v, out, log_sum)
    dq, *shared = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, _shared(k, q), _shared(v, q), out, log_sum, 0.0, True
    )
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in shared)
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, starts, out, log_sum = ctx.saved_tensors
    return *_on_cpu_backward(dy, q, k, v, out, log_sum, starts), None


_on_cpu.register_autograd(_backward, setup_context=_save)


def _heads(x: Tensor, start: int, stop: int) -> Tensor:
    """[t, heads, head] -> [1, heads, stop - start, head], a view."""
    return x[start:stop].transpose(0, 1)[None]


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """[1, kv, s, head] -> [1, heads, s, head], each for the queries that share it."""
    share = q.shape[1] // x.shape[1]
    return x.repeat_interleave(share, 1) if share > 1 else x


def _log_sum(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
