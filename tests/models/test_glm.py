"""GLM's own: how much of a head turns."""

from __future__ import annotations

from typing import Any

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.registry import family

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("name", ["glm", "glm4"])
@pytest.mark.parametrize(
    ("said", "turning"),
    [
        ({}, 4),
        ({"rope_theta": 5e6, "partial_rotary_factor": 0.25}, 2),
        ({"rope_parameters": ROPE}, 4),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, 8),
    ],
)
def test_half_of_a_head_turns_unless_another_part_is_said(name: str, said: dict[str, Any], turning: int) -> None:
    plain = {key: value for key, value in small(name, head_dim=8).to_dict().items() if key != "rope_parameters"}
    ours = family(name).config.from_hugging_face(plain | said)
    assert ours == family(name).config.from_hugging_face(CONFIG_MAPPING[name](**plain, **said).to_dict())
    assert ours.sizes["two"] * ours.sizes["half"] == turning
    assert ours.sizes.get("rest", 0) == 8 - turning
