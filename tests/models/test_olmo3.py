"""OLMo 3's own: each kind of layer has a rope, in the old spelling too."""

from __future__ import annotations

from families import small

from models.families.olmo3 import Olmo3Config
from models.rope_config import DefaultRope, YarnRope


def test_old_spelling() -> None:
    """What transformers 4.57 wrote: the scaling is that of the layers that see all."""
    config = small("olmo3").to_dict()
    del config["rope_parameters"]
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32}
    ropes = Olmo3Config.from_hugging_face(config | {"rope_theta": 7e5, "rope_scaling": scaling}).anatomy.ropes
    yarn = YarnRope(rope_theta=7e5, factor=8.0, original_max_position_embeddings=8)
    assert ropes == {"full_attention": yarn, "sliding_attention": DefaultRope(rope_theta=7e5)}
