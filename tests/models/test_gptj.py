"""GPT-J's own: how many dimensions of a head turn is said as a number, which must be of pairs."""

from __future__ import annotations

import pytest
from families import small

from models.config import ModelConfigError
from models.registry import family


@pytest.mark.parametrize("turning", [0, 3, 6, None])
def test_what_cannot_turn_is_refused(turning: int | None) -> None:
    with pytest.raises(ModelConfigError, match=f"rotary_dim is {turning}[:,]"):
        family("gptj").config.from_hugging_face(small("gptj").to_dict() | {"rotary_dim": turning})
