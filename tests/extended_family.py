"""A family that has any of the builder's parts, each by a field: LLaMA, extended."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from megacore.models import registry
from megacore.models.anatomy import ROPE, Anatomy, LayerAttention
from megacore.models.families.llama import LlamaConfig
from megacore.models.rope_config import DefaultRope
from megacore.models.weight_rows import HEADS, in_layers
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param

LOCAL = "local"
_MLP, _HF = "layers.{layer}.mlp", "model.layers.{layer}.mlp"
BIASES = (
    Param(f"{_MLP}.router.bias", "routes", f"{_HF}.gate.bias"),
    Param(
        f"{_MLP}.experts.up.bias",
        "experts (gate: expert_mlp + up: expert_mlp)",
        f"{_HF}.experts.{{experts}}.{{gate,up}}_proj.bias",
        vector=True,
    ),
    Param(f"{_MLP}.experts.down.bias", "experts embed", f"{_HF}.experts.{{experts}}.down_proj.bias", vector=True),
)


@dataclass(frozen=True, kw_only=True)
class ExtendedConfig(LlamaConfig):
    """LLaMA with what its fields say.

    Args:
        windows: Of each layer; 0 for none, and () for none in any.
        local_rope: Whether layers with a window have a rope of their own.
        softcap: Of the scores.
        sinks: Whether heads have them.
        norms: Whether queries and keys have norms, each over all heads.
        offset: Of the norms.
        parallel: Whether branches stand side by side behind one norm.
        head_bias: Whether the head has a bias.
        experts: 1 of each layer that has some, 0 of the others; () for none in any.
        num_experts: How many there are.
        routing: Fields of their router's table beside that.
        expert_size, shared_size: Hidden features of each, and of one that is shared by all tokens.
        shared_expert: Whether there is that one.
        correction: Whether biases choose experts with their scores.
        expert_bias: Whether the linears of experts, and their router, have biases.
    """

    family: ClassVar[str] = "extended"
    axes: ClassVar[Mapping[str, str]] = {
        **LlamaConfig.axes,
        "experts": "num_experts",
        "routes": "num_experts",
        "expert_mlp": "expert_size",
        "shared_mlp": "shared_size",
    }

    windows: tuple[int, ...] = ()
    local_rope: bool = False
    softcap: float | None = None
    sinks: bool = False
    norms: bool = False
    offset: float = 0.0
    parallel: bool = False
    head_bias: bool = False
    experts: tuple[int, ...] = ()
    num_experts: int = 8
    routing: Mapping[str, Any] = field(default_factory=lambda: {"top_k": 2}, hash=False)
    expert_size: int = 10
    shared_size: int = 6
    shared_expert: bool = False
    correction: bool = False
    expert_bias: bool = False

    @property
    def anatomy(self) -> Anatomy:
        layers = tuple(
            LayerAttention(LOCAL if window and self.local_rope else ROPE, window or None)
            for window in self.windows or (0,) * self.num_hidden_layers
        )
        return replace(
            super().anatomy,
            layers=layers,
            ropes={ROPE: self.rope_parameters, LOCAL: DefaultRope()}
            if self.local_rope
            else {ROPE: self.rope_parameters},
            attention_softcap=self.softcap,
            norm_offset=self.offset,
            parallel=self.parallel,
            routing=Routing(experts=self.num_experts, **self.routing) if any(self.experts) else None,
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        sinks = Param("layers.{layer}.attn.sinks", "heads", "model.layers.{layer}.self_attn.sinks", vector=True)
        of_heads = (
            *t.norm("attn.q_norm", "self_attn.q_norm", HEADS),
            *t.norm("attn.k_norm", "self_attn.k_norm", "(kv head)"),
        )
        mixed = [layer for layer, has in enumerate(self.experts) if has]
        plain = [layer for layer in range(self.num_hidden_layers) if layer not in mixed]
        mixture = (
            *t.experts(correction="mlp.gate.correction" if self.correction else ""),
            *(t.shared_expert() if self.shared_expert else ()),
            *(BIASES if self.expert_bias else ()),
        )
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            of_heads if self.norms else (),
            (sinks,) if self.sinks else (),
            () if self.parallel else t.norm("mlp_norm", "post_attention_layernorm"),
            in_layers(plain, t.gated_mlp()),
            in_layers(mixed, mixture),
            tied=self.tie_word_embeddings,
            head_bias=self.head_bias,
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {}


@contextmanager
def extended() -> Iterator[None]:
    """For as long as this lasts there is the family ``extended``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "extended": f"{__name__}.ExtendedConfig"})
        yield
