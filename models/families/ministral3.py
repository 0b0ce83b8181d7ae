"""Ministral 3 (Mistral AI 2025): Mistral whose queries count more the later they stand."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megacore.models.anatomy import Anatomy, Temperature
from megacore.models.decoder_config import DecoderConfig
from megacore.models.families.mistral import MistralConfig
from megacore.models.presets import shape, yarn
from megacore.models.rope_config import Convention, YarnRope


@dataclass(frozen=True, kw_only=True)
class TemperedYarnRope(YarnRope):
    """YaRN whose numbers also say a temperature; the length that some have among them is of no meaning."""

    llama_4_scaling_beta: float
    max_position_embeddings: int | None = field(default=None, compare=False)


_LENGTH = "max_position_embeddings"
_YARN = yarn(16.0, 16384, rope_theta=1e6, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)


@dataclass(frozen=True, kw_only=True)
class TemperedConfig(DecoderConfig):
    """Queries count more the later they stand, as numbers of a rope of the type yarn say."""

    rope_convention = Convention(parameters=_YARN, own_types={"yarn": TemperedYarnRope})

    @property
    def anatomy(self) -> Anatomy:
        rope, plain = self.rope_parameters, super().anatomy
        assert isinstance(rope, TemperedYarnRope)  # see rope_problems
        temperature = Temperature(rope.llama_4_scaling_beta, rope.original_max_position_embeddings)
        return replace(plain, layers=tuple(replace(each, temperature=temperature) for each in plain.layers))

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        rope = super()._read_ropes(config)["rope_parameters"]
        if isinstance(rope, TemperedYarnRope):
            rope = replace(rope, max_position_embeddings=(config.get("rope_parameters") or {}).get(_LENGTH))
        return {"rope_parameters": rope}

    def rope_problems(self) -> list[str]:
        if isinstance(self.rope_parameters, TemperedYarnRope):
            return super().rope_problems()
        return [f"rope_type is {self.rope_parameters.rope_type!r}: queries have a temperature only in that of 'yarn'"]


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(TemperedConfig, MistralConfig):
    family = "ministral3"
    architecture = "Ministral3ForCausalLM"
    defaults = {"num_key_value_heads": 8, "head_dim": 128}

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    pad_token_id: int | None = 11
    max_position_embeddings: int = 262144


def _shape(hidden: int, mlp: int, layers: int, **own: Any) -> dict[str, Any]:
    return shape(hidden, mlp, layers, 32) | {"vocab_size": 131072, "num_key_value_heads": 8, **own}


PRESETS = {
    "ministral3-tiny": shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16},
    "ministral3-3b": _shape(3072, 9216, 26, tie_word_embeddings=True),
    "ministral3-8b": _shape(4096, 14336, 34),
    "ministral3-14b": _shape(5120, 16384, 40, rope_parameters={**_YARN, "rope_theta": 1e9}),
}
