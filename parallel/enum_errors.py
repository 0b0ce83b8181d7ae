"""Words that choose among a few things, and what to say of one that chooses none of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

ZeroShard = Literal["none", "optimizer", "gradients", "parameters"]
"""The states that ranks with the same shards split, each with what stands before it: ZeRO stages 0 to 3 (Rajbhandari et
al. 2020, arXiv 1910.02054)."""
Compression = Literal["none", "bf16", "int8"]
"""The numbers that gradients are rounded to where they are sent: none but those that they are summed in, or these."""
Recompute = Literal["none", "selective", "full"]
"""The part of a block that the backward computes again."""
PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved", "overlapped", "zb-h1", "zb-interleaved", "zb-v", "dualpipe-v"
]
"""The order in which a stage runs its microbatches."""
SPLIT_BACKWARD = frozenset({"zb-h1", "zb-interleaved", "zb-v", "dualpipe-v"})
"""The schedules that compute weight gradients by themselves, not with input gradients."""
OVERLAPPED = frozenset({"overlapped", "dualpipe-v"})
"""The schedules whose forwards and backwards run two by two, so that one computes where the other waits for experts."""
V_SHAPED = frozenset({"zb-v", "dualpipe-v"})
"""The schedules for which odd chunks run back through the stages."""
IN_GROUPS = ("interleaved", "overlapped", "zb-interleaved")
"""The schedules whose microbatches go through all chunks group by group, of at most so many as one says."""
Placement = Literal["loop", "v"]
"""The way in which chunk after chunk goes through the stages: from the first one each time, or there and back."""
OptimizerOffload = Literal["none", "host", "file"]
"""The place where masters and moments wait for the update, if not the device."""
Precision = Literal["bf16", "fp16", "fp8", "fp32", "fp64"]
"""The precision of weights and activations; fp8 is that of the products of linears and experts."""
BaseDtype = Literal["nf4", "int8"]
"""The numbers that the frozen linears below adapters are held in (`parallel.weights.block_formats`)."""
Moments = Literal["fp32", "bf16"]
"""The width of the optimizer's moments."""
OptimizerName = Literal["adamw", "muon"]
"""The rule of updates; `muon` is that of matrices, beside AdamW for the rest."""
MatrixScale = Literal["match_rms_adamw", "original"]
"""How large the updates of whole matrices are, in the words of torch.optim.Muon."""

ContextExchange = Literal["auto", "ring", "gather", "heads"]
"""The way in which queries meet keys of other ranks of cp: hop by hop, all at once, or by heads (Ulysses)."""
ContextBalance = Literal["auto", "rows", "documents"]
"""The pieces of a microbatch that are cut, so that each rank of cp has early and late tokens of them."""
PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo", "bradley_terry"]
"""A loss of chosen and rejected answers."""
WITH_REFERENCE = frozenset({"dpo", "ipo"})
"""Those that compare with the log-probabilities of the weights that a run starts from."""
OF_SCORES = frozenset({"bradley_terry"})
"""Those of models whose heads score a whole sequence, at its last token."""
Score = Literal["loss", "most_likely", "logit"]
"""A number of each token: its loss, or 1 where greedy decoding chooses it and 0 elsewhere."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """``": did you mean 'sequence'?"`` of the choice that is spelled most alike; empty where none is."""
    # What takes the square of a word's length to compare must not be given a word of megabytes.
    matches = get_close_matches(word[:100], list(choices), n=1)
    return f": did you mean {matches[0]!r}?" if matches else ""


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not among the choices of an argument.

    Raises:
        ValueError: it is not; the message names the argument, the value and the choices.
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"unknown {argument} {value!r}{nearest(str(value), known)} (choose from {', '.join(known)})")
