"""MPT (MosaicML 2023): no positions but slopes of heads (ALiBi), no biases, and a section of its own for attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Alibi, Anatomy
from megacore.models.config import above_zero, positive
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.weight_rows import QKV_EACH, around

_SECTION = "attn_config"
_FIXED: Mapping[str, Any] = {"alibi": True, "prefix_lm": False, "qk_ln": False, "attn_type": "multihead_attention"}
_READ = {"attn_pdrop": "attention_dropout"} | {n: n for n in ("clip_qkv", "softmax_scale", "alibi_bias_max")}


@dataclass(frozen=True, kw_only=True)
class MptConfig(NoRopeConfig):
    """``attn_config`` holds some of the fields there."""

    family = "mpt"
    architecture = "MptForCausalLM"
    reads = frozenset({_SECTION})
    eps = "layer_norm_epsilon"
    base_model_prefix = "transformer"
    tied = ("transformer.wte.weight", "lm_head.weight")
    # How weights were drawn, on which device and in which precision, and what the class does not read.
    harmless = frozenset(
        {"embedding_fraction", "emb_pdrop", "expansion_ratio", "init_config", "init_device", "norm_type", "verbose"}
        | {"resid_pdrop", "model_type", "pad_token_id", "logit_scale", "ffn_config", "learned_pos_emb"}
    )
    fixed = {"no_bias": True}
    derived = NoRopeConfig.derived | {"hidden_act", "intermediate_size", *_READ.values()}
    saved = {
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    layer = "transformer.blocks.{layer}"
    last_norm = "transformer.norm_f"
    constants = {"padding_idx": None}
    told = {"branch_dropout": "attention_dropout"}
    parts = around("norm_1", "norm_2")
    attention_rows = {"hf": "attn.Wqkv", "out": "attn.out_proj", "here": QKV_EACH}
    network_rows = ("ffn.up_proj", "ffn.down_proj")
    gated_network = False
    taken = {"hidden_act": "gelu"}
    mlp_ratio = 4

    hidden_act: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    alibi_bias_max: float = 8

    @property
    def anatomy(self) -> Anatomy:
        scale = self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        return self.anatomy_of(alibi=Alibi(self.alibi_bias_max), attention_scale=scale, qkv_limit=self.clip_qkv or None)

    def problems(self) -> list[str]:
        return super().problems() + positive(self, "alibi_bias_max") + above_zero(self, "softmax_scale")

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        section = config.get(_SECTION) or {}
        if not isinstance(section, Mapping):
            return {}, [f"{_SECTION} is {section!r}, not fields by name"]
        said = {_READ[name]: value for name, value in section.items() if name in _READ}
        # Whatever a file says of lengths by its usual name, the class does not read it.
        own = {name: value for name, value in config.items() if name != "max_position_embeddings"}
        values, problems = super()._read({**own, **said})
        return values, problems + [
            f"{_SECTION} has {name}={section[name]!r}, which is not supported: only {value!r} is"
            for name, value in _FIXED.items()
            if section.get(name, value) != value
        ]

    def _write(self) -> dict[str, Any]:
        section: dict[str, Any] = {theirs: getattr(self, ours) for theirs, ours in _READ.items()}
        # Whose class takes whole numbers alone.
        whole = {name: int(n) if isinstance(n, float) and n.is_integer() else n for name, n in section.items()}
        return super()._write() | {_SECTION: {**whole, **_FIXED}}


def _shape(hidden: int, layers: int, heads: int, **section: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 50432, "d_model": hidden, "n_layers": layers, "n_heads": heads, "max_seq_len": 2048}
    return sizes | ({_SECTION: section} if section else {})


PRESETS = {
    "mpt-tiny": _shape(64, 4, 4) | {"vocab_size": 512, "max_seq_len": 512},
    "mpt-7b": _shape(4096, 32, 32),
    "mpt-30b": _shape(7168, 48, 64) | {"max_seq_len": 8192},
}
