"""Ettin's decoders (Weller et al. 2025, arXiv 2507.11412): ModernBERT's blocks, and its dense layer before the head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import ACTIVATIONS, FULL, SLIDING
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.presets import tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Table, around, in_layers
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class ModernBertDecoderConfig(LocalRopeConfig):
    family = "modernbert-decoder"
    architecture = "ModernBertDecoderForCausalLM"
    reads = frozenset({"global_attn_every_n_layers"})
    harmless = frozenset({"classifier_dropout", "cls_token_id", "initializer_cutoff_factor"})
    fixed = dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout"), 0.0)
    derived = frozenset({"head_dim", "num_key_value_heads"})
    saved = {"hidden_act": "hidden_activation", "norms_have_bias": "norm_bias"}
    eps = "norm_eps"
    tied = ("model.embeddings.tok_embeddings.weight", "decoder.weight")
    axes = {**LocalRopeConfig.axes, "turned": "hidden_size"}
    rope_kinds = {
        FULL: Convention(rope_theta=160000.0, theta_key="global_rope_theta"),
        SLIDING: Convention(theta_key="local_rope_theta"),
    }
    last_norm = "model.final_norm"
    parts = around("attn_norm", "mlp_norm")
    constants = {"norm": "layer"}
    told = {"head_activation": "classifier_activation"}
    attention_rows = {"hf": "attn.{q,k,v}_proj", "out": "attn.Wo"}
    network_rows = ("mlp.Wi", "mlp.Wo")

    hidden_act: str = "gelu"
    max_position_embeddings: int = 8192
    pad_token_id: int = 50283
    norm_eps: float = 1e-5
    norms_have_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    tie_word_embeddings: bool = True
    # Twice the window, where a file does not say it.
    local_attention: int = 128
    sliding_window: int | None = None

    def slides(self, layer: int) -> bool:
        return layer % 3 > 0

    def table(self, **own: Any) -> Table:
        return super().table(**({"norm_bias": self.norms_have_bias} | own))

    def params(self) -> tuple[Param, ...]:
        t, later = self.table(), range(1, self.num_hidden_layers)
        embed, *others = super().params()
        # What the embeddings' norm gives, the first attention takes as it is.
        blocks = (
            each for row in others for each in (in_layers(later, (row,)) if ".attn_norm." in row.name else (row,))
        )
        return embed, *t.embed_norm("model.embeddings.norm"), *blocks, *t.dense_head(bias=self.classifier_bias)

    @property
    def head_bias(self) -> bool:
        return self.decoder_bias

    def problems(self) -> list[str]:
        known = self.classifier_activation in ACTIVATIONS
        wrong = f"classifier_activation {self.classifier_activation!r} is not one of {', '.join(ACTIVATIONS)}"
        return super().problems() + ([] if known else [wrong])

    def to_hugging_face(self) -> dict[str, Any]:
        # The class takes no null for a token.
        return {name: value for name, value in super().to_hugging_face().items() if value is not None}

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        window = values.get("local_attention", cls.local_attention)
        if values.get("sliding_window") is None and isinstance(window, int):
            values["sliding_window"] = window // 2
        return super()._derive(values)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        every, layers = config.get("global_attn_every_n_layers"), values.get("num_hidden_layers")
        if values.get("layer_types") is None and type(every) is int and every > 0 and isinstance(layers, int):
            values["layer_types"] = tuple(SLIDING if layer % every else FULL for layer in range(layers))
        return values, problems


PRESETS = {"modernbert-decoder-tiny": tiny(96, num_key_value_heads=4, pad_token_id=511)}
