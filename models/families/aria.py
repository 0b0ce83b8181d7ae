"""Aria, its text model (Li et al. 2024, arXiv 2410.05993): experts beside shared ones, stored with inputs first."""

from dataclasses import dataclass, replace

from megacore.models.experts_config import MoEConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class AriaTextConfig(MoEConfig):
    family = "aria_text"
    architecture = "AriaTextForCausalLM"
    harmless = MoEConfig.harmless | {"pretraining_tp"}
    # Of the shared experts alone: the class takes SiLU for the others, whatever a file says.
    fixed = {"hidden_act": "silu", "mlp_bias": False}
    saved = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"}
    axes = {**MoEConfig.axes, "shared_mlp": "shared_intermediate_size"}
    rule = {"weigh": "chosen"}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 2
    attention_bias: bool = False
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_num_shared_experts: int = 2

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden features of the expert that every token goes to."""
        return self.moe_num_shared_experts * self.intermediate_size

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "mlp.router")
        up, down = t.stacked_experts()
        # Files have other names than the tensors in memory.
        named = (replace(up, hf=self._of("fc1"), hf_held=up.hf), replace(down, hf=self._of("fc2"), hf_held=down.hf))
        return (*router, *named, *t.shared_expert())

    def _of(self, name: str) -> str:
        return f"{self.layer}.mlp.experts.{name}.weight"


PRESETS = {"aria_text-tiny": tiny(32)}
