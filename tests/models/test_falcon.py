"""Falcon's own: how keys and values are shared follows from three fields, and what is otherwise there is refused."""

from __future__ import annotations

from typing import Any

import pytest
from families import small

from models.config import ModelConfigError
from models.registry import configure, family
from models.stages import layout_of
from parallel.weights.layout import MeshShape

READ = family("falcon").config.from_hugging_face

REFUSED = [
    ({"alibi": True}, "alibi=True would change the maths and is not supported: only False is"),
    ({"hidden_dropout": 0.1}, "hidden_dropout=0.1 would change the maths and is not supported: only 0.0 is"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1 would change the maths and is not supported: only 0.0 is"),
    ({"partial_rotary_factor": 0.5}, "rope_type 'default' has no field 'partial_rotary_factor'"),
    ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is false: branches of new_decoder_"),
    ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2: it must be 1 or null, or 2 with new_decoder_"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"hidden_size": 32, "num_attention_heads": 4, **changes}
    config = {name: value for name, value in small("falcon").to_dict().items() if name != "rope_parameters"}
    with pytest.raises(ModelConfigError) as caught:
        READ(config | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, {"kv": 1}),
        ({"multi_query": False}, {"kv": 4}),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, {"groups": 2, "share": 2}),
    ],
    ids=["7b", "one for each", "40b"],
)
def test_how_keys_and_values_are_shared(changes: dict[str, Any], shared: dict[str, int]) -> None:
    sizes = READ(small("falcon", **changes).to_dict()).sizes
    assert {axis: sizes[axis] for axis in ("kv", "groups", "share") if axis in sizes} == shared


def test_a_group_is_on_one_rank() -> None:
    """Ranks that share keys and values would share the queries of the group, too, and count them twice."""
    config = configure({"preset": "falcon-40b"})
    with pytest.raises(ValueError, match=r"cannot split groups \(8\) over tp=16: choose tp from 1, 2, 4, 8"):
        layout_of(config, MeshShape(tp=16))
