"""CodeGen (Nijkamp et al. 2022, arXiv 2203.13474): GPT-J whose queries, values and keys are stored in four groups of
heads, those of the machine that it was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.families.gptj import GptjConfig
from megacore.models.weight_rows import Rows, Table

_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class CodeGenConfig(GptjConfig):
    family = "codegen"
    architecture = "CodeGenForCausalLM"
    ignored = (*GptjConfig.ignored, "transformer.h.{layer}.attn.causal_mask")

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "groups": _GROUPS, "share": self.n_head // _GROUPS}

    def queries_keys_values(self, t: Table) -> Rows:
        here, stored = f"groups share {self.pairs.here}", f"share {self.pairs.stored}"
        of_groups = f"(groups (q: {stored} + v: share head + k: {stored}))"
        ours = f"(q: {here} + k: {here} + v: groups share head)"
        return t.linear("attn.qkv", ours, "embed", "attn.qkv_proj", stored=f"{of_groups} embed")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.n_head % _GROUPS:
            found.append(f"n_head is {self.n_head}: it must be a multiple of {_GROUPS}, the groups that heads lie in")
        return found


def _shape(embed: int, layers: int, heads: int, turning: int, vocab: int = 51200) -> dict[str, Any]:
    return {"vocab_size": vocab, "n_embd": embed, "n_layer": layers, "n_head": heads, "rotary_dim": turning}


PRESETS = {
    "codegen-tiny": _shape(64, 4, 4, 8, 512) | {"n_positions": 512},
    "codegen-350m": _shape(1024, 20, 16, 32),
    "codegen-2b": _shape(2560, 32, 32, 64),
    "codegen-6b": _shape(4096, 33, 16, 64),
    "codegen-16b": _shape(6144, 34, 24, 64),
}
