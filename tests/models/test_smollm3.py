"""SmolLM3's own: which layers rotate and which have a window, as transformers' class takes it."""

from __future__ import annotations

from typing import Any

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.config import ModelConfigError
from models.registry import family

READ = family("smollm3").config.from_hugging_face
DERIVED = ("layer_types", "no_rope_layers")
PLAIN = {name: value for name, value in small("smollm3", pad_token_id=None).to_dict().items() if name not in DERIVED}
CASES = [
    ({}, [1, 1, 1], [None] * 3),
    ({"no_rope_layer_interval": 2}, [1, 0, 1], [None] * 3),
    ({"no_rope_layer_interval": 2, "no_rope_layers": [0, 1, 1, 1, 0]}, [0, 1, 1], [None] * 3),
    ({"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}, [1, 0, 1], [None, 5, None]),
]


@pytest.mark.parametrize(("fields", "rotate", "windows"), CASES)
def test_layers(fields: dict[str, Any], rotate: list[int], windows: list[int | None]) -> None:
    layers = READ(PLAIN | fields).anatomy.layers
    assert [int(layer.rope is not None) for layer in layers] == rotate
    assert [layer.window for layer in layers] == windows
    theirs = CONFIG_MAPPING["smollm3"](**PLAIN | fields)
    assert theirs.no_rope_layers[:3] == rotate
    assert [theirs.sliding_window if "sliding" in kind else None for kind in theirs.layer_types] == windows


REFUSED = [
    ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers, and num_hidden_layers is 3: give as many, or null"),
    ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: it must be at least 1"),
    (
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5},
        "layer_types names sliding_attention, and use_sliding_window is false: say which",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_it_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        READ(PLAIN | fields)
    assert message in str(caught.value)
