"""Mistral's own: one window for all layers, where the file says nothing too."""

from __future__ import annotations

from typing import Any

import pytest
from families import small

from models.config import ModelConfigError
from models.registry import family

READ = family("mistral").config.from_hugging_face
PLAIN = {name: value for name, value in small("mistral").to_dict().items() if name != "sliding_window"}


@pytest.mark.parametrize(
    ("fields", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 5}, 5)]
)
def test_windows(fields: dict[str, Any], window: int | None) -> None:
    assert {layer.window for layer in READ(PLAIN | fields).anatomy.layers} == {window}


def test_kinds_of_layers_are_ministrals() -> None:
    with pytest.raises(ModelConfigError, match="unknown field 'layer_types', which may change the maths"):
        READ(PLAIN | {"layer_types": ["full_attention"] * 3})
