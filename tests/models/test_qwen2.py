"""Qwen2's own: which layers have a window, as transformers' class takes it, and what it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.config import ModelConfigError
from models.registry import family

READ = family("qwen2").config.from_hugging_face
FULL, SLIDING = "full_attention", "sliding_attention"
# A config.json of transformers 4, which knew no layer_types.
OLD = {name: value for name, value in small("qwen2").to_dict().items() if name != "layer_types"}
OFF = [
    {},
    {"sliding_window": 5},
    {"sliding_window": 5, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    {"layer_types": [FULL] * 3},
]
ON = [
    ({"max_window_layers": 1}, [None, 5, 5]),
    ({"max_window_layers": 0}, [5, 5, 5]),
    ({"max_window_layers": 0, "layer_types": [SLIDING, FULL, SLIDING]}, [5, None, 5]),
]


@pytest.mark.parametrize("fields", OFF)
def test_windows_that_are_off_change_nothing(fields: dict[str, Any]) -> None:
    assert READ(OLD | fields).anatomy == READ(OLD).anatomy
    assert CONFIG_MAPPING["qwen2"](**OLD | fields).layer_types == [FULL] * 3


@pytest.mark.parametrize(("fields", "windows"), ON)
def test_windows_that_are_on(fields: dict[str, Any], windows: list[int | None]) -> None:
    config = OLD | {"use_sliding_window": True, "sliding_window": 5} | fields
    assert [layer.window for layer in READ(config).anatomy.layers] == windows
    theirs = CONFIG_MAPPING["qwen2"](**config)
    assert [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types] == windows


REFUSED = [
    ({"layer_types": [FULL, FULL, SLIDING]}, "layer_types names sliding_attention, and there is no sliding_window"),
    ({"layer_types": [FULL] * 2}, "layer_types names 2 layers, and num_hidden_layers is 3: give as many, or null"),
    ({"layer_types": [FULL, FULL, "mamba"]}, "layer_types names mamba: only full_attention and sliding_attention are"),
    ({"layer_types": 3}, "layer_types is 3, which is not of type tuple[str, ...] | None"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0: it must be at least 1, or null"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_windows_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        READ(OLD | fields)
    assert message in str(caught.value)
