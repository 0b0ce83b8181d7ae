"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): attention whose memory is one matrix a head.

A head has a state S: [key, value]. A token lets it fade by exp(g), and writes of its value what the state does not say
of its key already, by a share beta; what its query reads is its output:

    S = exp(g) S;    S = S + beta k (v - S' k)';    y = S' q

with keys and queries of length 1, and queries over sqrt(key). Tokens are taken a chunk at a time (the WY representation
of section 3.3): within a chunk all is products of matrices, and only from chunk to chunk the state goes step by step.
Over a span of tokens it goes by S -> through S + gained, which is how ranks that share out a document hand it on.

The rows of a state may fade each by itself, as in Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): g is then of
each channel of the keys, and exp(g) S a product row by row.

A state space layer (Mamba-2, Dao and Gu 2024, arXiv 2405.21060) follows the rule without the correction: a token writes
its value whatever the state says of its key, and keys and queries, B and C there, have any length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.spans import Chunks, Spans
from megacore.parallel.kernels.upcast import wide

CHUNK = 64
"""Tokens of a chunk."""
GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid, "softplus": F.softplus}
"""The functions of gates."""
_EPSILON = 1e-6
"""Added to the square of the length of a key or a query, as all do who have published weights."""


Enter = Callable[[Tensor], Tensor]
"""What the spans make of the states before them, [spans, heads, each, key, through + value], what goes through beside
what is gained -> those states. What goes through is a matrix, and ``through`` is key; or without the correction one
factor, and ``through`` is 1."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | Enter | None,
    spans: Spans,
    size: int = CHUNK,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return y: [t, heads, each, value] and the states behind the spans: [spans, heads, each, key, value], in fp32 at
    least, in which all is computed. Autograd keeps the inputs alone.

    Args:
        q, k: [t, heads, key].
        v: [t, heads, each, value]: so many heads of values share one of keys.
        g: [t, heads, each], the logarithm of what is left of the state at each token; or [t, heads, each, key], of each
            of its rows.
        beta: [t, heads, each], the share that is written.
        initial: [spans, heads, each, key, value], the states before the spans, or what makes them of the transitions;
            None for zeros.
        spans: Those of the tokens.
        size: Tokens of a chunk.
        corrects: Whether a token writes what the state does not say already; else q and k are taken as they are.
    """
    given, enter = (None, initial) if callable(initial) else (initial, None)
    rule = partial(_rule, chunks=spans.chunks(size), enter=enter, corrects=corrects)
    y, last = keeping_inputs(rule, q, k, v, g, beta, given)
    return y, last


def left(fades: Tensor, fade: Tensor, bias: Tensor, least: float | None = None) -> tuple[Tensor]:
    """Return g of :func:`delta_rule`, with ``heads`` for heads of values: [t, heads], or [t, heads, key].

    Args:
        fades: [t, heads] or [t, heads * key], what tokens say of it.
        fade: [heads], the logarithms of the rates.
        bias: That of ``fades``.
        least: What g is above, for it is a share of it, a sigmoid; None: there is no such bound, it is a softplus.
    """
    said, rates = (wide(fades) + bias).unflatten(1, (len(fade), -1)), wide(fade).exp()[:, None]
    g = -rates * F.softplus(said) if least is None else least * (rates * said).sigmoid()
    return (g.squeeze(-1),)


def weighed(y: Tensor, z: Tensor, gate: Callable[[Tensor], Tensor]) -> tuple[Tensor]:
    """Return y, weighed by gates z of the same shape."""
    return ((wide(y) * gate(wide(z))).to(y.dtype),)


def handed_on(transition: Tensor, state: Tensor) -> Tensor:
    """transition: [..., key, through + value] of a span, state: [..., key, value] before it -> behind it."""
    through, gained = transition.split([transition.shape[-1] - state.shape[-1], state.shape[-1]], -1)
    return gained + (through * state if through.shape[-1] == 1 else through @ state)


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    chunks: Chunks,
    enter: Enter | None,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    dtype = v.dtype
    q, k, v, g, beta = _cut(q, k, v, g, beta, chunks)
    if corrects:
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    sums = g.cumsum(-2)
    kept, asked = sums.exp(), _asked(g, sums)
    w, u, tail = _writes(k, v, g, kept, beta, asked if corrects else None)
    left = kept[..., -1, :, None]
    if enter is not None:
        # Of a state that is not known yet: both parts of the transition at once, and what enters is added at the end.
        nothing = _nothing_through(k, v, chunks, corrects)
        states, last = _scan(w, F.pad(u, (nothing.shape[-1] - v.shape[-1], 0)), tail, left, chunks, nothing)
        entering = enter(last.index_select(0, chunks.back)).index_select(0, chunks.order)
        before = torch.cat([entering[:count] for count in chunks.counts])
        states, last = handed_on(states, before), handed_on(last, entering)
    else:
        state = u.new_zeros(chunks.counts[0], *u.shape[1:3], k.shape[-1], v.shape[-1])
        state = state if initial is None else initial.to(u.dtype).index_select(0, chunks.order)
        states, last = _scan(w, u, tail, left, chunks, state)
    y = asked(q, k) @ _written(u, w, states) + q[:, :, None] * kept @ states
    y = y.movedim(3, 1).flatten(0, 1).index_select(0, chunks.places)
    return y.to(dtype), last.index_select(0, chunks.back)


