"""OPT 125M to 66B (Zhang et al. 2022, arXiv 2205.01068): GPT-2 with relus, and two rows before the first position."""

from dataclasses import dataclass
from typing import Any

from megacore.models.learned_positions import LearnedPositionsConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import QKV_EACH, Rows, Table, around


@dataclass(frozen=True, kw_only=True)
class OptConfig(LearnedPositionsConfig):
    family = "opt"
    architecture = "OPTForCausalLM"
    eps = "norm_eps"
    norm_eps = 1e-5
    tied = ("model.decoder.embed_tokens.weight", "lm_head.weight")
    positions = "model.decoder.embed_positions"
    saved = {"hidden_act": "activation_function", "initializer_range": "init_std", "intermediate_size": "ffn_dim"}
    fixed = {
        "_remove_final_layer_norm": False,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    }
    layer = "model.decoder.layers.{layer}"
    last_norm = "model.decoder.final_layer_norm"
    norm_bias = True
    constants = {"position_offset": 2}
    told = {"branch_dropout": "dropout"}
    parts = around("self_attn_layer_norm", "final_layer_norm")

    hidden_act: str = "relu"
    pad_token_id: int | None = 1
    tie_word_embeddings: bool = True
    dropout: float = 0.1
    enable_bias: bool = True
    word_embed_proj_dim: int

    def mixer(self, t: Table) -> Rows:
        return t.attention(out="self_attn.out_proj", here=QKV_EACH, bias=self.enable_bias, out_bias=self.enable_bias)

    def network(self, t: Table) -> Rows:
        return t.plain_mlp("fc1", "fc2", bias=self.enable_bias)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.word_embed_proj_dim != self.hidden_size:
            found.append(
                f"word_embed_proj_dim is {self.word_embed_proj_dim}: it must be hidden_size, {self.hidden_size}"
            )
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("word_embed_proj_dim") is None and "hidden_size" in values:
            values["word_embed_proj_dim"] = values["hidden_size"]
        return super()._derive(values)


_EACH = {"vocab_size": 50272, "max_position_embeddings": 2048}

PRESETS = {
    "opt-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "opt-125m": _EACH | shape(768, 3072, 12, 12),
    "opt-1.3b": _EACH | shape(2048, 8192, 24, 32),
    "opt-6.7b": _EACH | shape(4096, 16384, 32, 32),
    "opt-66b": _EACH | shape(9216, 36864, 64, 72),
}
