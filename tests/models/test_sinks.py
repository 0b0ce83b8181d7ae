"""gpt-oss without its experts, beside transformers' class with dense networks: sinks, windows in turn, yarn, biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from families import in_float64
from test_transformers import close, move
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from models import builder, registry, rope_config
from models.anatomy import Anatomy, by_kind
from models.assemble import Model
from models.decoder import Microbatch
from models.decoder_config import DecoderConfig
from models.stages import layout_of
from parallel.mesh import Mesh
from parallel.weights.layout import MeshShape
from parallel.weights.schema import Param
from parallel.weights.transfer import hugging_face, native

SEQUENCES, LENGTH = 2, 11


@dataclass(frozen=True, kw_only=True)
class SinksConfig(DecoderConfig):
    family: ClassVar[str] = "sinks"
    architecture: ClassVar[str] = "GptOssForCausalLM"

    rms_norm_eps: float
    sliding_window: int
    layer_types: tuple[str, ...]

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(layers=by_kind(self.layer_types, self.sliding_window), norm_eps=self.rms_norm_eps)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=True, out_bias=True),
            (Param("layers.{layer}.attn.sinks", "heads", "model.layers.{layer}.self_attn.sinks", std=1),),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(),
            tied=False,
        )


class Sinks:
    """A family of the registry, for this test."""

    CONFIG = SinksConfig
    PRESETS: ClassVar[dict[str, Any]] = {}
    PARAMETERS: ClassVar[dict[str, int]] = {}
    build = staticmethod(builder.build)


class Dense(LlamaMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


def theirs_of(config: GptOssConfig) -> nn.Module:
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM._from_config(config, attn_implementation="eager")
    config.mlp_bias = False
    for layer in model.model.layers:
        layer.mlp = Dense(config)
    model.double().eval()
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    made: nn.Module = model
    return made


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_sinks_and_windows_in_turn(kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.__dict__, "family", lambda name: Sinks)
    sizes: dict[str, Any] = {
        "vocab_size": 17,
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_hidden_layers": 3,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": kv}
    config = GptOssConfig(**sizes, **heads, num_local_experts=2, sliding_window=3, max_position_embeddings=64)
    theirs, kinds = theirs_of(config), tuple(config.layer_types or ())
    rope = rope_config.from_hugging_face({"rope_parameters": config.rope_parameters})
    assert rope.rope_type == "yarn" and kinds[:2] == ("sliding_attention", "full_attention")
    ours = SinksConfig(
        **sizes,
        **heads,
        max_position_embeddings=64,
        rms_norm_eps=config.rms_norm_eps,
        sliding_window=3,
        layer_types=kinds,
        rope_parameters=rope,
    )
    layout = layout_of(ours, MeshShape())
    model = Model.create(ours, layout, Mesh.single(), torch.float64)
    state = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    assert state.keys() == {stored.name for stored in hugging_face(ours.schema)}
    with torch.no_grad():
        for name, array in move(ours.schema, state, hugging_face(ours.schema), native(layout, [0])).items():
            model.parameters[name].copy_(torch.from_numpy(array))

    tokens = torch.randint(17, (SEQUENCES, LENGTH))
    with in_float64():
        logits = theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    labels = tokens.roll(-1, 1).flatten()
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    batch = Microbatch(tokens.flatten(), labels, positions, SEQUENCES, (SEQUENCES * LENGTH, 12))
    found = model.logits(batch)
    assert found is not None
    close(found, logits.detach(), "logits")
    model.chunks[0](None, batch).backward()
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    for name, gradient in move(ours.schema, wanted, hugging_face(ours.schema), native(layout, [0])).items():
        own = model.parameters[name].grad
        assert own is not None
        close(own, torch.from_numpy(gradient), f"gradient of {name}")
