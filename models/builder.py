"""The one builder of all families makes the modules of one pipeline chunk from a weights table and an anatomy.

What a table declares is used, and nothing else is made: a norm stands where the table has its weight. It imports
without torch, so that families do; the layers are imported when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megacore.models import scores
from megacore.models.anatomy import ACTIVATIONS, TOLD, AltUp, Anatomy, Factors, Streams

if TYPE_CHECKING:
    from torch import nn

    from megacore.models.decoder import Decoder
    from megacore.models.positions import Encoding
    from megacore.parallel.parameters import Parameters


def build(anatomy: Anatomy, sizes: Mapping[str, int], parameters: Parameters, chunk: int) -> Decoder:
    """Return the modules of one pipeline chunk of this rank, over parameters that the layout has cut.

    Args:
        sizes: Those of the axes of its weights.
        chunk: The number of the chunk on this rank.
    """
    from torch import nn

    from megacore.models.adapt import with_adapter
    from megacore.models.alt_up import AltUpBlock, Mean, Spread
    from megacore.models.attention import MultiHeadAttention
    from megacore.models.blocks import (
        Block,
        FeedForward,
        LowRank,
        NormedBlock,
        ParallelBlock,
        PostNormBlock,
        SharedBlock,
        ShortcutBlock,
        SideBySide,
        replicated,
    )
    from megacore.models.decoder import (
        Decoder,
        DenseHead,
        Head,
        NormedEmbedding,
        PositionEmbedding,
        Prediction,
        TokenEmbedding,
    )
    from megacore.models.hyper_connections import Collapse, HyperBlock, HyperConnection, Repeated
    from megacore.models.layer_inputs import LayerInputs
    from megacore.models.positions import Waves
    from megacore.models.rope import Rotary

    p, vocab, streams = parameters, sizes["vocab"], anatomy.streams

    def block(layer: int, name: str = "") -> Block:
        if not name and f"layers.{layer}.join.weight" in p:
            return shared(layer)
        name = name or f"layers.{layer}"
        norms = {
            place.replace("sum", "out"): norm(anatomy, p, f"{name}.{place}")
            for place in NORMS
            if f"{name}.{place}.weight" in p or place in anatomy.plain_norms
        }
        # Every branch has a linear that ends it.
        mixers = [each for each in MIXERS if f"{name}.{each}.out.weight" in p]
        mixing = [scaled(anatomy, each, mix(anatomy, p, layer, f"{name}.{each}")) for each in mixers]
        experts = f"{name}.mlp.experts.down.weight" in p
        feeds = [each for each in FEEDS if experts or f"{name}.{each}.down.weight" in p]
        branches = (
            SideBySide(mixing) if len(mixing) > 1 else mixing[0] if mixing else None,
            scaled(anatomy, "experts" if experts else "mlp", feed(anatomy, p, layer, f"{name}.{feeds[0]}"))
            if feeds
            else None,
        )
        if isinstance(streams, Streams):
            around = {each: HyperConnection(p, f"{name}.{each}_streams", streams, anatomy.norm_eps) for each in _AROUND}
            return HyperBlock(branches[0], branches[1], norms, around)
        told = inputs(f"{name}.inputs") if f"{name}.inputs.embed.weight" in p else None
        others: dict[str, Any] = {"dropout": anatomy.branch_dropout, "factor": p.get(f"{name}.factor"), "inputs": told}
        if f"{name}.laurel.left.weight" in p:
            left, right = (replicated(p, f"{name}.laurel.{each}") for each in ("left", "right"))
            others["beside"] = LowRank(left, right, norm(anatomy, p, f"{name}.laurel.norm"))
        if streams is not None:
            of_router = norm(anatomy, p, f"{name}.streams.norm")
            return AltUpBlock(*branches, norms, p, f"{name}.streams", streams, of_router, **others)
        summed = f"{name}.attn_sum_norm.weight" in p
        kind: Any = ParallelBlock if anatomy.parallel else PostNormBlock if summed else Block
        factors = (anatomy.factors.get(each, Factors()) for each in (*mixers, *feeds, "experts"))
        if past := [each.past for each in factors if each.past is not None]:  # of a mixture ``experts`` says it
            kind = partial(NormedBlock, past=past)
        if f"{name}.then.attn.out.weight" in p:
            kind = partial(ShortcutBlock, then=block(layer, f"{name}.then"), experts=branches[1])
            branches = branches[0], feed(anatomy, p, layer, f"{name}.dense")
        return kind(*branches, norms, scale=anatomy.branch_scale, **others)

    def shared(layer: int) -> Block:
        owners = p.layout.schema["layers.{layer}.pair_norm.weight"].owners or {}
        name, own, use = f"layers.{layer}", f"layers.{owners[layer]}", sorted(owners).index(layer)
        attn, mlp = mix(anatomy, p, layer, f"{own}.attn"), feed(anatomy, p, layer, f"{own}.mlp")
        assert isinstance(attn, MultiHeadAttention) and isinstance(mlp, FeedForward)
        attn.name = f"{name}.attn"  # its keys and values are its own
        for module, place, child in ((attn, "attn.qkv", "qkv"), (mlp, "mlp.up", "up")):
            halves = (f"{name}.{place}.use{use}_{half}" for half in "ab")
            adapted = with_adapter(module.get_submodule(child), p, f"{own}.{place}.weight", *halves)
            module.set_submodule(child, adapted)
        norms = {"attn_norm": norm(anatomy, p, f"{own}.pair_norm"), "mlp_norm": norm(anatomy, p, f"{own}.mlp_norm")}
        return SharedBlock(attn, mlp, norms, then=block(layer, f"{name}.then"), join=replicated(p, f"{name}.join"))

    def inputs(name: str) -> nn.Module:
        plain, last = (norm(anatomy, p, each) for each in ("inputs_norm", f"{name}.out_norm"))
        return LayerInputs(p, name, sizes["input_vocab"], anatomy, plain, last)

    def embedding() -> nn.Module:
        plain = embedded()
        plain = NormedEmbedding(plain, norm(anatomy, p, "embed_norm")) if has_norm("embed_norm") else plain
        if isinstance(streams, AltUp):
            return Spread(plain, p["first_streams.proj"])
        return plain if streams is None else Repeated(plain, streams.count)

    def has_norm(name: str) -> bool:
        return f"{name}.weight" in p or name in anatomy.plain_norms

    def embedded() -> nn.Module:
        waves = anatomy.sinusoids
        if waves is not None:
            return PositionEmbedding(p, Waves(waves, sizes["embed"], p.mesh.device), vocab, anatomy)
        if "positions.weight" in p:
            return PositionEmbedding(p, p["positions.weight"], vocab, anatomy)
        return TokenEmbedding(
            p,
            "embed.weight",
            vocab,
            anatomy.padding_idx,
            anatomy.embedding_scale,
            anatomy.round_embedding_scale,
            anatomy.embedding_dropout,
        )

    def predictions() -> Iterator[Prediction]:
        layers, depth = sizes["layer"], 0
        while f"mtp.{depth}.proj.weight" in p:
            name = f"mtp.{depth}"
            norms = (norm(anatomy, p, f"{name}.{each}") for each in ("embed_norm", "hidden_norm", "norm"))
            yield Prediction(embedding(), replicated(p, f"{name}.proj"), block(layers + depth, name), *norms)
            depth += 1

    def before_head() -> nn.Module:
        last = norm(anatomy, p, "norm") if has_norm("norm") else nn.Identity()
        if isinstance(streams, AltUp):
            return Mean(p["last_streams.proj"], last)
        if streams is not None:
            return Collapse(p, "last_streams", streams, anatomy.norm_eps, last)
        if "dense_head.weight" not in p:
            return last
        activation = ACTIVATIONS[anatomy.head_activation]
        return DenseHead(last, replicated(p, "dense_head"), activation, norm(anatomy, p, "dense_head_norm"))

    def head() -> Head:
        if scores.WEIGHT in p:
            return Head(before_head(), p[scores.WEIGHT], p.layout.schema.sizes[scores.AXIS], p.mesh.tp)
        return Head(
            before_head(),
            p["head.weight" if "head.weight" in p else "embed.weight"],
            vocab,
            p.mesh.tp,
            p.get("head.bias"),
            scale=anatomy.logit_scale,
            softcap=anatomy.logit_softcap,
            predictions=predictions(),
        )

    return Decoder.chunk(
        p,
        chunk,
        embedding=embedding,
        block=block,
        head=head,
        told=0 if TOLD.isdisjoint(sizes) else sizes["embed"],
        rotaries={
            name: Rotary(rope, anatomy.rotary_heads.get(name, sizes["head"])) for name, rope in anatomy.ropes.items()
        },
    )


_AROUND = "attn", "mlp"
"""The branches that streams stand around."""
NORMS = ("attn_norm", "attn_out_norm", "attn_sum_norm", "mlp_norm", "mlp_out_norm", "mlp_sum_norm")
"""The names that norms have in a block."""
MIXERS = ("attn", "local_attn", "delta", "lightning", "ssm", "lru", "short")
"""The names that what mixes tokens has in a block: those that a layer has stand side by side."""
FEEDS = ("mlp", "wide_mlp")
"""The names that a feed-forward network has."""


def scaled(anatomy: Anatomy, name: str, branch: nn.Module) -> nn.Module:
    """Return what a branch of this name is with the factors of what it is given and gives."""
    from megacore.models.blocks import Scaled

    of = anatomy.factors.get(name)
    return branch if of is None or of.given == of.gives == 1 else Scaled(branch, of.given, of.gives)


def mix(anatomy: Anatomy, parameters: Parameters, layer: int, name: str) -> nn.Module:
    """Return what mixes tokens in a layer: self-attention, ``attn``, or ``local_attn`` where heads of layers with
    windows have other sizes, of latents where it has some, the gated delta rule, ``delta``, lightning attention,
    ``lightning``, a state space, ``ssm``, a recurrent unit, ``lru``, or a short convolution, ``short``, as the name
    ends."""
    from megacore.models.attention import MultiHeadAttention, SharedKeysAttention
    from megacore.models.compressed_attention import CompressedAttention
    from megacore.models.delta_rule import GatedDeltaRule
    from megacore.models.latent_attention import LatentAttention
    from megacore.models.lightning_attention import LightningAttention
    from megacore.models.recurrent_unit import RecurrentUnit
    from megacore.models.short_convolution import ShortConvolution
    from megacore.models.state_space import SelectiveScan, StateSpace
    from megacore.parallel.kernels.scoring import Scoring
    from megacore.parallel.layers.norm import RMSNorm, SplitRMSNorm

    kind, weight = name.rpartition(".")[2], parameters.get(f"{name}.norm.weight")
    if kind == "short":
        return ShortConvolution(parameters, name)
    if kind == "lru":
        return RecurrentUnit(parameters, name, ACTIVATIONS[anatomy.activation])
    if kind == "delta":
        assert weight is not None  # of each head's outputs
        of_head = RMSNorm.of(weight, anatomy.delta_norm_eps or anatomy.norm_eps, parameters.mesh)
        activation, share = ACTIVATIONS[anatomy.activation], anatomy.delta_share
        return GatedDeltaRule(parameters, name, activation, anatomy.delta_gate, of_head, share, anatomy.delta_least)
    if kind == "lightning":
        assert weight is not None  # of all heads' outputs
        of_all = SplitRMSNorm(weight, anatomy.delta_norm_eps or anatomy.norm_eps, parameters.mesh)
        depth = layer / (len(anatomy.layers) - 1 + 1e-5)
        return LightningAttention(parameters, name, ACTIVATIONS[anatomy.activation], of_all, depth)
    if f"{name}.select.weight" in parameters:
        normed = [f"{name}.{each}_norm" for each in ("dt", "b", "c")]
        there = f"{normed[0]}.weight" in parameters or "ssm.dt_norm" in anatomy.plain_norms
        norms = [norm(anatomy, parameters, each, anatomy.latent_norm_eps) for each in normed] if there else None
        return SelectiveScan(parameters, name, ACTIVATIONS[anatomy.activation], norms)
    if kind == "ssm":
        groups = parameters.layout.schema.sizes["state_groups"]
        eps = anatomy.delta_norm_eps or anatomy.norm_eps
        of_inner = None if weight is None else SplitRMSNorm(weight, eps, parameters.mesh, groups)
        activation = ACTIVATIONS[anatomy.mixer_activation or anatomy.activation]
        factors = anatomy.factors.get(kind, Factors()).inner
        return StateSpace(parameters, name, activation, of_inner, anatomy.step_limits, factors)
    own = anatomy.layers[layer]
    looks = None if own.window is None and anatomy.both_ways == "images in windows" else anatomy.both_ways
    scoring = Scoring(
        scale=anatomy.attention_scale,
        window=own.window,
        chunk=own.chunk,
        softcap=anatomy.attention_softcap,
        sinks=parameters.get(f"{name}.sinks"),
        dropout=anatomy.attention_dropout,
        both_ways=None if looks is None else "anywhere" if looks == "prompts" else "in the window",
    )
    if f"{name}.kv_a.weight" in parameters:
        of_latent = partial(norm, anatomy, parameters, eps=anatomy.latent_norm_eps)
        encoding = encode(anatomy, parameters, layer, name)
        scale = anatomy.latent_scale
        return LatentAttention(parameters, name, layer, own, scoring, of_latent, encoding, scale)
    if own.keys is not None:
        source = f"layers.{own.keys}.{kind}"
        return SharedKeysAttention(
            parameters, name, own.rope, scoring, source, norm(anatomy, parameters, f"{name}.q_norm")
        )
    if f"{name}.kv.weight" in parameters:
        of_queries = norm(anatomy, parameters, f"{name}.q_norm")
        return CompressedAttention(
            parameters, name, layer, own, scoring, partial(norm, anatomy, parameters), of_queries
        )
    normed = ["q_norm", "k_norm", *(["v_norm"] if "attn.v_norm" in anatomy.plain_norms else [])]
    norms = (
        [norm(anatomy, parameters, f"{name}.{each}") for each in normed]
        if f"{name}.q_norm.weight" in parameters or ("attn.q_norm" in anatomy.plain_norms and own.plain_norms)
        else None
    )
    how = norms, anatomy.qkv_limit, anatomy.norms_after_rope, encode(anatomy, parameters, layer, name)
    shares = any(each.keys == layer for each in anatomy.layers)
    return MultiHeadAttention(parameters, name, own.rope, scoring, *how, shares=shares, gate=anatomy.attention_gate)


def encode(anatomy: Anatomy, parameters: Parameters, layer: int, name: str) -> Encoding | None:
    """What positions do to the queries and keys of a layer, whose attention has this name, beside rotating them."""
    from megacore.models.positions import Distances, Tempered, slopes

    temperature, alibi = anatomy.layers[layer].temperature, anatomy.alibi
    if temperature is not None:
        return Tempered(temperature)
    if alibi is None:
        return None
    shard, tp = parameters.shards[f"{name}.out.weight"], parameters.mesh.tp
    assert anatomy.attention_scale is not None  # heads are wider than what it would follow from
    own = slopes(alibi, shard.sizes["heads"] * tp.size).chunk(tp.size)[tp.index]
    factors = own.double() / anatomy.attention_scale
    return Distances(factors.to(parameters.mesh.device))


def feed(anatomy: Anatomy, parameters: Parameters, layer: int, name: str) -> nn.Module:
    """Return the feed-forward network of a layer, of this name, or its experts where it has a router."""
    from megacore.models.blocks import FeedForward
    from megacore.models.moe import NORMED, MixtureOfExperts

    if f"{name}.router.weight" not in parameters:
        factors, cut = anatomy.factors.get("mlp", Factors()).inner, anatomy.cut[layer] if anatomy.cut else 0.0
        return FeedForward(parameters, name, anatomy.activation, factors, cut)
    assert anatomy.routing is not None  # whose table declares routers
    normed = (each for each in NORMED if f"{name}.{each}_norm.weight" in parameters)
    norms = {each: norm(anatomy, parameters, f"{name}.{each}_norm") for each in normed}
    return MixtureOfExperts(parameters, name, layer, anatomy.routing, anatomy.activation, norms)


def norm(anatomy: Anatomy, parameters: Parameters, name: str, eps: float | None = None) -> nn.Module:
    """Return the norm of ``name.weight`` and, where it is declared, ``name.bias``; ``eps`` where it is not that of all
    norms.

    One that has no weight is of ``anatomy.plain_norms``. One whose weights are those of ``(heads head)`` in one
    dimension is taken over the heads of all tp ranks.
    """
    from megacore.parallel.layers.norm import LayerNorm, PlainNorm, RMSNorm, SplitRMSNorm

    eps = anatomy.norm_eps if eps is None else eps
    if f"{name}.weight" not in parameters:
        return PlainNorm(anatomy.norm, eps)
    mesh, weight = parameters.mesh, parameters[f"{name}.weight"]
    sentence = parameters.shards[f"{name}.weight"].param.sentence
    if len(sentence.dims) == 1 < len(sentence.axes) and not sentence.axes.isdisjoint(parameters.layout.split):
        return SplitRMSNorm(weight, eps, mesh)
    if anatomy.norm == "rms":
        return RMSNorm.of(weight, eps, mesh, anatomy.norm_offset)
    return LayerNorm.of(weight, parameters.get(f"{name}.bias"), eps, mesh, anatomy.norm_offset)
