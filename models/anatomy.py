"""An anatomy says what the weights table of a family does not: numbers and names, in one frozen table. No torch.

Structure is read off the weights table by :mod:`models.builder`: which norms there are, of what, before or after a
branch; which linears have biases; whether the feed-forward network is gated; how many heads share keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megacore.models.rope_config import Rope
from megacore.parallel.routing import Routing

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""{Hugging Face's name of an activation function: ours}; each has f(0) = 0, for the mlp axis is padded with zeros."""

GATES: Mapping[str, str] = {**ACTIVATIONS, "swiglu_oai": "swiglu_oai", "swiglu_limited": "swiglu_limited"}
"""{the activation of a gated network: ours}: those, of the gate, or one of gate and up together (gpt-oss,
DeepSeek-V4)."""

FULL, SLIDING, LINEAR, CONVOLUTION = "full_attention", "sliding_attention", "linear_attention", "conv"
CHUNKED = "chunked_attention"
"""The kinds of layers of a ``config.json`` that says ``layer_types``."""
ROPE = "rope"
"""The name of a model's rope where it has one."""


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale log(1 + floor((p + start) / every)), so that those of long
    sequences keep choosing (Nakanishi 2025, arXiv 2501.19399)."""

    scale: float
    every: float
    start: int = 0


@dataclass(frozen=True)
class Alibi:
    """Scores of keys are less by a slope of the head for each token between (Press et al. 2021, arXiv 2108.12409): of n
    heads, a power of two, head i has 2^(-most i / n), and of others those of the powers of two around are mixed.

    Args:
        most: The exponent of the last head.
        of_power: Whether slopes are powers of the first one, and not of 2: they are rounded otherwise (BLOOM).
    """

    most: float = 8.0
    of_power: bool = False


@dataclass(frozen=True)
class Sinusoids:
    """Positions are sines and cosines of angles, from slow to fast ones, in place of rows that are learned (Vaswani et
    al. 2017, arXiv 1706.03762): that of frequency i is 10000^(-i / steps) times the position.

    Args:
        steps: From the first frequency to what would be the last, a ten-thousandth.
        of_power: Whether frequencies are powers, and not exponentials of logarithms: they are rounded otherwise (CTRL).
        none: The row that is zeros; None: there is none.
    """

    steps: float
    of_power: bool = False
    none: int | None = None


@dataclass(frozen=True)
class Factors:
    """What a branch is multiplied by, or one of two that stand side by side (Yang et al. 2022, arXiv 2203.03466).

    Args:
        given: Factor of what it is given.
        gives: Factor of what it gives.
        inner: Factors of the pieces that its first linear gives: of a network of gates and what they are for, of a
            state space of gates, x, B, C and steps; empty: there are none.
        past: Factor of what it is given, behind its norm, which goes past it in place of what the block is given; None:
            that does, as it is.
    """

    given: float = 1.0
    gives: float = 1.0
    inner: tuple[float, ...] = ()
    past: float | None = None


@dataclass(frozen=True)
class Streams:
    """Residual streams that stand side by side, and what mixes them (mHC, Xie et al. 2025, arXiv 2512.24880).

    Args:
        count: The number of them.
        rounds: How often rows and columns of what mixes them are divided by their sums.
        eps: Added to these sums, and to the weights by which a branch is given the streams.
    """

    count: int
    rounds: int
    eps: float


@dataclass(frozen=True)
class AltUp:
    """Residual streams of which a layer computes one (Baykal et al. 2023, arXiv 2301.13310).

    Args:
        count: The number of them.
        active: The one that is computed.
        limit: Weights by which streams are predicted and corrected count as within plus and minus this in training;
            None: as they are.
    """

    count: int
    active: int
    limit: float | None


TOLD = frozenset({"input_vocab", "pair"})
"""Axes of what layers have where they are told the embedding of each token."""


@dataclass(frozen=True)
class LayerAttention:
    """The positions that the attention of one layer sees, and how it encodes them.

    Args:
        rope: The name of its rope among :attr:`Anatomy.ropes`; None: queries and keys do not rotate.
        window: A token sees itself and the ``window`` - 1 tokens before it; None: all tokens before it.
        chunk: A token sees no token before the last multiple of so many positions; None: it does.
        temperature: The factor of its queries; None: there is none.
        plain_norms: Whether queries and keys have those of :attr:`Anatomy.plain_norms`.
        top: A token sees so many tokens at most, those that an indexer chooses; None: there is none.
        chooser: The layer whose indexer chooses them for several layers; None: its own does, for it alone.
        block: Beyond its window a token sees blocks of so many tokens, of which each is one key, and ``top`` of these;
            None: there are none.
        keys: The layer before it whose keys and values it looks at; None: it has its own.
    """

    rope: str | None = ROPE
    window: int | None = None
    chunk: int | None = None
    temperature: Temperature | None = None
    plain_norms: bool = True
    top: int | None = None
    chooser: int | None = None
    block: int | None = None
    keys: int | None = None


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The numbers and names of a decoder.

    Args:
        layers: The attention of each layer.
        ropes: The rotary embeddings by name.
        rotary_heads: {a rope: the size of the heads, or of the part of them, that it is of}, where that is not the
            whole of every layer's.
        norm: Root mean square norms, or layer norms.
        norm_eps: Added to the mean square or the variance.
        latent_norm_eps: The same of the norms of latents.
        latent_scale: Factor of the latents that keys and values are made of, behind their norms.
        norm_offset: Added to the weights of norms, in fp32 at least.
        norms_after_rope: Whether heads are normalised after they have rotated, not before.
        plain_norms: Those norms without weights that there are, by the names that their weights would have.
        activation: That of the feed-forward network, by Hugging Face's name; of a gated one also another of
            :data:`GATES`.
        head_activation: That of a dense layer between the final norm and the head, where there is one.
        mixer_activation: That of the convolutions of state space layers; None: the same.
        delta_gate: The function of the gates that weigh what the gated delta rule gives.
        delta_share: The largest share of a value that it writes: above 1 states may change their sign.
        delta_least: The least logarithm of what is left of a state at a token; None: there is no such bound.
        delta_norm_eps: ``norm_eps`` of what it gives, or lightning attention, or a state space; None: the same.
        parallel: Whether attention and the feed-forward network stand side by side, both given the block's input. Where
            a layer then has no ``mlp_norm``, both are given what ``attn_norm`` gives.
        attention_scale: Factor of the products of queries and keys; None: 1 / sqrt(head).
        qkv_limit: Queries, keys and values are kept within plus and minus this, after their norms; None: they are not.
        attention_gate: The function of what attention's outputs are weighed by, where they are.
        attention_softcap: c of c tanh(score / c).
        logit_softcap: c of c tanh(logit / c).
        embedding_scale: Factor of the embeddings of tokens.
        round_embedding_scale: Whether that is rounded to the model's dtype first.
        branch_scale: Factor of what each branch adds to the residual stream.
        logit_scale: Factor of the logits.
        factors: Those of ``attn``, ``lightning``, ``ssm``, ``mlp`` and, in its place, ``experts``, if there are some.
        attention_dropout: Probability of dropping an attention weight.
        branch_dropout: Probability of dropping an element of what a branch adds.
        embedding_dropout: Probability of dropping an element of the embeddings.
        position_offset: The row of the learned positions, or of sinusoids, where a sequence begins.
        sinusoids: What is added to the embeddings of tokens where no positions are learned; None: nothing is.
        padding_idx: The token whose embedding gets no gradient from being looked up.
        alibi: The slopes by which heads count distances; None: they do not.
        step_limits: The lower and the upper bound of the steps of state space layers.
        routing: The rule by which experts are chosen, where layers have some.
        streams: The residual streams, where there are several.
        cut: The share of its gates that each layer's network cuts off, those that would be the lowest if they were
            normal; empty: none.
        round_input_scales: Whether factors of what layers are told are rounded as ``round_embedding_scale`` says.
        both_ways: What tokens see each other whatever their order: those of one image, as far as a layer's window
            reaches; the same, in layers with windows alone; or those of the prompt of a document that has images,
            whatever the window. None: there are none.
    """

    layers: tuple[LayerAttention, ...]
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    rotary_heads: Mapping[str, int] = field(default_factory=dict)
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    latent_norm_eps: float = 1e-6
    latent_scale: float = 1.0
    norm_offset: float = 0.0
    norms_after_rope: bool = False
    plain_norms: frozenset[str] = frozenset()
    activation: str = "silu"
    head_activation: str = "gelu"
    mixer_activation: str | None = None
    delta_gate: Literal["silu", "sigmoid"] = "silu"
    delta_share: float = 1.0
    delta_least: float | None = None
    delta_norm_eps: float | None = None
    parallel: bool = False
    attention_scale: float | None = None
    qkv_limit: float | None = None
    attention_gate: Literal["sigmoid", "softplus"] = "sigmoid"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    factors: Mapping[str, Factors] = field(default_factory=dict)
    attention_dropout: float = 0.0
    branch_dropout: float = 0.0
    embedding_dropout: float = 0.0
    position_offset: int = 0
    sinusoids: Sinusoids | None = None
    padding_idx: int | None = None
    alibi: Alibi | None = None
    step_limits: tuple[float, ...] = (0.0, math.inf)
    routing: Routing | None = None
    streams: Streams | AltUp | None = None
    cut: tuple[float, ...] = ()
    round_input_scales: bool = False
    both_ways: Literal["images", "images in windows", "prompts"] | None = None


def by_kind(
    kinds: Collection[str], window: int | None, ropes: Mapping[str, str | None] | None = None
) -> tuple[LayerAttention, ...]:
    """Return how each of the layers treats positions, by its kind.

    Args:
        kinds: The kind of each layer, :data:`FULL` or :data:`SLIDING`, or of one that does not attend.
        window: The tokens that a sliding layer sees.
        ropes: {kind: the name of its rope, or None}; all have the model's one where nothing is said.
    """
    windows = {FULL: None, SLIDING: window}
    turns = dict.fromkeys(windows, ROPE) if ropes is None else ropes
    return tuple(LayerAttention(turns.get(kind), windows.get(kind)) for kind in kinds)
