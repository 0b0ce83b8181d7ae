"""GPT-Neo (Black et al. 2021): GPT-2 of which every other layer has a window, and whose scores are not scaled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import FULL, SLIDING, Anatomy, by_kind
from megacore.models.config import positive
from megacore.models.learned_positions import LearnedPositionsConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import QKV_EACH, around
from megacore.parallel import limits

_KINDS = {"global": FULL, "local": SLIDING}


@dataclass(frozen=True, kw_only=True)
class GptNeoConfig(LearnedPositionsConfig):
    family = "gpt_neo"
    architecture = "GPTNeoForCausalLM"
    reads = frozenset({"attention_types"})
    eps = "layer_norm_epsilon"
    base_model_prefix = "transformer"
    tied = ("transformer.wte.weight", "lm_head.weight")
    positions = "transformer.wpe"
    # The causal mask and its fill value.
    ignored = tuple(f"transformer.h.{{layer}}.attn.attention.{name}" for name in ("bias", "masked_bias"))
    harmless = frozenset(
        {"classifier_dropout", "gradient_checkpointing", "pad_token_id"}
        | {f"summary_{of}" for of in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")}
    )
    saved = {"hidden_act": "activation_function", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
    layer = "transformer.h.{layer}"
    last_norm = "transformer.ln_f"
    norm_bias = True
    constants = {"attention_scale": 1.0, "padding_idx": None}
    told = {"branch_dropout": "resid_dropout", "embedding_dropout": "embed_dropout"}
    parts = around("ln_1", "ln_2")
    attention_rows = {
        "hf": "attn.attention.{q,k,v}_proj",
        "out": "attn.attention.out_proj",
        "here": QKV_EACH,
        "out_bias": True,
    }
    network_rows = ("mlp.c_fc", "mlp.c_proj")
    mlp_bias = True
    gated_network = False

    hidden_act: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    resid_dropout: float = 0.0
    embed_dropout: float = 0.0
    window_size: int = 256
    attention_layers: tuple[str, ...]

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(layers=by_kind([_KINDS[kind] for kind in self.attention_layers], self.window_size))

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "window_size")
        if unknown := sorted({*self.attention_layers} - _KINDS.keys()):
            found.append(f"attention_types names {', '.join(unknown)}: only {', '.join(_KINDS)} are supported")
        if len(self.attention_layers) != self.num_hidden_layers:
            found.append(
                f"attention_types names {len(self.attention_layers)} layers, and num_layers is "
                f"{self.num_hidden_layers}: give as many"
            )
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        types = config.get("attention_types") or [[["global", "local"], 12]]
        try:
            if sum(len(kinds) * times for kinds, times in types) > limits.LAYERS:
                raise ValueError
            values["attention_layers"] = tuple(str(kind) for kinds, times in types for kind in [*kinds] * times)
        except (TypeError, ValueError):
            problems.append(f"attention_types is {types!r}: it must be pairs of kinds and how many times they come")
        if values.get("intermediate_size") is None and isinstance(values.get("hidden_size"), int):
            values["intermediate_size"] = 4 * values["hidden_size"]
        return values, problems

    def _write(self) -> dict[str, Any]:
        return super()._write() | {"attention_types": _types([*self.attention_layers])}


def _types(kinds: list[str]) -> list[Any]:
    """Return the ``attention_types`` of the layers: what repeats, and how many times; or each layer by itself."""
    layers = len(kinds)
    every = next(n for n in range(1, layers + 1) if layers % n == 0 and kinds == kinds[:n] * (layers // n))
    return [[[kind], 1] for kind in kinds] if every == layers else [[kinds[:every], layers // every]]


PRESETS = {
    "gpt_neo-tiny": shape(64, 256, 4, 4)
    | {"vocab_size": 512, "max_position_embeddings": 512, "attention_types": [[["global", "local"], 2]]},
    "gpt-neo-125m": shape(768, 3072, 12, 12)
    | {"vocab_size": 50257, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 6]]},
    "gpt-neo-1.3b": shape(2048, 8192, 24, 16) | {"vocab_size": 50257, "max_position_embeddings": 2048},
    "gpt-neo-2.7b": shape(2560, 10240, 32, 20)
    | {"vocab_size": 50257, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 16]]},
}
