"""Laguna (Poolside 2026): experts, windows, and as many heads in each layer as a list says; outputs are weighed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.experts_config import MoEConfig, NamedLayersConfig
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.presets import tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel import limits
from megacore.parallel.routing import Routing

_GATES = {True: "", "per-head": "", "per-element": " head"}


@dataclass(frozen=True, kw_only=True)
class LagunaConfig(NamedLayersConfig, LocalRopeConfig):
    """The list may say two numbers: that of ``num_attention_heads``, and another one."""

    family = "laguna"
    architecture = "LagunaForCausalLM"
    fixed = {"attention_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0}
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    axes = {
        **MoEConfig.axes,
        "mlp": "intermediate_size",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
    }
    rule = {"score": "sigmoid", "normalised": True}
    rope_kinds = {
        FULL: Convention(rope_theta=500000.0, partial_rotary_factor=1.0, parameters={"partial_rotary_factor": 0.5}),
        SLIDING: Convention(partial_rotary_factor=1.0),
    }
    constants = {"attention_gate": "softplus"}
    leading = 1

    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 512
    gating: bool | str = True
    num_attention_heads_per_layer: tuple[int, ...] | None = None
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    moe_routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        self.fill_in("num_attention_heads_per_layer", lambda layer: self.num_attention_heads)
        super().__post_init__()

    def slides(self, layer: int) -> bool:
        return False

    @property
    def others(self) -> dict[int, list[int]]:
        """{a number of heads that is not ``num_attention_heads``: the layers that have it}."""
        found = dict[int, list[int]]()
        for layer, heads in enumerate(self.num_attention_heads_per_layer or ()):
            if heads != self.num_attention_heads:
                found.setdefault(heads, []).append(layer)
        return found

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **({"local_heads": max(self.others)} if self.others else {})}

    @property
    def routing(self) -> Routing:
        return replace(super().routing, factor=self.moe_routed_scaling_factor)

    def mixer(self, t: Table) -> Rows:
        def attention(name: str, heads: str) -> Rows:
            here = f"(q: {heads} head + gate: {heads}{_GATES[self.gating]} + k: kv head + v: kv head)"
            attention = t.attention(hf="self_attn.{q,g,k,v}_proj", here=here, name=name, heads=f"({heads} head)")
            norms = (t.norm(f"{name}.{each}_norm", f"self_attn.{each}_norm", "head") for each in "qk")
            return attention + sum(norms, ())

        local = [layer for layers in self.others.values() for layer in layers]
        full = in_layers({*range(self.num_hidden_layers)} - {*local}, attention("attn", "heads"))
        return full + in_layers(local, attention("local_attn", "local_heads"))

    def experts(self, t: Table) -> Rows:
        return t.experts(correction="mlp.experts.e_score_correction_bias") + t.shared_expert("mlp.shared_expert")

    def problems(self) -> list[str]:
        found, name = super().problems(), "num_attention_heads_per_layer"
        told = self.num_attention_heads_per_layer or ()
        if len(told) != self.num_hidden_layers and self.num_hidden_layers <= limits.LAYERS:
            found.append(f"{name} has {len(told)} numbers, and num_hidden_layers is {self.num_hidden_layers}")
        kv = self.num_key_value_heads
        if kv > 0 and (bad := sorted(each for each in {*told} if each < 1 or each % kv)):
            found.append(f"{name} has {', '.join(map(str, bad))}: give multiples of num_key_value_heads ({kv})")
        if len(self.others) > 1:
            numbers = ", ".join(map(str, sorted(self.others)))
            found.append(
                f"{name} has {numbers} beside num_attention_heads ({self.num_attention_heads}): one more may be there"
            )
        if self.gating not in _GATES:
            found.append(f"gating is {self.gating!r}: it must be true, 'per-head' or 'per-element'")
        return found

    def _write(self) -> dict[str, Any]:
        written = super()._write()
        for rope in written["rope_parameters"].values():
            rope.setdefault("partial_rotary_factor", 1.0)  # as the class says whole heads
        return written


PRESETS = {
    "laguna-tiny": tiny(96, head_dim=16, sliding_window=128, moe_intermediate_size=32, num_experts=16)
    | {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 32, "layer_types": [FULL, SLIDING] * 2}
    | {"num_attention_heads_per_layer": [4, 8] * 2},
}
