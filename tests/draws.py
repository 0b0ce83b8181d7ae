"""The fields of random small models, drawn class by class: every choice that a family has, but no dropout.

What a class of configs adds to what its bases have drawn is its line of ``DRAWS``, by the name of the class: a function
of the :class:`Draw` so far. Fields of which any of a few values will do stand in ``CHOICES``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from megacore.models.anatomy import ACTIVATIONS, CHUNKED, CONVOLUTION, FULL, LINEAR, SLIDING
from megacore.models.config import ModelConfig
from megacore.models.families.deepseek_v4 import HASH, HEAVY, MOE, SPARSE
from megacore.models.rope_config import PLAIN, ROPE_TYPES, Convention, Kinds, partial_rotary_factor

Fields = dict[str, Any]
TANH = "gelu_pytorch_tanh"
ACTIVATED = tuple(name for name in ACTIVATIONS if name != "swish")
"""The activations that are drawn: of two names of one, one."""
ABSENT = object()
"""The value of a field that the class does not take, whatever its bases have drawn."""


@dataclass
class Draw:
    """What is drawn so far of a model of a config, whose heads split over ``tp`` ranks, of which some may share keys
    and values."""

    config: Any
    rng: Random
    layers: int
    vocab: int
    positions: int
    tp: int
    fields: Fields = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def one(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def of_layers(self, *kinds: Any) -> list[Any]:
        """One of the kinds for each layer."""
        return [self.rng.choice(kinds) for _ in range(self.layers)]

    def may(self, probability: float = 0.5) -> bool:
        return self.rng.random() < probability

    @property
    def window(self) -> int:
        return int(self.one(2, 3, self.positions))

    @property
    def experts(self) -> int:
        return max(4, 2 * self.tp)  # as many as the ranks of the largest meshes

    @property
    def head(self) -> int:
        return int(self.fields.get("head_dim") or self["hidden_size"] // self["num_attention_heads"])

    def saved(self, fields: Fields) -> Fields:
        """Fields by the names that transformers saves them by."""
        return {self.config.saved.get(name, name): value for name, value in fields.items()}

    def rope(self, head: int, types: Sequence[str] | None = None) -> Fields:
        return draw_rope(self.rng, head, self.positions, self.config.rope_convention, types)


def draw(config: type[ModelConfig], rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> Fields:
    """Return Hugging Face's fields of a random small model."""
    drawing = Draw(config, rng, layers, vocab, positions, max(tp, CODEGEN_GROUPS if config.family == "codegen" else 1))
    for base in reversed(config.__mro__):
        if base.__name__ in DRAWS:
            made = {**drawing.fields, **DRAWS[base.__name__](drawing)}
            drawing.fields = {name: value for name, value in made.items() if value is not ABSENT}
    return drawing.fields


def decoder(d: Draw) -> Fields:
    config, tp, one = d.config, d.tp, d.one
    heads, head_dim = tp * one(1, 2, 3), one(4, 6, 8)
    shared = [kv for kv in (1, 2, 4) if heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)]
    bases = {base.__name__ for base in config.__mro__}
    given = (d.may(0.7) and "head_dim" not in config.derived) or "head_dim" in config.defaults
    # Where the head size is not given, it follows from the hidden size.
    given |= not bases.isdisjoint(NEED_HEAD_DIM) and bases.isdisjoint(NEED_NO_HEAD_DIM)
    drawn = {
        "vocab_size": d.vocab,
        "hidden_size": heads * (one(3, 5) if given else head_dim),
        "intermediate_size": one(14, 31),
        "num_hidden_layers": d.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": one(*shared, heads),
        **({"head_dim": head_dim} if given else {}),
        "max_position_embeddings": d.positions,
        "pad_token_id": one(None, 5, -1),
        "hidden_act": one(*ACTIVATED),
        **{each.name: d.may() for each in fields(config) if each.type in ("bool", bool)},
        **{each.name: one(1e-6, 1e-2) for each in fields(config) if "eps" in each.name},
        **{each.name: 0.0 for each in fields(config) if each.name.endswith(("dropout", "pdrop"))},
        "rope_parameters": d.rope(head_dim),
    }
    choices = ChainMap(*({**CHOICES[base.__name__]} for base in config.__mro__ if base.__name__ in CHOICES))
    drawn |= {name: one(*values) for name, values in choices.items()}
    return d.saved({name: drawn[name] for name in drawn if name not in {*config.derived, *config.fixed}})