def _nothing_through(k: Tensor, v: Tensor, chunks: Chunks, corrects: bool) -> Tensor:
    """Return the transitions of no tokens: all goes through, and nothing is gained."""
    key = k.shape[-1]
    through = torch.eye(key, dtype=k.dtype, device=k.device) if corrects else k.new_ones(key, 1)
    return F.pad(through, (0, v.shape[-1])).expand(chunks.counts[0], *v.shape[1:3], -1, -1)


def _cut(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries and keys: [chunks, heads, size, key], and what there is of each head of values: [chunks, heads,
    each, size, ...], of g one number or one for each channel. What is behind a span's end writes nothing, and lets
    nothing fade."""
    g, beta = (
        wide(x.index_select(0, chunks.tokens)).index_fill(0, chunks.behind, 0.0).unflatten(0, (-1, chunks.size))
        for x in (g, beta)
    )
    g, beta = g.movedim(1, 3), beta.movedim(1, 3)
    g = g[..., None] if g.dim() == beta.dim() else g
    return _chunked(q, chunks), _chunked(k, chunks), _chunked(v, chunks, 3), g, beta


def _chunked(x: Tensor, chunks: Chunks, to: int = 2) -> Tensor:
    """x: [t, heads, ..., n] -> [chunks, heads, ..., size, n]."""
    return wide(x.index_select(0, chunks.tokens)).unflatten(0, (-1, chunks.size)).movedim(1, to)


def _asked(g: Tensor, sums: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return q, k: [chunks, heads, size, key] -> [chunks, heads, each, size, size]: what is left at each token, asked
    by its q, of what itself and each before it wrote by its k."""
    if g.shape[-1] > 1:
        return lambda q, k: _by_halves(q[:, :, None], k[:, :, None], g)
    fade = _fade(sums)[..., 0]
    return lambda q, k: (q @ k.mT)[:, :, None] * fade


def _fade(sums: Tensor) -> Tensor:
    """sums: [..., size, n], those of g up to each token -> [..., size, size, n], what is left at each token of what
    each up to it wrote."""
    (size,) = sums.shape[-2:-1]
    # What is 1 by itself is no difference of sums: its gradient would be rounding, beside which small ones get lost.
    here = torch.eye(size, dtype=sums.dtype, device=sums.device)[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu()[..., None]
    return (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(later, -torch.inf).exp() + here


def _by_halves(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q, k, g: [..., size, key] -> [..., size, size], as :func:`_asked` has it, of channels that fade by themselves.

    What a first half wrote fades to its end, and from there to each token of the second half. Of both there is at most
    1 left, so that neither can overflow: one is a factor of k, the other of q, and their product is one of matrices.
    Within the halves it is the same again.
    """
    size = g.shape[-2]
    if size % 2:
        return (q[..., :, None, :] * k[..., None, :, :] * _fade(g.cumsum(-2))).sum(-1)
    q, k, g = (x.unflatten(-2, (2, size // 2)) for x in (q, k, g))
    first, second = _by_halves(q, k, g).unbind(-3)
    (_, q), (k, _), (faded, fades) = (x.unbind(-3) for x in (q, k, g))
    across = q * fades.cumsum(-2).exp() @ (k * _rest(faded).exp()).mT
    return torch.cat([F.pad(first, (0, size // 2)), torch.cat([across, second], -1)], -2)


def _rest(g: Tensor) -> Tensor:
    """g: [..., size, n] -> [..., size, n], the sum of those behind each token."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _writes(
    k: Tensor, v: Tensor, g: Tensor, kept: Tensor, beta: Tensor, asked: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return w and u, of which the tokens write u - w S, w where they correct, and the keys as they are at the chunk's
    end; ``kept`` is what is left of the state at each token."""
    beta = beta[..., None]
    u, w = v * beta, None
    if asked is not None:
        known = asked(k, k) * beta
        wanted = torch.cat([u, k[:, :, None] * (beta * kept)], -1)
        # Of the triangle its diagonal is taken for ones, and what is above it is not looked at.
        written = torch.linalg.solve_triangular(known, wanted, upper=False, unitriangular=True)
        u, w = written.split([v.shape[-1], k.shape[-1]], -1)
    return w, u, k[:, :, None] * _rest(g).exp()


def _written(u: Tensor, w: Tensor | None, state: Tensor) -> Tensor:
    return u if w is None else u - w @ state


def _scan(
    w: Tensor | None, u: Tensor, tail: Tensor, left: Tensor, chunks: Chunks, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, and behind each span, in the order of the chunks."""
    states, ended, at = list[Tensor](), list[Tensor](), 0
    for count in chunks.counts:
        ended.insert(0, state[count:])
        states.append(state := state[:count])
        some = slice(at, at + count)
        state = left[some] * state + tail[some].mT @ _written(u[some], None if w is None else w[some], state)
        at += count
    return torch.cat(states), torch.cat([state, *ended])


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
