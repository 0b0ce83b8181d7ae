"""Qwen2's own: windows that are off are read over, those that are on are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from families import small

from models.config import ModelConfigError
from models.registry import family

READ = family("qwen2").CONFIG.from_hugging_face
FULL = ["full_attention"] * 3


@pytest.mark.parametrize("off", [{}, {"sliding_window": 4096}, {"layer_types": None}, {"max_window_layers": 0}])
def test_windows_that_are_off_change_nothing(off: dict[str, Any]) -> None:
    plain = small("qwen2").to_dict()
    assert plain["layer_types"] == FULL and plain["use_sliding_window"] is False
    assert READ(plain | off) == READ(plain)


ON = [
    ({"use_sliding_window": True}, "use_sliding_window=True would change the maths and is not supported"),
    ({"layer_types": [*FULL[1:], "sliding_attention"]}, "layer_types=['full_attention', 'full_attention', 'sliding_"),
    ({"layer_types": 3}, "layer_types=3 would change the maths and is not supported: only 'full_attention' is"),
]


@pytest.mark.parametrize(("on", "message"), ON)
def test_windows_that_are_on_are_refused(on: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        READ(small("qwen2").to_dict() | on)
    assert message in str(caught.value)