NEED_HEAD_DIM = ("HunYuanDenseV1Config", "MinistralConfig", "MixtralConfig")
"""Whose class of transformers, or a rope of it, cannot do without head_dim; and which of those that inherit can."""
NEED_NO_HEAD_DIM = ("PhimoeConfig",)
CODEGEN_GROUPS = 4
BOUNDED = ("default", "linear", "llama3", "yarn")
"""The ropes that go by no sequence's length."""
STEADY = ("default", "linear", "llama3", "proportional")
"""The ropes of heads of several sizes: of the others transformers computes frequencies anew and forgets the size of the
heads, or has no place for all that they say."""

CHOICES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "DeltaConfig": {
        "linear_conv_kernel_dim": (2, 4),
        "linear_key_head_dim": (4, 6),
        "linear_value_head_dim": (3, 5),
    },
    "MoEConfig": {"num_experts_per_tok": (2, 3)},  # one alone of weight 1 would teach the router nothing
    "SparseConfig": {"moe_intermediate_size": (6,)},
    "SharedExpertConfig": {
        "moe_intermediate_size": (6, 11),
        "n_shared_experts": (1, 2),
        "routed_scaling_factor": (1.0, 2.5),
        "first_k_dense_replace": (0, 1),
    },
    "RotatingConfig": {"no_rope_layer_interval": (1, 2, 4)},
    "SelectiveScanConfig": {
        "mamba_d_state": (3, 5),
        "mamba_d_conv": (2, 4),
        "mamba_dt_rank": (2, 5, "auto"),
        "mamba_expand": (1, 2),
    },
    "StateSpaceConfig": {"mamba_d_head": ("auto",), "mamba_d_state": (3, 5), "mamba_d_conv": (2, 4)},
    "Zamba2Config": {"num_mem_blocks": (1, 2), "adapter_rank": (2, 5), "time_step_min": (0.001, 0.4)},
    "AriaTextConfig": {"moe_num_shared_experts": (1, 2)},
    "Cohere2MoeConfig": {
        "rms_norm_eps": (None, 1e-6, 1e-2),
        "expert_selection_fn": ("softmax", "sigmoid"),
        "shared_expert_combination_strategy": ("average", "sum"),
        "num_shared_experts": (0, 1, 2),
        "prefix_dense_intermediate_size": (None, 10, 13),
        "prefix_dense_sliding_window_pattern": (1, 2),
        "first_k_dense_replace": (0, 1),
        "sliding_window_pattern": (2, 4),
    },
    "CommandConfig": {"logit_scale": (0.0625, 1.3)},
    # Of few heads all are often 0, and transformers says nothing of equal scores.
    "DeepseekV32Config": {"index_n_heads": (14, 16), "index_topk": (2, 5, 40)},
    "DeepseekV4Config": {
        "q_lora_rank": (6, 9),
        "o_lora_rank": (2, 3),
        "index_n_heads": (14, 16),
        "index_topk": (2, 3, 40),
        "hc_mult": (2, 4),
        "hc_sinkhorn_iters": (1, 3),
        "routed_scaling_factor": (1.0, 2.5),
    },
    "Dots1Config": {"max_window_layers": (0, 1, 3)},
    "Ernie4_5MoeConfig": {
        "moe_intermediate_size": (6, 11),
        "moe_num_shared_experts": (0, 1, 2),
        "moe_layer_start_index": (0, 1),
        "moe_layer_interval": (1, 2),
    },
    "FalconH1Config": {
        "mlp_multipliers": (None, [0.4, 1.3]),
        "ssm_multipliers": (None, [0.7, 1.4, 0.9, 1.2, 0.6]),
        "attention_in_multiplier": (1.0, 0.3, 1.7),
        "attention_out_multiplier": (1.0, 0.3, 1.7),
        "ssm_in_multiplier": (1.0, 0.3, 1.7),
        "ssm_out_multiplier": (1.0, 0.3, 1.7),
        "embedding_multiplier": (1.0, 0.3, 1.7),
        "lm_head_multiplier": (1.0, 0.3, 1.7),
        "key_multiplier": (1.0, 0.3, 1.7),
    },
    "FlintConfig": {"shared_expert_intermediate_size": (10, 13)},
    "GemmaConfig": {"hidden_act": ("gelu", TANH, "relu")},
    "Gemma2Config": {
        "hidden_activation": (TANH, "relu"),
        "query_pre_attn_scalar": (2, 7),
        "attn_logit_softcapping": (None, 3.0),
        "final_logit_softcapping": (None, 3.0),
    },
    "Gemma3nConfig": {"laurel_rank": (3, 5), "final_logit_softcapping": (3.0, 30.0)},
    "Gemma4Config": {
        "hidden_act": (TANH, "relu"),
        "global_head_dim": (4, 8),
        "num_global_key_value_heads": (None, 1),
        "final_logit_softcapping": (None, 3.0),
        "use_bidirectional_attention": (None, "vision"),
        "top_k_experts": (2, 3),
        "moe_intermediate_size": (6, 11),
    },
    "GptNeoxJapaneseConfig": {"intermediate_multiple_size": (2, 4)},
    "GptNeoConfig": {"intermediate_size": (None, 14, 31)},
    "ModernBertDecoderConfig": {"classifier_activation": ACTIVATED, "pad_token_id": (5, -1)},
    "Multipliers": {
        "embedding_multiplier": (1.0, 12.0),
        "attention_multiplier": (1.0, 0.3),
        "residual_multiplier": (1.0, 0.22),
        "logits_scaling": (1.0, 7.0),
    },
    "GraniteMoeHybridConfig": {
        "num_experts_per_tok": (2, 3),
        "shared_intermediate_size": (10, 13),
        "position_embedding_type": (None, "nope", "rope"),
    },
    "GraniteMoeSharedConfig": {"shared_intermediate_size": (0, 10, 13)},
    "HyperCLOVAXConfig": {"attention_multiplier": (None, 0.3)},
    "KimiLinearConfig": {"linear_head_dim": (4, 6), "linear_conv_kernel_dim": (2, 4)},
    "ShortConvolutionConfig": {"conv_L_cache": (2, 3)},
    "Kolibri1Config": {"moe_intermediate_size": (6, 11), "shared_expert_intermediate_size": (10, 13)},
    "LagunaConfig": {
        "moe_intermediate_size": (6, 11),
        "shared_expert_intermediate_size": (10, 13),
        "moe_routed_scaling_factor": (1.0, 2.5),
    },
    "Lfm3Config": {"conv_L_cache": (2, 3)},
    "Lfm2Config": {"block_multiple_of": (1, 8), "block_ffn_dim_multiplier": (1.0, 1.3)},
    "Lfm2MoeConfig": {"moe_intermediate_size": (6, 11), "routed_scaling_factor": (1.0, 2.5)},
    "Llama4Config": {
        "num_experts_per_tok": (1, 2),
        "intermediate_size_mlp": (14, 31),
        "interleave_moe_layer_step": (1, 2),
        "floor_scale": (2, 3, 8192),
    },
    "LongcatFlashConfig": {
        "moe_intermediate_size": (6, 11),
        "zero_expert_num": (0, 2, 5),
        "routed_scaling_factor": (1.0, 2.5),
    },
    "MellumConfig": {"moe_intermediate_size": (6, 11)},
    "MiniMaxConfig": {
        f"{each}_factor": (1.0, 0.6, 1.7)
        for each in (
            "full_attn_alpha",
            "full_attn_beta",
            "linear_attn_alpha",
            "linear_attn_beta",
            "mlp_alpha",
            "mlp_beta",
        )
    },
    "MiniCPM3Config": {"scale_emb": (1, 12.0), "scale_depth": (None, 1.4), "dim_model_base": (None, 7)},
    "NemotronHConfig": {
        "mamba_d_head": (4, 6),
        "mamba_hidden_act": ("silu", "gelu", "relu"),  # squares of so small numbers teach nothing
        "time_step_min": (0.001, 0.3),
        "num_experts_per_tok": (2, 3),
        "moe_intermediate_size": (6, 11),
        "moe_shared_expert_intermediate_size": (10, 13),
        "routed_scaling_factor": (1.0, 2.5),
    },
    "OlmoConfig": {"clip_qkv": (None, 0.3, 1.2)},
    "OlmoeConfig": {"clip_qkv": (None, 0.3, 1.2)},
    "OpenAiGptConfig": {"hidden_act": ("gelu", "relu", "silu")},
    "PhimoeConfig": {"router_jitter_noise": (0.4, 0.7)},
    "RecurrentGemmaConfig": {"conv1d_width": (2, 4), "logits_soft_cap": (30.0, 3.0)},
    "Qwen2MoeConfig": {"shared_expert_intermediate_size": (10, 13)},
    "Qwen3_5MoeConfig": {"moe_intermediate_size": (6, 11), "shared_expert_intermediate_size": (10, 13)},
    "Qwen3NextConfig": {"shared_expert_intermediate_size": (10, 13)},
}


