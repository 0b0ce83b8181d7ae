"""The Gemmas' own: what their releases say in other words, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.anatomy import FULL, SLIDING
from models.config import ModelConfig, ModelConfigError
from models.registry import family


def read(name: str, config: dict[str, Any]) -> ModelConfig:
    return family(name).config.from_hugging_face(config)


def test_gelu_means_its_approximation() -> None:
    plain = small("gemma").to_dict()
    old = plain | {"hidden_act": "gelu", "hidden_activation": None}
    assert read("gemma", old) == read("gemma", plain)
    assert read("gemma", plain | {"hidden_act": "relu"}).anatomy.activation == "relu"


def test_gemma_2_reads_one_of_two_names_of_the_activation() -> None:
    plain = small("gemma2").to_dict()
    beside = {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 4096}
    assert read("gemma2", plain | beside) == read("gemma2", plain)
    with pytest.raises(ModelConfigError, match="hidden_act is 'relu': Gemma2ForCausalLM takes 'gelu_pytorch_tanh'"):
        read("gemma2", plain | {"hidden_act": "relu"})
    assert "hidden_act" not in read("gemma2", plain).to_hugging_face()


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_attention_is_causal(name: str) -> None:
    plain = small(name).to_dict()
    for off in (None, False):
        assert read(name, plain | {"use_bidirectional_attention": off}) == read(name, plain)
    with pytest.raises(ModelConfigError, match="use_bidirectional_attention=True would change the maths"):
        read(name, plain | {"use_bidirectional_attention": True})


def test_gemma_3_has_no_cap_of_scores() -> None:
    with pytest.raises(ModelConfigError, match=r"attn_logit_softcapping=50\.0 would change the maths"):
        read("gemma3_text", small("gemma3_text").to_dict() | {"attn_logit_softcapping": 50.0})


# As transformers 4 wrote it; the larger models leave out what is the default.
OLD: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 500000,
    "rope_local_base_freq": 20000.0,
    "sliding_window": 4,
    "torch_dtype": "bfloat16",
    "cache_implementation": "hybrid",
}


@pytest.mark.parametrize("more", [{}, {"sliding_window_pattern": 3}, {"layer_types": [FULL, *[SLIDING] * 6]}])
def test_gemma_3_in_the_old_spelling(more: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING["gemma3_text"](**(OLD | more)).to_dict()
    ours = read("gemma3_text", OLD | more)
    theirs.pop("sliding_window_pattern", None)  # kept, beside the layer_types that it made
    assert ours == read("gemma3_text", theirs)
    assert ours.to_hugging_face()["rope_parameters"] == theirs["rope_parameters"]
    assert ours.to_hugging_face()["layer_types"] == theirs["layer_types"]


@pytest.mark.parametrize("pattern", [0, 2.5, "6"])
def test_a_pattern_is_a_number_of_layers(pattern: Any) -> None:
    with pytest.raises(ModelConfigError, match=r"sliding_window_pattern is .*: it must be a whole number above 0"):
        read("gemma3_text", OLD | {"sliding_window_pattern": pattern})
