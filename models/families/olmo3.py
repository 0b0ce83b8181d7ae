"""OLMo 3 (Team OLMo 2025, arXiv 2512.13961): OLMo 2 with windows, and a rope of its own for each kind of layer."""

from dataclasses import dataclass

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.families.olmo2 import Olmo2Config
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.presets import shape, tiny, yarn
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, LocalRopeConfig):
    family = "olmo3"
    architecture = "Olmo3ForCausalLM"
    # A rope_scaling of older files is that of the layers that see all.
    rope_kinds = {SLIDING: Convention(rope_theta=500000.0, scaled=False), FULL: Convention(rope_theta=500000.0)}

    def slides(self, layer: int) -> bool:
        return layer % 4 != 3


_EXTENDED = yarn(8.0, 8192, rope_theta=500000.0, attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1)
_EACH = {
    "vocab_size": 100278,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "pad_token_id": 100277,
    "rope_parameters": {FULL: _EXTENDED, SLIDING: {"rope_type": "default", "rope_theta": 500000.0}},
}

PRESETS = {
    "olmo3-tiny": _EACH | tiny(max_position_embeddings=65536, pad_token_id=None, sliding_window=128),
    "olmo3-7b": _EACH | shape(4096, 11008, 32, 32),
    "olmo3-32b": _EACH | shape(5120, 27648, 64, 40) | {"num_key_value_heads": 8},
}