def draw_rope(
    rng: Random, head_dim: int, positions: int, convention: Convention = PLAIN, types: Sequence[str] | None = None
) -> Fields:
    """Return a config.json's ``rope_parameters`` at random: any of the types, for heads of this size."""
    whole = convention.partial_rotary_factor is None
    # Families that turn a part cut as wide a one from their heads, but proportional tables are as wide as these.
    rope_type = rng.choice(types or [name for name in ROPE_TYPES if whole or name != "proportional"])
    original = rng.choice((8, positions))
    part: Fields = {}
    turning = head_dim
    if not whole:
        # Dynamic divides by the number of dimensions less 2.
        turning = rng.choice(range(4 if rope_type == "dynamic" else 2, head_dim + 1, 2))
        part = {"partial_rotary_factor": partial_rotary_factor(turning, head_dim)}
    own: dict[str, Fields] = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 3.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": original, "truncate": rng.random() < 0.5},
        "longrope": {
            "short_factor": [rng.uniform(1, 3) for _ in range(turning // 2)],
            "long_factor": [rng.uniform(1, 30) for _ in range(turning // 2)],
            "original_max_position_embeddings": original,
            "factor": 2.0,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }
    return {"rope_type": rope_type, "rope_theta": rng.choice((10.0, 1e4)), **own.get(rope_type, {}), **part}


def draw_ropes(
    rng: Random, heads: Mapping[str, int], positions: int, kinds: Kinds, types: Sequence[str] | None = None
) -> Fields:
    """Return a config.json's ``rope_parameters`` at random, nested by kind of layer, for ``heads`` of these sizes."""
    nested = {kind: draw_rope(rng, heads[kind], positions, each, types) for kind, each in kinds.items()}
    for drawn in nested.values():
        drawn.pop("truncate", None)  # transformers 5.23 does not look for it in there
    return nested


def local_ropes(d: Draw) -> Fields:
    kinds = d.config.rope_kinds
    return {"rope_parameters": draw_ropes(d.rng, dict.fromkeys(kinds, d.head), d.positions, kinds)}


def ropes_of_sizes(d: Draw) -> Fields:
    heads = {kind: d[d.config.axes[axis]] for kind, axis in ((FULL, "head"), (SLIDING, "local_head"))}
    return {"rope_parameters": draw_ropes(d.rng, heads, d.positions, d.config.rope_kinds, STEADY)}


def groups(d: Draw, fields: Fields | None = None) -> Fields:
    """Groups of the experts that were drawn, two to a group at least."""
    drawn, saved = {**d.fields, **(fields or {})}, d.config.saved
    experts, chosen = (drawn[saved.get(name, name)] for name in ("n_routed_experts", "num_experts_per_tok"))
    fitting = [(n, kept) for n, kept in ((1, 1), (2, 1), (2, 2), (4, 2)) if 2 * n <= experts]
    number, kept = d.one(*((n, kept) for n, kept in fitting if kept * (experts // n) >= chosen))
    return {"n_group": number, "topk_group": kept}


def sparse(d: Draw) -> Fields:
    step = d.rng.randint(1, min(2, d.layers))
    dense = [layer for layer in range(step, d.layers) if d.may(0.3)]  # of those before, the last has experts
    return {"decoder_sparse_step": step, "mlp_only_layers": dense}


def latent(d: Draw) -> Fields:
    still, rotary = d.one(2, 6), d.one(4, 6, 8)
    turns = d.rope(rotary)
    if turns["rope_type"] == "yarn":
        # Of which the first is of the rotation, and the second of the scores as well.
        turns |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": d.one(0.7, 1.3)}
    return {
        "num_key_value_heads": d["num_attention_heads"],
        "q_lora_rank": d.one(None, 6, 9),
        "kv_lora_rank": d.one(6, 8),
        "qk_nope_head_dim": still,
        "qk_rope_head_dim": rotary,
        "v_head_dim": d.one(3, 5, still + rotary),
        "rope_parameters": turns,
    }


def windowed(d: Draw) -> Fields:
    kinds = d.of_layers(FULL, SLIDING)
    return {"sliding_window": d.window, "layer_types": d.one(None, kinds)}


def rotating(d: Draw) -> Fields:
    rotate = d.of_layers(0, 1)
    return {"no_rope_layers": d.one(None, rotate)}


def hybrid(d: Draw) -> Fields:
    other = d.config.other
    kinds = d.of_layers(FULL, other, other)
    kinds[d.rng.randrange(d.layers)] = FULL  # transformers' cache asks one that attends how many tokens there are
    return {"layer_types": kinds}


def delta(d: Draw) -> Fields:
    keys = d.tp * d.one(1, 2)
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * d.one(1, 2, 3)}
    return heads | ({"layer_types": None} if d.layers > 3 and d.may() else {})


def state_space(d: Draw) -> Fields:
    expand, tp = d.one(1, 2), d.tp
    heads = d.one(*(n for n in (tp, 2 * tp, 4 * tp) if expand * d["hidden_size"] % n == 0))
    # Groups of heads, which tp splits or shares.
    fitting = (n for n in (1, 2, 4, heads) if heads % n == 0 and (n % tp == 0 or tp % n == 0))
    own = {"mamba_n_heads": heads, "mamba_n_groups": d.one(*fitting), "mamba_expand": expand}
    return d.saved(own | d.one({}, {"time_step_limit": (0.3, 1.5)}))


def mamba2(d: Draw) -> Fields:
    fields, heads = d.fields, d["num_heads"]
    return {"head_dim": fields["expand"] * d["hidden_size"] // heads}


def jamba(d: Draw) -> Fields:
    made: Fields = {"layer_types": ABSENT, "num_experts": d.one(1, d.experts, d.experts)}
    for kind in ("attn", "expert"):
        period = d.one(1, 2, 3)
        made |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": d.rng.randrange(period)}
    return made


def falcon(d: Draw) -> Fields:
    new, parallel, heads = d.may(), d.may(0.7), d["num_attention_heads"]
    return {
        "activation": d.one(*ACTIVATED),
        "ffn_hidden_size": d.one(None, 14, 31),
        "num_kv_heads": d.one(*(n for n in range(d.tp, heads + 1, d.tp) if heads % n == 0)) if new else None,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": d.one(None, 1, 2) if new else None,
        "parallel_attn": new or parallel,
    }


def falcon_h1(d: Draw) -> Fields:
    inner = d["mamba_n_heads"] * d.one(3, 4)
    own = {"mamba_d_ssm": d.one(None, inner), "mamba_norm_before_gate": not d["mamba_rms_norm"]}
    return own | {"layer_types": ABSENT}


def layer_inputs(d: Draw) -> Fields:
    """Tables of each layer's own, and layers that share keys and values, which no pipeline of more layers may part."""
    shared = d.one(0, *range(d.layers)) if d.layers <= 3 else 0
    own = [d.one(FULL, SLIDING) for _ in range(d.layers - shared - 1)]
    own.insert(d.rng.randint(0, len(own)) if shared else len(own), FULL)  # the last layer is one of these
    return {
        "layer_types": own + [d.one(*own) for _ in range(shared - 1)] + [FULL] * (shared > 0),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": d.one(4, 7),
        "vocab_size_per_layer_input": d.vocab,
    }


def gemma4(d: Draw) -> Fields:
    # Layers that share keys and values and are told nothing, the class cannot run.
    told = d.one({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, {}, {})
    wide = {} if d.fields.get("enable_moe_block") else {"use_double_wide_mlp": d.may(0.7)}
    return {"num_experts": d.experts, "use_double_wide_mlp": False, **layer_inputs(d), **told, **wide}


def gemma3n(d: Draw) -> Fields:
    streams = d.one(2, 3)
    return layer_inputs(d) | {
        "altup_num_inputs": streams,
        "altup_active_idx": d.rng.randrange(streams),
        "activation_sparsity_pattern": d.one(None, d.of_layers(0.0, 0.3, 0.9)),
    }


def gpt2(d: Draw) -> Fields:
    heads = d.tp * d.one(1, 2, 3)
    return {
        "vocab_size": d.vocab,
        "n_positions": d.positions,
        "n_embd": heads * d.one(2, 3, 8),
        "n_layer": d.layers,
        "n_head": heads,
        "n_inner": d.one(None, 7, 40),
        "activation_function": d.one(*ACTIVATED),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "layer_norm_epsilon": d.one(1e-5, 1e-2),
        "pad_token_id": d.one(None, 5),
        "tie_word_embeddings": d.may(),
    }


def gptj(d: Draw) -> Fields:
    head = d.one(4, 6, 8)
    return {"n_embd": d["n_head"] * head, "rotary_dim": d.one(*range(2, head + 1, 2))}


def gpt_neo(d: Draw) -> Fields:
    kinds = [[[kind], 1] for kind in d.of_layers("global", "local")]
    return {"attention_types": kinds, "window_size": d.window}


def hunyuan(d: Draw) -> Fields:
    own = {"alpha": 7.0, "factor": 1.0} if d["rope_parameters"]["rope_type"] == "dynamic" else {}
    return {"rope_parameters": d["rope_parameters"] | own}


def kimi_linear(d: Draw) -> Fields:
    own = {"linear_num_heads": d.tp * d.one(1, 2), "tie_word_embeddings": False}
    return own | dict.fromkeys(d.config.derived, ABSENT)


def laguna(d: Draw) -> Fields:
    heads = d["num_attention_heads"]
    local = {"num_attention_heads_per_layer": d.one(None, d.of_layers(heads, 2 * heads), d.of_layers(heads, 2 * heads))}
    return local | {"sliding_window": d.window, "gating": d.one(True, "per-head", "per-element")}


def lfm3(d: Draw) -> Fields:
    kinds = d.of_layers(CONVOLUTION, FULL, SLIDING)
    kinds[d.rng.randrange(d.layers)] = FULL  # whose cache tells how many tokens there are
    return {"layer_types": kinds}


def llama4(d: Draw) -> Fields:
    sparse = [layer for layer in range(d.layers) if d.may()]
    return {
        "moe_layers": d.one(None, sparse),
        "attention_chunk_size": d.one(2, 5, d.positions),
        "layer_types": d.one(None, d.of_layers(FULL, CHUNKED)),
    }


def mimo_v2_flash(d: Draw) -> Fields:
    tp, heads = d.tp, 2 * d["num_attention_heads"]
    fitting = [kv for kv in (1, 2, 4, heads // 2) if heads % (2 * kv) == 0 and (kv % tp == 0 or tp % (2 * kv) == 0)]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": d.one(*fitting),
        "v_head_dim": d.one(3, d["head_dim"]),
        "attention_value_scale": d.one(None, 0.7),
        "sliding_window": d.window,  # the class cannot do without
    }


def deepseek_v4(d: Draw) -> Fields:
    head, groups = d.one(6, 8), d["num_attention_heads"] // d.tp
    turning, kinds = d.one(2, 4), d.of_layers(SLIDING, SPARSE, HEAVY)
    kinds[d.rng.randrange(d.layers)] = SPARSE
    ropes = draw_ropes(d.rng, dict.fromkeys(d.config.rope_kinds, head), d.positions, d.config.rope_kinds, BOUNDED)
    for rope in ropes.values():  # one part of a head turns in all layers
        rope["partial_rotary_factor"] = partial_rotary_factor(turning, head)
    return {
        "head_dim": head,
        "index_head_dim": turning + d.one(2, 7),
        "o_groups": d.tp * d.one(*(n for n in (1, 2, 3) if groups % n == 0)),
        "sliding_window": d.window,
        "layer_types": d.one(None, kinds, kinds),
        "mlp_layer_types": d.one(None, d.of_layers(HASH, MOE)),
        "compress_rates": {SPARSE: d.one(2, 3), HEAVY: d.one(4, 5)},
        "rope_parameters": ropes,
        "partial_rotary_factor": partial_rotary_factor(turning, head),
    }


def tempered(d: Draw) -> Fields:
    latents = "qk_rope_head_dim" in d.fields
    turns = d.rope(d["qk_rope_head_dim"] if latents else d["head_dim"], ["yarn"])
    turns |= {"mscale": 0.7, "mscale_all_dim": d.one(0.7, 1.3)} if latents else {}
    return {"rope_parameters": turns | {"beta_fast": 32, "beta_slow": 1, "llama_4_scaling_beta": 0.5}}


def nemotron_h(d: Draw) -> Fields:
    attends, with_experts = d.rng.sample(range(d.layers), 2) if d.layers > 1 else (0, None)
    kinds = d.of_layers(LINEAR, LINEAR, FULL, "mlp", "moe")
    kinds = [FULL if n == attends else "moe" if n == with_experts else kind for n, kind in enumerate(kinds)]
    own = {"layers_block_type": kinds, "n_routed_experts": d.experts, "tie_word_embeddings": False}
    return own | groups(d, own) | {"layer_types": ABSENT, "time_step_limit": ABSENT}


def olmo_hybrid(d: Draw) -> Fields:
    layers = max(2, d.layers)  # the class takes both kinds
    kinds = [d.one(FULL, LINEAR, LINEAR) for _ in range(layers)]
    for kind, layer in zip((FULL, LINEAR), d.rng.sample(range(layers), 2), strict=True):
        kinds[layer] = kind
    still = {"rope_parameters": {"rope_type": "default", "rope_theta": None}} if d.may() else {}
    # transformers saves the convolutions of queries, keys and values in three equal parts.
    alike = {"linear_num_value_heads": d["linear_num_key_heads"], "linear_value_head_dim": d["linear_key_head_dim"]}
    return still | alike | {"num_hidden_layers": layers, "layer_types": d.one(kinds, kinds, None)}


def zamba2(d: Draw) -> Fields:
    kinds = d.of_layers(LINEAR, "hybrid", "hybrid")
    kinds[d.rng.randrange(d.layers)] = "hybrid"
    adapted, heads, hidden = d["use_shared_attention_adapter"], d["num_attention_heads"], d["hidden_size"]
    same = {"num_key_value_heads": heads} if adapted else {}
    head = {"attention_head_dim": ABSENT, "mamba_headdim": ABSENT, "rope_parameters": d.rope(2 * hidden // heads)}
    return {"layers_block_type": kinds, "layer_types": ABSENT, "time_step_limit": ABSENT, **same, **head}


def phimoe(d: Draw) -> Fields:
    head, kind = d["hidden_size"] // d["num_attention_heads"], d.one("default", "longrope")
    turns = d.rope(head, [kind])
    # Of longer sequences transformers 5.23 takes the wrong factors.
    own = {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 64}
    return {"rope_parameters": turns | (own if kind == "longrope" else {}), "head_dim": ABSENT}


def recurrent_gemma(d: Draw) -> Fields:
    head = d["hidden_size"] // d["num_attention_heads"]
    return {
        "attention_window_size": d.window,
        "block_types": d.one(["recurrent", "recurrent", "attention"], ["attention", "recurrent"], ["recurrent"]),
        "lru_width": d.one(None, 3 * d["num_attention_heads"]),
        "rope_parameters": d.rope(head, ["default"]),
    }


def used(probability: float) -> Callable[[Draw], Fields]:
    """Windows that a switch turns off."""

    def switch(d: Draw) -> Fields:
        on = d.may(probability)
        return {"use_sliding_window": on, "layer_types": d["layer_types"] if on else None}

    return switch


DRAWS: Mapping[str, Callable[[Draw], Fields]] = {
    "DecoderConfig": decoder,
    "DeltaConfig": delta,
    "HybridConfig": hybrid,
    "LatentConfig": latent,
    "LocalHeadsConfig": ropes_of_sizes,
    "LocalRopeConfig": local_ropes,
    "MoEConfig": lambda d: d.saved({d.config.axes["experts"]: d.experts}),
    "OneWindowConfig": lambda d: {"sliding_window": d.one(None, 2, 3, d.positions)},
    "RotatingConfig": rotating,
    "SigmoidConfig": groups,
    "SparseConfig": sparse,
    "StateSpaceConfig": state_space,
    "StatesAloneConfig": lambda d: {"layer_types": ABSENT},
    "TemperedConfig": tempered,
    "NamedLayersConfig": lambda d: {"mlp_layer_types": d.one(None, d.of_layers("dense", "sparse"))},
    "WindowedConfig": windowed,
    "AXK1Config": lambda d: {"q_lora_rank": d.one(6, 9)},
    "ApertusConfig": lambda d: {"hidden_act": d.one("xielu", "xielu", d["hidden_act"])},
    "BailingHybridConfig": lambda d: (
        dict.fromkeys(d.config.derived - {"head_dim"}, ABSENT)
        | {"head_dim": d.one(4, 6), "short_conv_kernel_size": d.one(2, 4), "kda_lower_bound": d.one(-5.0, -0.7)}
        | {"q_lora_rank": ABSENT, "tie_word_embeddings": False}
    ),
    "BambaConfig": lambda d: {
        "attn_layer_indices": [layer for layer, kind in enumerate(d["layer_types"]) if kind == FULL],
        "layer_types": ABSENT,
    },
    "DeepseekV2Config": lambda d: groups(d) | {"topk_method": d.one("greedy", "group_limited_greedy")},
    "DeepseekV4Config": deepseek_v4,
    "DeepseekV32Config": lambda d: {
        "q_lora_rank": d.one(6, 9),
        "index_head_dim": d["qk_rope_head_dim"] + d.one(2, 5),
    },
    "Ernie4_5MoeConfig": lambda d: {"moe_layer_end_index": d.one(-1, d.layers - 2)},
    "Exaone4Config": lambda d: {"sliding_window": None, "layer_types": [FULL] * d.layers} if d.may(0.3) else {},
    "ExaoneMoeConfig": lambda d: {"sliding_window": d.window},  # the class cannot do without
    "FalconConfig": falcon,
    "FalconH1Config": falcon_h1,
    "FlintConfig": lambda d: {"sliding_window": d.window},
    "Gemma3nConfig": gemma3n,
    "Gemma4Config": gemma4,
    "Gemma4UnifiedConfig": lambda d: dict.fromkeys(d.config.derived, ABSENT),
    "Gpt2Config": gpt2,
    "GptBigCodeConfig": lambda d: {"multi_query": d.may(0.7)},
    "GptNeoConfig": gpt_neo,
    "GptjConfig": gptj,
    "GraniteMoeHybridConfig": lambda d: {"num_local_experts": d.experts},
    "HeliumConfig": lambda d: {"hidden_size": d["num_attention_heads"] * d["head_dim"]},
    "HunYuanDenseV1Config": hunyuan,
    "InternLM3Config": lambda d: {"mlp_bias": d["attention_bias"]},
    "JambaConfig": jamba,
    "KimiLinearConfig": kimi_linear,
    "Kolibri1Config": lambda d: {"sliding_window": d.window} if d["sliding_window"] is None else {},
    "LagunaConfig": laguna,
    "Lfm2MoeConfig": lambda d: {"num_dense_layers": d.one(0, 1) * (d.layers > 1)},
    "Lfm3Config": lfm3,
    "Llama4Config": llama4,
    "LongcatFlashConfig": lambda d: {"q_lora_rank": d.one(6, 9), "head_dim": d["qk_rope_head_dim"]},
    "Mamba2Config": mamba2,
    "MambaConfig": lambda d: {"intermediate_size": d.one(ABSENT, 12 * d.tp)},
    "MimoV2FlashConfig": mimo_v2_flash,
    # transformers turns all of a head.
    "MiniMaxConfig": lambda d: {"rope_parameters": draw_rope(d.rng, d.head, d.positions)},
    "Mistral4Config": groups,
    "ModernBertDecoderConfig": lambda d: {"local_attention": d.one(4, 7)} | d.one({}, {"sliding_window": ABSENT}),
    "MptConfig": lambda d: {"attn_config": {"clip_qkv": d.one(None, 0.3), "softmax_scale": d.one(None, 0.2)}},
    "NemotronHConfig": nemotron_h,
    "OlmoHybridConfig": olmo_hybrid,
    "Phi3Config": lambda d: {
        "rope_parameters": d.rope(d["hidden_size"] // d["num_attention_heads"], ("default", "longrope"))
    },
    "PhimoeConfig": phimoe,
    "Qwen2Config": lambda d: used(0.7)(d) | {"max_window_layers": d.rng.randint(0, d.layers)},
    "Qwen3MoeConfig": lambda d: {"sliding_window": d.window},
    "RecurrentGemmaConfig": recurrent_gemma,
    "SmolLM3Config": used(0.5),
    "XglmConfig": lambda d: {"pad_token_id": d.one(None, 1, 5)},
    "Zamba2Config": zamba2,
    "SwashConfig": lambda d: {"layer_rope_theta": d.one(None, d.of_layers(0, 10.0, 1e4))},
}
"""{a class of configs: what it draws beside its bases}"""
