"""Command R's own: a config.json of the Hub, and which layers rotate."""

from __future__ import annotations

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.anatomy import ROPE
from models.config import ModelConfigError
from models.registry import family

READ = family("cohere2").config.from_hugging_face
# Fields of command-r7b that transformers does not read, and one that makes its layers.
HUB = {
    "cache_implementation": "hybrid",
    "layer_switch": 2,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window_pattern": 2,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}


def test_a_config_of_the_hub() -> None:
    plain = {
        name: value
        for name, value in small("cohere2").to_dict().items()
        if name not in ("layer_types", "rope_parameters")
    }
    ours = READ(plain | HUB)
    theirs = CONFIG_MAPPING["cohere2"](**(plain | HUB))
    assert ours.to_hugging_face()["layer_types"] == theirs.layer_types
    assert ours.to_hugging_face()["rope_parameters"] == theirs.rope_parameters


def test_layers_that_see_all_do_not_rotate() -> None:
    config = small("cohere2", num_hidden_layers=8, sliding_window=7).to_dict()
    layers = READ(config | {"layer_types": None}).anatomy.layers
    assert [(layer.rope, layer.window) for layer in layers] == [(ROPE, 7), (ROPE, 7), (ROPE, 7), (None, None)] * 2


def test_queries_and_keys_of_the_second_generation_have_no_norms() -> None:
    assert READ(small("cohere2").to_dict() | {"use_qk_norm": False}) == READ(small("cohere2").to_dict())
    with pytest.raises(ModelConfigError, match="use_qk_norm=True would change the maths"):
        READ(small("cohere2").to_dict() | {"use_qk_norm": True})
