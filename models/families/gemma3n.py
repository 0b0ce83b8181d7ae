"""Gemma 3n, its text models (Google 2025): several streams that are predicted and corrected (AltUp), low-rank linears
beside attention (LAuReL), first layers most of whose gates are cut off, and embeddings of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import AltUp, Anatomy
from megacore.models.config import above_zero, positive
from megacore.models.families.gemma import GemmaConfig
from megacore.models.families.gemma3 import Gemma3Config
from megacore.models.families.gemma4 import SharedKeysConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table
from megacore.parallel.weights.schema import Param

# The last one of so many layers sees all; so many first layers cut gates off, of more than these.

_EVERY, _CUT = 5, 10


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedKeysConfig):
    family = "gemma3n_text"
    architecture = "Gemma3nForCausalLM"
    # Without it, a weight of the class would do nothing.
    fixed = {"altup_correct_scale": True}
    defaults = {
        **shape(2048, 16384, 35, 8),
        "vocab_size": 262400,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
    }
    axes = {
        **GemmaConfig.axes,
        "input": "hidden_size_per_layer_input",
        "laurel": "laurel_rank",
        "streams": "altup_num_inputs",
    }
    rope_kinds = Gemma3Config.rope_kinds
    constants = {"round_input_scales": True}
    told = {"cut": "activation_sparsity_pattern"}

    final_logit_softcapping: float | None = 30.0
    num_kv_shared_layers: int = 15
    altup_active_idx: int = 0
    altup_coef_clip: float | None = 120.0
    altup_num_inputs: int = 4
    laurel_rank: int = 64
    # None becomes 0.95 in the first layers.
    activation_sparsity_pattern: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        first = _CUT if self.num_hidden_layers > _CUT else 0
        self.fill_in("activation_sparsity_pattern", lambda layer: 0.95 if layer < first else 0.0)
        super().__post_init__()

    def slides(self, layer: int) -> bool:
        return (layer + 1) % _EVERY > 0

    @property
    def sizes(self) -> Mapping[str, int]:
        streams = self.altup_num_inputs
        return {**super().sizes, "turned": self.hidden_size, "into": streams, "ways": streams, "others": streams - 1}

    def anatomy_of(self, **own: Any) -> Anatomy:
        streams = AltUp(self.altup_num_inputs, self.altup_active_idx, self.altup_coef_clip)
        return super().anatomy_of(**({"streams": streams} | own))

    def mixer(self, t: Table) -> Rows:
        return (
            *self.attention_of(t, range(self.num_hidden_layers)),
            *t.linear("laurel.left", "laurel", "embed", "laurel.linear_left"),
            *t.linear("laurel.right", "embed", "laurel", "laurel.linear_right"),
            *t.norm("laurel.norm", "laurel.post_laurel_norm"),
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        ends = {"first": "altup_projections", "last": "altup_unembed_projections"}
        return (
            *super().params(),
            *t.norm("streams.norm", "altup.router_norm"),
            t.row("streams.router", "ways embed", "altup.modality_router.weight", std=t.std),
            t.row("streams.predict", "(into streams) ways", "altup.prediction_coefs.weight", std=t.std),
            t.row("streams.correct", "streams ways", "altup.correction_coefs.weight", std=t.std),
            t.row("streams.scale", "embed", "altup.correct_output_scale"),
            *(
                Param(f"{at}_streams.proj", "others turned embed", f"model.{hf}.{{others}}.weight", at=at, std=t.std)
                for at, hf in ends.items()
            ),
        )

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "hidden_size_per_layer_input") + above_zero(self, "altup_coef_clip")
        streams, active, layers = self.altup_num_inputs, self.altup_active_idx, self.num_hidden_layers
        if streams < 2:
            found.append(f"altup_num_inputs is {streams}: it must be at least 2")
        elif not 0 <= active < streams:
            found.append(f"altup_active_idx is {active}: it must be at least 0, and below altup_num_inputs ({streams})")
        pattern = self.activation_sparsity_pattern
        if pattern is not None and len(pattern) != layers:
            found.append(f"activation_sparsity_pattern names {len(pattern)} layers, and num_hidden_layers is {layers}")
        if bad := [share for share in pattern or () if not 0 <= share < 1]:
            found.append(f"activation_sparsity_pattern has {bad[0]}: each must lie in [0, 1)")
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        sizes, layers = (
            config.get("intermediate_size"),
            config.get("num_hidden_layers", cls.defaults["num_hidden_layers"]),
        )
        if not isinstance(sizes, list):
            return super()._read(config)
        # transformers saves one for each layer.
        values, problems = super()._read({**config, "intermediate_size": next(iter(sizes), None)})
        if len(sizes) != layers or any(each != sizes[0] for each in sizes):
            problems.append(f"intermediate_size is {sizes}: it must be one number, or {layers} of these, all the same")
        return values, problems


PRESETS = {
    "gemma3n_text-tiny": tiny(layers=6, head_dim=16, sliding_window=128, num_kv_shared_layers=1, laurel_rank=8)
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}
    | {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]},
    "gemma-3n-e2b": shape(2048, 8192, 30, 8) | {"num_kv_shared_layers": 10},
    "gemma-3n-e4b": shape(2048, 16384, 35, 8),
}
