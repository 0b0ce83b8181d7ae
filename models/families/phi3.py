"""Phi-3, Phi-3.5, Phi-4 (Abdin et al. 2024, arXiv 2404.14219, 2412.08905): LLaMA with queries, keys and values in one
tensor on disk, as gate and up; a window, heads of which a part turns, frequencies for long texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megacore.models.layer_types import OneWindowConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, NORMS


@dataclass(frozen=True, kw_only=True)
class Phi3Config(OneWindowConfig):
    family = "phi3"
    architecture = "Phi3ForCausalLM"
    # Which no class reads.
    harmless = frozenset({"embd_pdrop", "full_attn_mod", "interpolate_factor"})
    fixed = dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False)
    derived = frozenset({"head_dim"})
    rope_convention = Convention(
        partial_rotary_factor=1.0,
        original_max_position_embeddings=4096,
        rope_types={"su": "longrope", "yarn": "longrope"},
    )
    told = {"branch_dropout": "resid_pdrop"}
    parts = BRANCHES | NORMS
    attention_rows = {"hf": "self_attn.qkv_proj"}
    network_rows = ("mlp.gate_up_proj",)

    rms_norm_eps: float = 1e-5
    resid_pdrop: float = 0.0
    pad_token_id: int | None = 32000


_PHI3_MINI = {"vocab_size": 32064} | shape(3072, 8192, 32, 32)
_PHI3_MEDIUM = {"num_key_value_heads": 10} | shape(5120, 17920, 40, 40)


def _longrope(short: Sequence[float], long: Sequence[float], part: float = 1.0) -> dict[str, Any]:
    """Return the rope of texts of up to 131072 tokens, where up to 4096 have the short factors."""
    kind = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": part}
    return {
        "max_position_embeddings": 131072,
        "sliding_window": 262144,
        "rope_parameters": kind | {"short_factor": [*short], "long_factor": [*long]},
    }


# fmt: off
_PHI35_SHORT = (
    1.0, 1.0199999809265137, *[1.0299999713897705] * 2, *[1.0499999523162842] * 5, 1.0699999332427979,
    1.0999999046325684, 1.1099998950958252, *[1.1599998474121094] * 2, 1.1699998378753662, 1.2899998426437378,
    1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
    1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, *[2.0199997425079346] * 6,
    *[2.0299997329711914] * 9, 2.0799996852874756, 2.0899996757507324, 2.189999580383301, 2.2199995517730713,
    2.5899994373321533, 2.729999542236328, 2.749999523162842, 2.8399994373321533,
)
_PHI35_LONG = (
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
    1.600000023841858, 1.6200000047683716, 2.620000123977661, *[3.2300000190734863] * 2, 4.789999961853027,
    7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137, 17.670000076293945, 24.46000099182129,
    28.57000160217285, 30.420001983642578, 30.840002059936523, 32.590003967285156, 32.93000411987305,
    42.320003509521484, 44.96000289916992, 50.340003967285156, 50.45000457763672, 57.55000305175781, 57.93000411987305,
    58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203, 62.71000289916992,
    *[63.1400032043457] * 2, 63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125,
    64.02999877929688, 64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
    64.51000213623047, 64.52999877929688, 64.83999633789062,
)
_PHI4_LONG = (
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)
# fmt: on

PRESETS = {
    "phi3-tiny": tiny(pad_token_id=None),
    "phi-3-mini-4k": _PHI3_MINI | {"max_position_embeddings": 4096, "sliding_window": 2047},
    "phi-3-medium-4k": _PHI3_MEDIUM | {"vocab_size": 32064, "max_position_embeddings": 4096, "sliding_window": 2047},
    "phi-3.5-mini": _PHI3_MINI | _longrope(_PHI35_SHORT, _PHI35_LONG),
    "phi-4": _PHI3_MEDIUM
    | {"vocab_size": 100352, "max_position_embeddings": 16384, "pad_token_id": 100349}
    | rope(250000.0),
    "phi-4-mini": {"vocab_size": 200064, "num_key_value_heads": 8, "pad_token_id": 199999, "tie_word_embeddings": True}
    | shape(3072, 8192, 32, 24)
    | _longrope([1.0] * 48, _PHI4_LONG, part=0.75),
}
