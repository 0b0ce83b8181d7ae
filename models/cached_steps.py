"""Microbatches of generation: blocks keep what prompts leave, or begin with what was kept of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacore.models.decoder import Decoder, Microbatch
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.layers.cache import (
    Cache,
    Decode,
    DecodeIndexed,
    DecodeStates,
    Prefill,
    PrefillIndexed,
    PrefillStates,
)


def prefill_step(step: Microbatch, cache: Cache, decoder: Decoder, context: ContextParallel) -> Microbatch:
    """Return whole prompts, which ``context`` has split, of whose tokens a new cache keeps all."""
    prefill = Prefill.of(cache, decoder.attention(step, context))
    states = PrefillStates.of(cache, decoder.states(step, whole=True))
    return replace(step, attention=prefill, states=states, indexed=PrefillIndexed({}, prefill, decoder.indexed(step)))


def decode_step(step: Microbatch, cache: Cache, at: Sequence[int], documents: Sequence[int]) -> Microbatch:
    """Return one more token of each of the cache's first rows, at these positions; what follows them, of the documents,
    is padding."""
    device = step.tokens.device
    decode, states = Decode.of(cache, at, device), DecodeStates.of(cache, len(at), documents, device)
    return replace(step, attention=decode, states=states, indexed=DecodeIndexed({}, decode))
