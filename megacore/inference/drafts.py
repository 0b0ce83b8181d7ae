"""Drafts of further tokens, by the layers behind a model that predict them: what the model says is found by fewer
forwards of it, and is what it says without (Leviathan et al. 2022, arXiv 2211.17192).

The model's hidden states are known up to a position, and so is the token behind it. Layer k makes of the states that
layer k - 1 gives there, and of the token k behind it, the token k + 1 behind it (DeepSeek-AI 2024, arXiv 2412.19437,
section 2.2); the last layer goes on by itself, a position further each time. What a layer knows of earlier positions is
made of tokens that are there to stay: the few positions whose tokens behind them were drafts are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from megacore.inference.sampling import Choice, draft
from megacore.inference.steps import Growing, on_all_ranks, tokens_at
from megacore.models.assemble import Model
from megacore.models.attention import Attention
from megacore.models.cached_steps import Cache, decode_step
from megacore.models.decoder import Microbatch
from megacore.parallel.collectives import all_gather


class Drafter:
    """Makes drafts of what follows some sequences. Every rank of the model's mesh has one, and calls the same methods.

    Args:
        model: A model with layers that predict further tokens, on a mesh without cp.
        choose: The way in which the model's tokens are chosen, and so drafts.
        most: The most drafts of a sequence at a time.
        longest: The tokens that each sequence may come to.
    """

    def __init__(self, model: Model, choose: Choice, most: int, longest: Sequence[int]) -> None:
        self.model, self.choose, self.most = model, choose, most
        self.p = list[Tensor]()
        self._last = next((chunk for chunk in model.chunks if chunk.head is not None), None)
        self._layers = [] if self._last is None else [*model.head.predictions]
        self._again = model.config.mtp_layers - 1
        """The last positions whose tokens behind them are drafts of which one may be replaced."""
        self._step: Microbatch | None = None
        parameters, mesh = model.parameters, model.parameters.mesh
        attentions = [each for layer in self._layers for each in layer.modules() if isinstance(each, Attention)]
        # Of the last drafts some may have no place in their sequence any more.
        rooms, held = [length + most for length in longest], [[list[int]()] for _ in longest]
        self._cache = Cache.of(attentions, held, rooms, parameters.dtype, mesh.device, mesh.cp)
        nothing = torch.empty(0, model.config.sizes["embed"], dtype=parameters.dtype, device=mesh.device)
        self._hidden = [nothing] * len(longest)

    def take(self, hidden: Tensor | None, counts: Sequence[int], kept: Sequence[int]) -> None:
        """Take the model's hidden states of some more tokens of each sequence, [t, embed], normalised for the head, of
        which the first ones are kept; None on ranks that are not of the last stage."""
        if hidden is None:
            return
        new = zip(self._hidden, hidden.split([*counts]), kept, strict=True)
        self._hidden = [torch.cat([old[max(0, len(old) - self._again) :], each[:count]]) for old, each, count in new]

    def keep(self, rows: Sequence[int]) -> None:
        """Make some of the sequences, in ascending order, the first ones, and forget the others."""
        self._hidden = [self._hidden[row] for row in rows]
        self._cache.keep(rows)

    @torch.no_grad()
    def draft(self, sequences: Sequence[Growing]) -> list[list[int]]:
        """Return drafts of each sequence, the same on all ranks. ``p`` is then, on the rank that chooses, what they
        were drawn with, for each place the probabilities [sequences, vocab]."""
        drafts, self.p = [list[int]() for _ in sequences], []
        room = [min(self.most, each.longest - each.length - 1) for each in sequences]
        x, logits = torch.cat(self._hidden), None
        for step in range(max(room)):
            if self._layers:
                x, logits = self._predict(x, step, sequences, drafts)
            which = [(each.prompt, each.new + step) for each in sequences]
            tokens = on_all_ranks(self.model, len(which), partial(self._drawn, logits, which))
            for ids, token in zip(drafts, tokens, strict=True):
                ids.append(token)
        self._cache.back_to([each.length - self._again - 1 for each in sequences])
        return [ids[:most] for ids, most in zip(drafts, room, strict=True)]

    def _drawn(self, logits: Tensor | None, which: Sequence[tuple[int, int]]) -> Tensor:
        assert logits is not None  # it is of the last stage
        tokens, p = draft(self.choose, logits, which)
        self.p.append(p)
        return tokens

    def _predict(
        self, x: Tensor, step: int, sequences: Sequence[Growing], drafts: Sequence[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """x: [t, embed], what the layer before gives of the last positions of each sequence -> what this one does, and
        the logits of the tokens behind those that there are: [sequences, vocab]."""
        assert self._last is not None
        depth, lasts = min(step, self._again), [each.length - 2 + max(0, step - self._again) for each in sequences]
        counts = [len(hidden) for hidden in self._hidden] if step == depth else [1] * len(sequences)
        at = [range(last - count + 1, last + 1) for last, count in zip(lasts, counts, strict=True)]
        known = ([*each.ids, *ids] for each, ids in zip(sequences, drafts, strict=True))
        tokens = [ids[position + depth + 1] for ids, positions in zip(known, at, strict=True) for position in positions]
        positions = [position for each in at for position in each]
        more = tokens_at(self.model, tokens, positions)
        if 0 < step == depth:  # by other tokens, and otherwise as the layer before
            assert self._step is not None
            more = replace(self._step, tokens=more.tokens)
        else:
            more = self._step = decode_step(more, self._cache, positions, counts, self.model.chunks[0])
        tp, own = self.model.parameters.mesh.tp, x.new_zeros(len(more.tokens), x.shape[1])
        own[: len(x)] = x
        layer, context = self._layers[depth], self._last.context(more)
        made = layer(own.chunk(tp.size)[tp.index], more, context, self._last.run)
        y = all_gather(made, tp)[: len(x)]
        last = y[[end - 1 for end in accumulate(counts)]]
        return y if step < self._again else last, self.model.logits_of(last)
