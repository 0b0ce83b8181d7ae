"""Command A+ (Cohere 2026): Command A's windows before experts, of which an average with a shared one may be taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.anatomy import ROPE, SLIDING, Anatomy, Factors, LayerAttention
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.experts_config import MoEConfig, NamedLayersConfig
from megacore.models.families.cohere import CommandConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table
from megacore.parallel.routing import Routing

_CHOICES = {"expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("average", "sum")}


@dataclass(frozen=True, kw_only=True)
class Cohere2MoeConfig(NamedLayersConfig, CommandConfig, WindowedConfig):
    family = "cohere2_moe"
    architecture = "Cohere2MoeForCausalLM"
    defaults = {"head_dim": 128}
    derived = frozenset({"first_k_dense_replace"})
    axes = {
        **DecoderConfig.axes,
        **MoEConfig.axes,
        "mlp": "dense_intermediate_size",
    }

    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    # Where it is null, norms are LayerNorms.
    rms_norm_eps: float | None = None
    num_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    num_shared_experts: int = 0
    shared_expert_combination_strategy: str = "average"
    expert_selection_fn: str = "softmax"
    # Of the first layers, which have no experts, and whose windows are counted by themselves.
    first_k_dense_replace: int = field(default=0, compare=False)
    prefix_dense_intermediate_size: int | None = None
    prefix_dense_sliding_window_pattern: int = 1
    sliding_window_pattern: int = 4

    @property
    def dense_intermediate_size(self) -> int:
        """Hidden features of a layer without experts."""
        return self.prefix_dense_intermediate_size or self.intermediate_size

    @property
    def sizes(self) -> Mapping[str, int]:
        shared = self.num_shared_experts * self.intermediate_size
        return {**super().sizes, **({"shared_mlp": shared} if shared else {})}

    @property
    def leading(self) -> int:
        return self.first_k_dense_replace

    def slides(self, layer: int) -> bool:
        first = self.first_k_dense_replace
        every = self.prefix_dense_sliding_window_pattern if layer < first else self.sliding_window_pattern
        return (layer + 1 - (0 if layer < first else first)) % max(1, every) > 0

    @property
    def routing(self) -> Routing:
        chosen, top_k = self.expert_selection_fn == "softmax", self.num_experts_per_tok
        how = {"weigh": "chosen"} if chosen else {"score": "sigmoid", "normalised": self.norm_topk_prob}
        return Routing(experts=self.num_experts, top_k=top_k, choose="logits", **how)

    def anatomy_of(self, **own: Any) -> Anatomy:
        turns = {SLIDING} if self.prefix_dense_sliding_window_pattern > 1 else {SLIDING, "dense"}
        layers = (
            LayerAttention(ROPE if turns & {kind, mlp} else None, self.sliding_window if kind == SLIDING else None)
            for kind, mlp in zip(self.kinds, self.mlp_layer_types or (), strict=True)
        )
        norms = {} if self.rms_norm_eps is None else {"norm": "rms", "norm_eps": self.rms_norm_eps}
        average = self.num_shared_experts and self.shared_expert_combination_strategy == "average"
        factors = {"factors": {"experts": Factors(gives=0.5)}} if average else {}
        return super().anatomy_of(**({"layers": tuple(layers), **norms, **factors} | own))

    def experts(self, t: Table) -> Rows:
        return t.experts() + (t.shared_expert() if self.num_shared_experts else ())

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "sliding_window_pattern", "prefix_dense_sliding_window_pattern")
        if self.num_shared_experts < 0:
            found.append(f"num_shared_experts is {self.num_shared_experts}: it must be at least 0")
        return found + [
            f"{name} is {getattr(self, name)!r}: it must be {' or '.join(known)}"
            for name, known in _CHOICES.items()
            if getattr(self, name) not in known
        ]

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        return super().override(_of_one_theta(base), fields)

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super()._read_ropes(_of_one_theta(config))


def _of_one_theta(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` without the theta that transformers writes beside a rope that has one, and never
    reads."""
    nested = config.get("rope_parameters")
    own = isinstance(nested, Mapping) and "rope_theta" in nested
    return {name: value for name, value in config.items() if name != "rope_theta" or not own}


PRESETS = {"cohere2_moe-tiny": tiny(32, head_dim=16, sliding_window=128, num_shared_experts=1, first_k_dense_replace=1)}
