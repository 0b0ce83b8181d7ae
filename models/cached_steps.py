"""Microbatches of generation: blocks keep what prompts leave, or begin with what was kept of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacore.models.decoder import Decoder, Microbatch
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.layers.cache import (
    Cache,
    Decode,
    DecodeCompressed,
    DecodeIndexed,
    DecodeStates,
    Prefill,
    PrefillCompressed,
    PrefillIndexed,
    PrefillStates,
)


def prefill_step(step: Microbatch, cache: Cache, decoder: Decoder, context: ContextParallel) -> Microbatch:
    """Return whole prompts, which ``context`` has split, of whose tokens a new cache keeps all."""
    prefill = Prefill.of(cache, decoder.attention(step, context))
    states = PrefillStates.of(cache, decoder.states(step, whole=True))
    indexed = PrefillIndexed({}, prefill, decoder.indexed(step))
    how = step.parts, step.split, cache.group, step.tokens.device, decoder.tables
    blocks = PrefillCompressed(*how, prefill=prefill)
    return replace(step, attention=prefill, states=states, indexed=indexed, compressed=blocks)


def decode_step(
    step: Microbatch, cache: Cache, at: Sequence[int], counts: Sequence[int], decoder: Decoder
) -> Microbatch:
    """Return more tokens of the cache's first rows, so many of each and at these positions; the rest is padding."""
    device, padding = step.tokens.device, len(step.tokens) - len(at)
    decode, states = Decode.of(cache, at, device, counts), DecodeStates.of(cache, counts, padding, device)
    lengths = [*(each + 1 for each in at), *[padding] * (padding > 0)]
    blocks = DecodeCompressed(lengths, None, cache.group, device, decoder.tables, decode=decode)
    return replace(step, attention=decode, states=states, indexed=DecodeIndexed({}, decode), compressed=blocks)


def back_to(step: Microbatch, kept: Sequence[int]) -> None:
    """Leave in the cache of such a step no more than the first tokens of each row, as many as are kept."""
    assert isinstance(step.attention, Decode) and isinstance(step.states, DecodeStates)
    step.attention.back_to(kept)
    step.states.back_to(kept)
