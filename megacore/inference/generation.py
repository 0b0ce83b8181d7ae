"""Generating tokens through the parallel model, with a cache of keys and values: for checking a model, not for serving.

A batch of prompts is computed at once, one prompt after the other without padding between them; from then on a step
is one token of each, and drafts of those behind it. Every rank of the mesh goes through the same steps and learns each
token. The ranks of cp share out the tokens of each prompt, and keep their keys and values; a further token is computed
by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megacore.inference.drafts import Drafter
from megacore.inference.sampling import Choice, keep
from megacore.inference.steps import Growing, on_all_ranks, prefill, tokens_at
from megacore.models.assemble import Model
from megacore.models.cached_steps import back_to, decode_step


@dataclass(frozen=True)
class Ending:
    """The end of a sequence: one of the tokens ``stops``, or ``most`` new ones.

    Of a model whose positions have a limit, the last new token is the first that has none.
    """

    stops: frozenset[int]
    most: int
    positions: int | None = None

    def limit(self, prompt: Sequence[int]) -> int:
        """Return the number of new tokens that a prompt can have."""
        return self.most if self.positions is None else min(self.most, self.positions - len(prompt) + 1)


@dataclass(frozen=True)
class NewToken:
    """A new token: after which prompt, and whether it is the last one there. ``drafts``: how many the forward of the
    model was given that it is of, if it is the first one of it."""

    prompt: int
    token: int
    last: bool
    drafts: int | None


def generate(
    model: Model, prompts: Sequence[Sequence[int]], choose: Choice, ending: Ending, together: int, drafts: int = 0
) -> Iterator[list[NewToken]]:
    """Yield the next tokens of each prompt that has not ended, until all have.

    Every rank of the model's mesh, which has one data-parallel rank, iterates to the end. So many prompts as
    `together` says, of at least one token each, are computed at a time; the token that ends one is given too. Up to so
    many ``drafts`` of each are made at a time, by a model that has layers for it on a mesh without cp.
    """
    for first in range(0, len(prompts), together):
        numbers = range(first, min(first + together, len(prompts)))
        yield from _batch(model, {number: prompts[number] for number in numbers}, choose, ending, drafts)


def _batch(
    model: Model, prompts: Mapping[int, Sequence[int]], choose: Choice, ending: Ending, most: int
) -> Iterator[list[NewToken]]:
    alive = [Growing(number, [*ids], len(ids) + ending.limit(ids)) for number, ids in prompts.items()]
    longest, lengths = [each.longest for each in alive], [each.length for each in alive]
    drafter = Drafter(model, choose, most, longest) if most else None
    take = None if drafter is None else partial(drafter.take, counts=lengths, kept=lengths)
    cache, logits = prefill(model, [each.ids for each in alive], longest, take)
    drafts: list[list[int]] = [[] for _ in alive]
    new = _kept(model, logits, choose, alive, drafts, [])
    while True:
        for each, tokens in zip(alive, new, strict=True):
            ended = next((at for at, token in enumerate(tokens, 1) if token in ending.stops), len(tokens))
            del tokens[ended:]
            each.ids += tokens
            each.new += len(tokens)
        left = [
            row for row, each in enumerate(alive) if each.ids[-1] not in ending.stops and each.length < each.longest
        ]
        yield [
            NewToken(each.prompt, token, row not in left and at == len(new[row]) - 1, None if at else len(drafts[row]))
            for row, each in enumerate(alive)
            for at, token in enumerate(new[row])
        ]
        if not left:
            return
        cache.keep(left)
        alive = [alive[row] for row in left]
        if drafter is not None:
            drafter.keep(left)
        drafts = [[] for _ in alive] if drafter is None else drafter.draft(alive)
        given = [[each.ids[-1], *ids] for each, ids in zip(alive, drafts, strict=True)]
        counts = [len(ids) for ids in given]
        at = [each.length - 1 + place for each, count in zip(alive, counts, strict=True) for place in range(count)]
        step = decode_step(tokens_at(model, [*chain.from_iterable(given)], at), cache, at, counts, model.chunks[0])
        hidden = model.hidden(step)
        logits = None if hidden is None else model.logits_of(hidden)
        new = _kept(model, logits, choose, alive, drafts, [] if drafter is None else drafter.p)
        if drafter is not None:
            kept = [len(tokens) for tokens in new]
            back_to(step, kept)
            drafter.take(hidden, counts, kept)


def _kept(
    model: Model,
    logits: Tensor | None,
    choose: Choice,
    alive: Sequence[Growing],
    drafts: Sequence[list[int]],
    p: Sequence[Tensor],
) -> list[list[int]]:
    """Return the drafts of each sequence that are kept and the token behind them, which the first rank of the last
    stage chooses, on all ranks; logits: [t, vocab], of the last token of each sequence and of its drafts."""
    most = max(map(len, drafts)) + 1

    def chosen() -> Tensor:
        assert logits is not None  # it is of the last stage
        if most == 1:
            return choose(logits, [(each.prompt, each.new) for each in alive])
        found, rows = [], logits.split([len(ids) + 1 for ids in drafts])
        for row, (each, ids) in enumerate(zip(alive, drafts, strict=True)):
            of_row = torch.stack([step[row] for step in p])
            tokens = keep(choose, rows[row], ids, of_row, each.prompt, each.new)
            found += tokens + [_NONE] * (most - len(tokens))
        return torch.tensor(found, device=logits.device)

    tokens = on_all_ranks(model, most * len(alive), chosen)
    rows = (tokens[first : first + most] for first in range(0, len(tokens), most))
    return [[token for token in row if token != _NONE] for row in rows]


_NONE = -1
"""No token."""
