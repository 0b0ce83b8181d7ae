"""Rotary position embeddings, "rotate half" convention: dimension i of a head turns with dimension i + head_dim/2.

Frequencies and angles are computed in float32 whatever the model's dtype, in the order of operations of transformers:
a float32 angle of a few thousand is only good to 1e-4, so models agree with those trained there only if they round
alike.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from models.rope_config import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
)


def inverse_frequencies(rope: Rope, head_dim: int, sequence_length: int) -> tuple[Tensor, float]:
    """-> inv_freq: [head_dim/2] in radians per position (float32, on the CPU), and the factor on cos and sin.

    ``sequence_length`` is that of the whole sequence, however it is split over ranks; only the types dynamic and
    longrope depend on it. (The dynamic of transformers also has a memory: after a long sequence it keeps the
    frequencies of that one until a short one comes. Here equal sequences have equal frequencies.) Raises ValueError if
    the values do not fit this head_dim.
    """
    if problems := rope.problems(head_dim):
        raise ValueError(f"rope_type {rope.rope_type!r}: " + "; ".join(problems))
    match rope:
        case DefaultRope():
            return 1.0 / _positions_per_radian(rope.rope_theta, head_dim), 1.0
        case LinearRope():
            return 1.0 / _positions_per_radian(rope.rope_theta, head_dim) / rope.factor, 1.0
        case DynamicRope():
            return 1.0 / _positions_per_radian(_dynamic_base(rope, head_dim, sequence_length), head_dim), 1.0
        case YarnRope():
            return _yarn(rope, head_dim), _yarn_attention_factor(rope)
        case LongRope():
            long = sequence_length > rope.original_max_position_embeddings
            divisors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
            return 1.0 / (divisors * _positions_per_radian(rope.rope_theta, head_dim)), _longrope_attention_factor(rope)
        case Llama3Rope():
            return _llama3(rope, head_dim), 1.0
        case ProportionalRope():
            turning = int(rope.partial_rotary_factor * head_dim // 2)
            # Not a slice of all frequencies: pow rounds the ends of a vector otherwise than its middle.
            inv_freq = 1.0 / _positions_per_radian(rope.rope_theta, head_dim, turning)
            inv_freq = torch.cat((inv_freq, torch.zeros(head_dim // 2 - turning)))
            return inv_freq / rope.factor, 1.0
    raise TypeError(f"no frequencies are known for {type(rope).__name__}: add a case here")


def tables(
    rope: Rope, head_dim: int, positions: Tensor, *, sequence_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions: [t] -> cos, sin: [t, head_dim/2] in ``dtype``, computed in float32 on the device of the positions.

    For given positions they are the same in every layer and step: ``Rotary`` keeps them.
    """
    inv_freq, factor = inverse_frequencies(rope, head_dim, sequence_length)
    angles = positions[:, None].float() * inv_freq.to(positions.device)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class Rotary:
    """The tables of a model, computed when a sequence length is first met and kept.

    ``rotary(sequence_length, dtype, device)`` -> cos, sin: [sequence_length, head_dim/2]. Positions other than
    0, 1, 2, ... (packed documents, a part of the sequence) are rows of it: ``cos[positions]``.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope, self.head_dim = rope, head_dim
        self._kept: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, sequence_length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (sequence_length, dtype, device)
        if key not in self._kept:
            positions = torch.arange(sequence_length, device=device)
            self._kept[key] = tables(self.rope, self.head_dim, positions, sequence_length=sequence_length, dtype=dtype)
        return self._kept[key]

    def of_documents(
        self, positions: Tensor, documents: Sequence[int], lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """positions: [t] -> cos, sin: [t, head_dim/2], each document's with the frequencies of a sequence of its own
        length; nothing is kept.

        Args:
            positions: Of the documents' tokens, one document after the other.
            documents: How many tokens each has.
            lengths: Of the sequence that each is a part of.
        """
        found, start = [], 0
        of_each = zip(documents, (_counting(self.rope, length) for length in lengths), strict=True)
        for length, together in groupby(of_each, key=itemgetter(1)):
            stop = start + sum(tokens for tokens, _ in together)
            own = positions[start:stop]
            found.append(tables(self.rope, self.head_dim, own, sequence_length=length, dtype=dtype))
            start = stop
        cos, sin = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cos, sin


def _counting(rope: Rope, sequence_length: int) -> int:
    """A sequence length with the same frequencies, as few different ones as there are frequencies."""
    match rope:
        case DynamicRope():
            return max(sequence_length, rope.max_position_embeddings)
        case LongRope():
            original = rope.original_max_position_embeddings
            return original + (sequence_length > original)
    return 1


def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., t, heads, head_dim], cos, sin: [t, head_dim/2], one dtype -> x turned by its positions, a new tensor.

    x may be a strided view, such as the queries inside of a fused projection. Nothing but the tables is kept for the
    backward, which turns the gradient the other way.
    """
    if torch.compiler.is_compiling():
        return _formula(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def split_and_apply(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: [..., t, (heads + 2 kv) * head_dim] -> q: [..., t, heads, head_dim], k, v: [..., t, kv, head_dim].

    The queries and keys are turned as ``apply`` does it. The three are views of one new buffer, so that qkv can be
    freed, and their gradients are gathered into one without further copies.
    """
    if torch.compiler.is_compiling():
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv, 2 * cos.shape[-1])).split([heads, kv, kv], dim=-2)
        return _formula(q, cos, sin), _formula(k, cos, sin), v
    return _SplitAndRotate.apply(qkv, cos, sin, heads, kv)


def _formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply`` as one writes it down: what the compiler fuses into one loop, forward and backward."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        return _rotate(grad, cos, sin, out, direction=-1), None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.kv = heads, kv
        source = qkv.unflatten(-1, (heads + 2 * kv, 2 * cos.shape[-1]))
        out = torch.empty(source.shape, dtype=qkv.dtype, device=qkv.device)
        _rotate(source[..., : heads + kv, :], cos, sin, out[..., : heads + kv, :])
        out[..., heads + kv :, :].copy_(source[..., heads + kv :, :])
        q, k, v = out.split([heads, kv, kv], dim=-2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        shape = (*grad_q.shape[:-2], ctx.heads + 2 * ctx.kv, grad_q.shape[-1])
        grad = torch.empty(shape, dtype=grad_q.dtype, device=grad_q.device)
        q, k, v = grad.split([ctx.heads, ctx.kv, ctx.kv], dim=-2)
        _rotate(grad_q, cos, sin, q, direction=-1)
        _rotate(grad_k, cos, sin, k, direction=-1)
        v.copy_(grad_v)
        return grad.flatten(-2), None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: int = 1) -> Tensor:
    """x, out: [..., t, heads, head_dim], cos, sin: [t, head_dim/2]; out = x turned by direction * angle."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    # One full-width product and two half-width fused ones read and write least: 0.55 ms where the textbook form with a
    # concatenated copy takes 0.85 ms (bf16, 2048 tokens of 12 heads of 64, two cores).
    torch.mul(x.unflatten(-1, (2, half)), cos[..., None, :], out=out.unflatten(-1, (2, half)))
    out[..., :half].addcmul_(x[..., half:], sin, value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin, value=direction)
    return out


# -- the frequencies of each type


def _positions_per_radian(base: float, head_dim: int, count: int | None = None) -> Tensor:
    """[count, or head_dim/2]: base ** (0/head_dim, 2/head_dim, 4/head_dim, ...)."""
    stop = head_dim if count is None else 2 * count
    powers: Tensor = base ** (torch.arange(0, stop, 2, dtype=torch.float32) / head_dim)
    return powers


def _dynamic_base(rope: DynamicRope, head_dim: int, sequence_length: int) -> float:
    trained, exponent = rope.max_position_embeddings, head_dim / (head_dim - 2)
    # Where the sequence is longer than trained, transformers holds its length in a tensor and so rounds to float32.
    length = torch.tensor(sequence_length) if sequence_length > trained else trained
    return float(rope.rope_theta * ((rope.factor * length / trained) - (rope.factor - 1)) ** exponent)


def _yarn(rope: YarnRope, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """The (fractional) frequency index that turns this often within the original length."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp of length 0
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    radian = _positions_per_radian(rope.rope_theta, head_dim)
    return 1.0 / (rope.factor * radian) * (1 - keep) + 1.0 / radian * keep


def _yarn_attention_factor(rope: YarnRope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1)


def _longrope_attention_factor(rope: LongRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _llama3(rope: Llama3Rope, head_dim: int) -> Tensor:
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    inv_freq = 1.0 / _positions_per_radian(rope.rope_theta, head_dim)
    wavelength = 2 * math.pi / inv_freq
    share = (original / wavelength - low) / (high - low)  # of the unscaled frequency, between the two limits
    blended = (1 - share) * inv_freq / rope.factor + share * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled)
