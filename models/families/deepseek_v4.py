"""DeepSeek-V4 (DeepSeek-AI 2026): attention to a window and to blocks of tokens that are one key each, of which an
indexer may choose, several residual streams, and first layers whose tokens' experts are listed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megacore.models import rope_config
from megacore.models.anatomy import SLIDING, Anatomy, LayerAttention, Streams
from megacore.models.config import positive
from megacore.models.experts_config import MoEConfig
from megacore.models.layer_types import kind_problems, window_problems
from megacore.models.presets import EXPERTS
from megacore.models.rope_config import Convention, DefaultRope, DynamicRope, LongRope, Rope
from megacore.models.weight_rows import Pairs, Rows, Table, around, in_layers
from megacore.parallel import limits
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
"""The kinds of layers whose tokens look at blocks: of few tokens, which an indexer chooses, and of many."""
HASH, MOE = "hash_moe", "moe"
_RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
_OF_RATIOS = {"0": SLIDING, "4": SPARSE, "128": HEAVY}
_LEGACY = "compress_ratios", "num_hash_layers", "qk_rope_head_dim", "compress_rates"
_MAIN, _COMPRESS = "main", "compress"
_ROPE_KEYS = "rope_parameters", "rope_scaling", "rope_theta", "compress_rope_theta", "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(MoEConfig):
    """Fields carry their Hugging Face names, but for the rope of blocks and what ``compress_rates`` and
    ``moe_intermediate_size`` say."""

    family = "deepseek_v4"
    architecture = "DeepseekV4ForCausalLM"
    tied = ("model.embed_tokens.weight", "head.weight")
    base_names = {
        "model.embed_tokens.weight": "embed.weight",
        **{f"model.hc_head.hc_{each}": f"hc_head_{each}" for each in ("fn", "base", "scale")},
    }
    parts = around("attn_norm", "ffn_norm")
    reads = frozenset({*_LEGACY, *_ROPE_KEYS})
    derived = frozenset(_RATES.values())  # which compress_rates says
    further = ("mtp.",)
    harmless = MoEConfig.harmless | {"num_nextn_predict_layers", "router_jitter_noise"}
    fixed = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    defaults = {"num_key_value_heads": 1, "head_dim": 512}
    saved = {"intermediate_size": "moe_intermediate_size"}
    axes = {
        **{axis: each for axis, each in MoEConfig.axes.items() if axis != "kv"},
        "experts": "n_routed_experts",
        "shared_mlp": "intermediate_size",
        "q_latent": "q_lora_rank",
        "groups": "o_groups",
        "o_latent": "o_lora_rank",
        "index_heads": "index_n_heads",
        "streams": "hc_mult",
        "rate": "compress_rate_hca",
        "index_rate": "compress_rate_csa",
        "words": "vocab_size",
        "choices": "num_experts_per_tok",
    }
    rope_kinds = {
        _MAIN: Convention(partial_rotary_factor=1.0, pairs=True, scaled=False),
        _COMPRESS: Convention(
            rope_theta=160000.0, partial_rotary_factor=1.0, pairs=True, theta_key="compress_rope_theta"
        ),
    }
    rule = {"score": "sqrtsoftplus", "normalised": True, "epsilon": 1e-20}
    constants = {"activation": "swiglu_limited", "plain_norms": frozenset({"attn.q_norm"})}

    q_lora_rank: int = 1024
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-6
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    compress_rate_csa: int = 4
    compress_rate_hca: int = 128
    compress_rope: Rope = field(default_factory=DefaultRope)
    # None becomes two layers of many tokens to a block, and from there on every other one; three with a table.
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.fill_in("layer_types", lambda layer: SPARSE if layer > 1 and layer % 2 else HEAVY)
        self.fill_in("mlp_layer_types", lambda layer: HASH if layer < 3 else MOE)
        super().__post_init__()

    @property
    def ropes(self) -> dict[str, Rope]:
        """The rope of layers that look at no blocks, and that of the others."""
        return {_MAIN: self.rope_parameters, _COMPRESS: self.compress_rope}

    @property
    def turning(self) -> int:
        """The dimensions of a head that turn, the last ones on disk."""
        return self.rope_parameters.turning(self.head_dim)

    @property
    def sizes(self) -> Mapping[str, int]:
        halves = Pairs(self.head_dim, self.turning).sizes
        streams, each = self.hc_mult, self.num_attention_heads // max(self.o_groups, 1)
        mixes = {"mixes": (2 + streams) * streams, "into": streams, "three": 3}
        return {**super().sizes, **halves, **mixes, "each": each, "index_rest": self.index_head_dim - self.turning}

    @property
    def routing(self) -> Routing:
        return replace(super().routing, factor=self.routed_scaling_factor)

    def layers_of(self, kind: str) -> list[int]:
        """Return the layers whose attention, or whose network, is of a kind."""
        both = zip(self.layer_types or (), self.mlp_layer_types or (), strict=False)
        return [layer for layer, kinds in enumerate(both) if kind in kinds]

    def anatomy_of(self, **own: Any) -> Anatomy:
        looks = {
            SLIDING: LayerAttention(_MAIN, self.sliding_window),
            HEAVY: LayerAttention(_COMPRESS, self.sliding_window, block=self.compress_rate_hca),
            SPARSE: LayerAttention(_COMPRESS, self.sliding_window, block=self.compress_rate_csa, top=self.index_topk),
        }
        layers = tuple(looks[kind] for kind in self.layer_types or ())
        streams = Streams(self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps)
        return super().anatomy_of(**({"layers": layers, "ropes": self.ropes, "streams": streams} | own))

    def mixer(self, t: Table) -> Rows:
        here, stored = _head("rest")
        out = f"(groups o_latent) (each {here})"
        return (
            *_around(t, "attn"),
            *t.linear("attn.q_a", "q_latent", "embed", "attn.wq_a"),
            *t.norm("attn.q_a_norm", "attn.q_norm", "q_latent"),
            *t.linear("attn.q_b", f"(heads {here})", "q_latent", "attn.wq_b", stored=f"(heads {stored}) q_latent"),
            *t.linear("attn.kv", here, "embed", "attn.wkv", stored=f"{stored} embed"),
            *t.norm("attn.kv_norm", "attn.norm", here, stored=stored),
            t.row("attn.sinks", "heads", "attn.attn_sink"),
            *in_layers(self.layers_of(HEAVY), _blocks(t, "attn.blocks", "attn.compressor", "rate", "rest", False)),
            *in_layers(self.layers_of(SPARSE), self.indexed(t)),
            t.row("attn.grouped", out, "attn.wo_a.weight", out.replace(here, stored), std=t.std),
            *t.linear("attn.out", "embed", "(groups o_latent)", "attn.wo_b", ends=True),
        )

    def indexed(self, t: Table) -> Rows:
        """Return the rows of the blocks that an indexer chooses of, and its own."""
        here, stored = _head("index_rest")
        indexer, of_queries = "attn.indexer", f"(index_heads {stored}) q_latent"
        return (
            *_blocks(t, "attn.overlapping", "attn.compressor", "index_rate", "rest", True),
            *_blocks(t, "attn.index", f"{indexer}.compressor", "index_rate", "index_rest", True),
            *t.linear("attn.index.q", f"(index_heads {here})", "q_latent", f"{indexer}.wq_b", stored=of_queries),
            *t.linear("attn.index.weights", "index_heads", "embed", f"{indexer}.weights_proj"),
        )

    def network(self, t: Table) -> Rows:
        still: dict[str, Any] = {"buffer": True, "vector": True}
        table = t.row("mlp.router.table", "words choices", "ffn.gate.tid2eid", below=self.n_routed_experts, **still)
        correction = t.row("mlp.router.correction", "routes", "ffn.gate.bias", **still)
        of = "ffn.experts.{experts}"
        return (
            *_around(t, "mlp"),
            *t.experts(hf=f"{of}.{{w1,w3}}", down=f"{of}.w2", router="ffn.gate"),
            *in_layers(self.layers_of(HASH), (table,)),
            *in_layers(self.layers_of(MOE), (correction,)),
            *t.shared_expert("ffn.shared_experts", up="{w1,w3}", down="w2"),
        )

    def params(self) -> tuple[Param, ...]:
        ours, theirs = "last_streams.{}".format, "model.hc_head.hc_{}".format
        return (
            *super().params(),
            Param(ours("mixes"), "into (streams embed)", theirs("fn"), at="last", std=self.initializer_range),
            Param(ours("base"), "into", theirs("base"), at="last"),
            Param(ours("scale"), "one", theirs("scale"), at="last", mean=1.0),
        )

    def problems(self) -> list[str]:
        found = super().problems() + window_problems(self.sliding_window)
        found += positive(self, "index_topk", "hc_sinkhorn_iters")
        if self.layer_types is None or self.mlp_layer_types is None:  # there are too many layers
            return found
        layers, heads, groups = self.num_hidden_layers, self.num_attention_heads, self.o_groups
        found += kind_problems("layer_types", self.layer_types, layers, (SLIDING, SPARSE, HEAVY))
        found += kind_problems("mlp_layer_types", self.mlp_layer_types, layers, (HASH, MOE))
        if groups > 0 and heads % groups:
            found.append(f"num_attention_heads ({heads}) is not a multiple of o_groups ({groups})")
        return found

    def rope_problems(self) -> list[str]:
        head, ropes = self.head_dim, self.ropes.items()
        found = [f"{kind}: {each}" for kind, rope in ropes for each in rope.problems(head) or rope.odd_part(head)]
        found += [
            f"{kind}: rope_type is {rope.rope_type!r}, which goes by the length of a sequence, and blocks have none"
            for kind, rope in ropes
            if isinstance(rope, DynamicRope | LongRope)
        ]
        if found:
            return found
        turning = self.turning
        if self.compress_rope.turning(head) != turning:
            parts = " and ".join(f"{rope.partial_rotary_factor} of {kind}" for kind, rope in ropes)
            found.append(f"partial_rotary_factor is {parts}: one part of a head turns in all layers")
        small = {name: getattr(self, name) for name in ("head_dim", "index_head_dim")}
        part = f"it must be above {turning}, the part of a head that turns"
        return found + [f"{name} is {size}: {part}" for name, size in small.items() if size <= turning]

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            ropes = {"rope_parameters": cls._nested(base)}
        except ValueError:
            return {**base, **fields}
        kept = {name: value for name, value in base.items() if name not in _ROPE_KEYS}
        return rope_config.override_by_kind(kept | ropes, fields, cls.rope_kinds)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        said, problems, rates = dict(config), list[str](), config.get("compress_rates")
        ratios, tables, layers = (config.get(n) for n in ("compress_ratios", "num_hash_layers", "num_hidden_layers"))
        if isinstance(rates, Mapping) and rates.keys() <= _RATES.keys():
            said |= {_RATES[kind]: rate for kind, rate in rates.items() if config.get(_RATES[kind]) is None}
        elif rates is not None:
            problems.append(f"compress_rates is {rates!r}: it may say {' and '.join(_RATES)}")
        few = isinstance(layers, int) and layers <= limits.LAYERS
        if few and config.get("layer_types") is None and isinstance(ratios, list):
            # Of layers that predict further tokens there are some more.
            said["layer_types"] = [_OF_RATIOS.get(str(ratio), f"compress_ratios {ratio}") for ratio in ratios[:layers]]
        if few and config.get("mlp_layer_types") is None and isinstance(tables, int):
            said["mlp_layer_types"] = [HASH if layer < tables else MOE for layer in range(layers or 0)]
        values, wrong = super()._read(said)
        return values, problems + wrong

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        nested = cls._nested(config)
        length = {"max_position_embeddings": config.get("max_position_embeddings")}
        found = rope_config.by_kind({"rope_parameters": nested, **length}, cls.rope_kinds)
        return {"rope_parameters": found[_MAIN], "compress_rope": found[_COMPRESS]}

    @classmethod
    def _nested(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ropes of a file, nested by kind: of flat ones the type and its numbers are of blocks alone."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"rope_parameters is {given!r}: it must be a mapping of {_MAIN} and {_COMPRESS}, or null")
        if isinstance(given.get(_MAIN), Mapping) and isinstance(given.get(_COMPRESS), Mapping):
            return {kind: given[kind] for kind in (_MAIN, _COMPRESS)}
        factor, turning, head = (config.get(n) for n in ("partial_rotary_factor", "qk_rope_head_dim", "head_dim"))
        if factor is None:
            sized = isinstance(turning, int) and isinstance(head, int) and head > 0
            factor = rope_config.partial_rotary_factor(turning or 0, head or 1) if sized else 64 / 512
        compress = {name: value for name, value in given.items() if name not in (_MAIN, _COMPRESS)}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
        return {
            kind: {
                **(compress if kind == _COMPRESS else {}),
                "rope_theta": config.get(convention.theta_key) or convention.rope_theta,
                "partial_rotary_factor": factor,
            }
            for kind, convention in cls.rope_kinds.items()
        }

    def _write(self) -> dict[str, Any]:
        plain = {name: value for name, value in super()._write().items() if name != "compress_rope"}
        said = rope_config.by_kind_to_hugging_face(self.ropes, self.rope_kinds)
        # Which transformers counts by where it makes nothing of it.
        part = {"partial_rotary_factor": self.rope_parameters.partial_rotary_factor}
        return plain | part | said | {"compress_rates": {kind: getattr(self, name) for kind, name in _RATES.items()}}


def _head(rest: str) -> tuple[str, str]:
    """Return the sentence of a head, here, where the part that turns comes first, and on disk, where it is last."""
    return f"(turn: two half + still: {rest})", f"(still: {rest} + turn: half two)"


def _blocks(t: Table, name: str, hf: str, rate: str, rest: str, overlapping: bool) -> Rows:
    """Return what makes vectors of blocks of so many tokens, of which each may have a part in two."""
    of_one = _head(rest)
    here, stored = (f"(next: {head} + own: {head})" if overlapping else head for head in of_one)
    return (
        *t.linear(f"{name}.kv", here, "embed", f"{hf}.wkv", stored=f"{stored} embed"),
        *t.linear(f"{name}.gate", here, "embed", f"{hf}.wgate", stored=f"{stored} embed"),
        t.row(f"{name}.places", f"{rate} {here}", f"{hf}.ape", f"{rate} {stored}", vector=True),
        *t.norm(f"{name}.norm", f"{hf}.norm", of_one[0], stored=of_one[1]),
    )


def _around(t: Table, branch: str) -> Rows:
    """Return the streams around a branch."""
    name, hf = f"{branch}_streams", f"hc_{'ffn' if branch == 'mlp' else branch}"
    return (
        t.row(f"{name}.mixes", "mixes (streams embed)", f"{hf}_fn", std=t.std),
        t.row(f"{name}.base", "mixes", f"{hf}_base"),
        t.row(f"{name}.scale", "three", f"{hf}_scale", mean=1.0),
    )


PRESETS = {
    "deepseek_v4-tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
    | {"head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16}
    | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32, "sliding_window": 64, "num_hash_layers": 1}
    | EXPERTS
    | {"compress_rates": {SPARSE: 4, HEAVY: 32}, "max_position_embeddings": 512},
}
