"""Rotary position embeddings, "rotate half" convention: dimension i turns with i + turning/2.

The first ``turning`` dimensions of a head turn (:meth:`models.rope_config.Rope.turning`), mostly all; the others pass.

Frequencies and angles are computed in float32 whatever the model's dtype, in the order of operations of transformers:
a float32 angle of a few thousand is only good to 1e-4, so models agree with those trained there only if they round
alike.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from megacore.models.rope_config import (
    AlphaRope,
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    ScaledLongRope,
    YarnRope,
)


def inverse_frequencies(rope: Rope, head_dim: int, sequence_length: int) -> tuple[Tensor, float]:
    """-> inv_freq: [turning/2] in radians per position (float32, on the CPU), and the factor on cos and sin.

    ``sequence_length`` is that of the whole sequence, however it is split over ranks; only the types dynamic and
    longrope depend on it. (The dynamic of transformers also has a memory: after a long sequence it keeps the
    frequencies of that one until a short one comes. Here equal sequences have equal frequencies.) Raises ValueError if
    the values do not fit this head_dim.
    """
    if problems := rope.problems(head_dim):
        raise ValueError(f"rope_type {rope.rope_type!r}: " + "; ".join(problems))
    dims = rope.part(head_dim)
    match rope:
        case DefaultRope():
            return 1.0 / _positions_per_radian(rope.rope_theta, dims), 1.0
        case LinearRope():
            return 1.0 / _positions_per_radian(rope.rope_theta, dims) / rope.factor, 1.0
        case AlphaRope():
            base = rope.rope_theta * rope.alpha ** (dims / (dims - 2))
            return 1.0 / _positions_per_radian(base, dims), 1.0
        case DynamicRope():
            return 1.0 / _positions_per_radian(_dynamic_base(rope, dims, sequence_length), dims), 1.0
        case YarnRope():
            return _yarn(rope, dims), _yarn_attention_factor(rope)
        case LongRope():
            long = sequence_length > rope.original_max_position_embeddings
            divisors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
            radians = divisors * _positions_per_radian(rope.rope_theta, dims)
            if isinstance(rope, ScaledLongRope):
                return 1.0 / radians, rope.long_mscale if long else rope.short_mscale
            return 1.0 / radians, _longrope_attention_factor(rope)
        case Llama3Rope():
            return _llama3(rope, dims), 1.0
        case ProportionalRope():
            nonzero = int(rope.partial_rotary_factor * head_dim // 2)
            # Not a slice of all frequencies: pow rounds the ends of a vector otherwise than its middle.
            inv_freq = 1.0 / _positions_per_radian(rope.rope_theta, head_dim, nonzero)
            inv_freq = torch.cat((inv_freq, torch.zeros(head_dim // 2 - nonzero)))
            return inv_freq / rope.factor, 1.0
    raise TypeError(f"no frequencies are known for {type(rope).__name__}: add a case here")


def tables(
    rope: Rope, head_dim: int, positions: Tensor, *, sequence_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions: [t], or [t, turning/2] where frequencies turn by other ones, -> cos, sin: [t, turning/2] in ``dtype``,
    computed in float32 on the device of the positions.

    For given positions they are the same in every layer and step: ``Rotary`` keeps them.
    """
    inv_freq, factor = inverse_frequencies(rope, head_dim, sequence_length)
    if positions.is_cuda:
        inv_freq = inv_freq.pin_memory()  # nobody waits for the device
    positions = positions[:, None] if positions.dim() == 1 else positions
    angles = positions.float() * inv_freq.to(positions.device, non_blocking=True)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class Rotary:
    """The tables of a model, computed when a sequence length is first met and kept.

    ``rotary(sequence_length, dtype, device)`` -> cos, sin: [sequence_length, turning/2]. Positions other than
    0, 1, 2, ... (packed documents, a part of the sequence) are rows of it: ``cos[positions]``.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope, self.head_dim = rope, head_dim
        self.axes: Tensor | None = None
        """[turning/2], by which of the three positions of a token, in time, height and width, each frequency turns."""
        self._kept: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, sequence_length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (sequence_length, dtype, device)
        if key not in self._kept:
            positions = torch.arange(sequence_length, device=device)
            self._kept[key] = tables(self.rope, self.head_dim, positions, sequence_length=sequence_length, dtype=dtype)
        return self._kept[key]

    def of_three(self, positions: Tensor) -> Tensor:
        """positions: [3, t], in time, height and width -> [t, turning/2], those by which the frequencies turn."""
        assert self.axes is not None  # of models whose images have such positions
        return positions.index_select(0, self.axes).T.contiguous()

    def at(self, positions: Tensor, sequence_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [t] or [t, turning/2] -> cos, sin: [t, turning/2] at some positions of a sequence, so that nobody
        computes the others; nothing is kept."""
        return tables(self.rope, self.head_dim, positions, sequence_length=sequence_length, dtype=dtype)

    def of_documents(
        self, positions: Tensor, documents: Sequence[int], lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """positions: [t] or [t, turning/2] -> cos, sin: [t, turning/2], each document's with the frequencies of a
        sequence of its own length; nothing is kept.

        Args:
            positions: Those of the documents' tokens, one document after the other.
            documents: The tokens that each has.
            lengths: Those of the sequences that the documents are parts of.
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
    """Return a sequence length with the same frequencies, as few different ones as there are frequencies."""
    match rope:
        case DynamicRope():
            return max(sequence_length, rope.max_position_embeddings)
        case LongRope():
            original = rope.original_max_position_embeddings
            return original + (sequence_length > original)
    return 1


# -- the frequencies of each type


def _positions_per_radian(base: float, dims: int, count: int | None = None) -> Tensor:
    """Return base ** (0/dims, 2/dims, 4/dims, ...): [count, or dims/2, rounded up]."""
    stop = dims if count is None else 2 * count
    return base ** (torch.arange(0, stop, 2, dtype=torch.float32) / dims)


def _dynamic_base(rope: DynamicRope, dims: int, sequence_length: int) -> float:
    trained, exponent = rope.max_position_embeddings, dims / (dims - 2)
    # Where the sequence is longer than trained, transformers holds its length in a tensor and so rounds to float32.
    length = torch.tensor(sequence_length) if sequence_length > trained else trained
    return float(rope.rope_theta * ((rope.factor * length / trained) - (rope.factor - 1)) ** exponent)


def _yarn(rope: YarnRope, dims: int) -> Tensor:
    def dimension(turns: float) -> float:
        """Return the (fractional) frequency index that turns this often within the original length."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp of length 0
    ramp = torch.clamp((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    radian = _positions_per_radian(rope.rope_theta, dims)
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


def _llama3(rope: Llama3Rope, dims: int) -> Tensor:
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    inv_freq = 1.0 / _positions_per_radian(rope.rope_theta, dims)
    wavelength = 2 * math.pi / inv_freq
    share = (original / wavelength - low) / (high - low)  # of the unscaled frequency, between the two limits
    blended = (1 - share) * inv_freq / rope.factor + share * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled)
