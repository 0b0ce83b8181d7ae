"""Linear recurrences of channels, as real-gated linear recurrent units have them (De et al. 2024, arXiv 2402.19427).

A channel has one number h. A token lets it fade by exp(g), adds its x, and what is there then is its output:

    h = exp(g) h + x

All tokens are taken at once: in turns, each adds what the token 1, 2, 4, 8, ... before it has by then, times what is
left of that. The first token of a span takes nothing from those before it, so that no turn goes over its beginning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.delta_rule import Enter
from megacore.parallel.kernels.spans import Spans
from megacore.parallel.kernels.upcast import wide


def linear_recurrence(x: Tensor, g: Tensor, initial: Tensor | Enter | None, spans: Spans) -> tuple[Tensor, Tensor]:
    """Return y: [t, channels] and the states behind the spans: [spans, channels, 1, 1], in fp32 at least, in which all
    is computed. Autograd keeps g, the states before the spans and those behind the tokens.

    Args:
        x: [t, channels].
        g: [t, channels], the logarithm of what is left of the state at each token, 0 or less.
        initial: [spans, channels, 1, 1], the states before the spans, or what makes them of the transitions; None for
            zeros.
        spans: Those of the tokens.
    """
    nothing = wide(x).new_zeros(len(spans), x.shape[1], 1, 1)
    if callable(initial):
        of = spans.kept("of", lambda: np.repeat(np.arange(len(spans)), spans.lengths))
        through = nothing.index_add(0, of, wide(g)[..., None, None]).exp()
        initial = initial(torch.cat([through, _Recurrence.apply(x, g, nothing, spans)[1]], -1))
    y, last = _Recurrence.apply(x, g, nothing if initial is None else initial, spans)
    return y, last


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, initial: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        (first, last), states = _ends(spans), wide(x).clone()
        left, initial = wide(g).exp(), initial.flatten(1)
        states[first] += left[first] * initial
        _summed(states, left.index_fill(0, first, 0.0), max(spans.lengths))
        ctx.save_for_backward(g, initial, states)
        ctx.spans, ctx.dtype = spans, x.dtype
        return states.to(x.dtype), states[last][..., None, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        (g, initial, states), (first, last) = ctx.saved_tensors, _ends(ctx.spans)
        left, dstates = wide(g).exp(), wide(dy).clone()
        dstates[last] += dlast.flatten(1)
        # From behind a token there is left what the next one leaves.
        behind = left.roll(-1, 0).index_fill(0, last, 0.0)
        dstates = _summed(dstates.flip(0), behind.flip(0), max(ctx.spans.lengths)).flip(0)
        dleft = dstates * states.roll(1, 0).index_copy(0, first, initial) * left  # of its logarithm
        dinitial = (left * dstates)[first][..., None, None]
        return dstates.to(ctx.dtype), dleft.to(g.dtype), dinitial, None


def _ends(spans: Spans) -> tuple[Tensor, Tensor]:
    """Return the first and the last token of each span."""
    return spans.starts[:-1], spans.starts[1:] - 1


def _summed(x: Tensor, left: Tensor, longest: int) -> Tensor:
    """Add to each row of x, [t, n], what is left of those before it; both are overwritten, and x is returned."""
    back = 1
    while back < longest:
        x[back:] += left[back:] * x[:-back]
        left[back:] = left[back:] * left[:-back]
        back *= 2
    return x
