"""One process against transformers: logits and every gradient, in float64, for random tiny models of both families."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models import registry
from models.assemble import Model
from models.decoder import Microbatch
from models.gpt2 import ACTIVATIONS
from models.registry import FAMILIES
from models.rope_config import ROPE_TYPES
from models.stages import layout_of
from parallel.labels import IGNORE
from parallel.layout import MeshShape
from parallel.mesh import Mesh
from parallel.transfer import Stored, execute, hugging_face, native, plan

TOLERANCE = 1e-9
Arrays = Mapping[str, np.ndarray]
SEQUENCES, LENGTH = 2, 13


# transformers' RMSNorm casts to float32 even if the model is float64: its own formula without the casts, for the test.
def _float64_rms_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    scaled: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
    return scaled


def llama(seed: int) -> LlamaConfig:
    r = random.Random(seed)
    rope_type = sorted(ROPE_TYPES)[seed % len(ROPE_TYPES)]
    head_dim, kv = r.choice([4, 6, 8]), r.choice([1, 2, 4])
    heads = kv * r.choice([1, 2, 3])
    # Shorter than the sequence half of the time, which is where dynamic and longrope change.
    trained = r.choice([8, 32])
    rope: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 3.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "truncate": r.random() < 0.5},
        "longrope": {
            "short_factor": [r.uniform(1, 3) for _ in range(head_dim // 2)],
            "long_factor": [r.uniform(1, 30) for _ in range(head_dim // 2)],
            "original_max_position_embeddings": trained,
            "factor": 2.0,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }
    return LlamaConfig(
        vocab_size=r.choice([17, 64]),
        # Where the head size is not given, it follows from the hidden size.
        hidden_size=heads * (r.choice([3, 5]) if seed % 3 else head_dim),
        intermediate_size=r.choice([14, 31]),
        num_hidden_layers=r.choice([1, 2, 3]),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim if seed % 3 else None,
        max_position_embeddings=trained,
        rms_norm_eps=r.choice([1e-6, 1e-2]),
        attention_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.5,
        tie_word_embeddings=r.random() < 0.5,
        pad_token_id=(None, 5, -1)[seed % 3],
        rope_parameters={"rope_type": rope_type, "rope_theta": r.choice([10.0, 1e4])} | rope[rope_type],
    )


def gpt2(seed: int) -> GPT2Config:
    r = random.Random(seed)
    heads = r.choice([1, 2, 3])
    return GPT2Config(
        vocab_size=r.choice([17, 64]),
        n_positions=r.choice([LENGTH, 32]),
        n_embd=heads * r.choice([3, 8]),
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        n_inner=r.choice([None, 7, 40]),
        activation_function=ACTIVATIONS[seed % len(ACTIVATIONS)],
        layer_norm_epsilon=r.choice([1e-5, 1e-2]),
        tie_word_embeddings=r.random() < 0.6,
        pad_token_id=(None, 5)[seed % 2],
    )


DRAW: Mapping[str, tuple[Any, Any]] = {"llama": (llama, LlamaForCausalLM), "gpt2": (gpt2, GPT2LMHeadModel)}
CONFIGS = [
    pytest.param(family, seed, id=f"{family}-{seed}", marks=[pytest.mark.quick] * (seed < 2))
    for family in FAMILIES
    for seed in range(14)
]


def theirs_of(family: str, config: PretrainedConfig, seed: int) -> nn.Module:
    """Their model in float64 with every weight random: biases of zero and norms of one would hide mistakes."""
    torch.manual_seed(seed)
    # sdpa: the eager attention takes its softmax in float32 whatever the model's dtype.
    model: nn.Module = DRAW[family][1]._from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.3)
    return model


def move(schema: Any, arrays: Arrays, sources: Iterable[Stored], targets: Iterable[Stored]) -> dict[str, np.ndarray]:
    moved = {}
    for target, copies in plan(schema, sources, targets):
        moved[target.name] = np.zeros(target.shape)
        for copy in copies:
            execute(copy, arrays[copy.source.name], moved[target.name])
    return moved


def close(got: Tensor, want: Tensor, what: str) -> None:
    error = float((got - want).norm() / want.norm())
    assert error <= TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize(("family", "seed"), CONFIGS)
def test_logits_and_gradients(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", _float64_rms_norm)
    hf_config = DRAW[family][0](seed)
    theirs = theirs_of(family, hf_config, seed)
    config = registry.family(family).CONFIG.from_hugging_face(hf_config.to_dict())
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64)
    ours.train(False)
    (decoder,) = ours.chunks

    state = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    names = {stored.name for stored in hugging_face(config.schema)}
    assert names == set(state), "a tensor that one side does not know"
    mine = move(config.schema, state, hugging_face(config.schema), native(layout, [0]))
    with torch.no_grad():
        for name, array in mine.items():
            ours.parameters[name].copy_(torch.from_numpy(array))

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, LENGTH), generator=generator)
    labels = torch.randint(config.vocab_size, (SEQUENCES, LENGTH), generator=generator)
    labels[:, ::5] = IGNORE
    if hf_config.pad_token_id is not None:
        tokens[:, 4:6] = hf_config.pad_token_id % config.vocab_size
    want = theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    want_loss = F.cross_entropy(want, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    want_loss.backward()

    embed = config.sizes["embed"]
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    batch = Microbatch(tokens.flatten(), labels.flatten(), positions, SEQUENCES, (SEQUENCES * LENGTH, embed))
    assert decoder.head is not None
    with torch.no_grad():
        close(decoder.head(decoder.hidden(None, batch), None), want.detach(), "logits")
    loss = decoder(None, batch)
    loss.backward()
    close(loss.detach(), want_loss.detach(), "loss")

    theirs_gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    assert theirs_gradients.keys() == state.keys()
    gradients = move(config.schema, theirs_gradients, hugging_face(config.schema), native(layout, [0]))
    assert gradients.keys() == set(ours.parameters)
    for name, gradient in gradients.items():
        found = ours.parameters[name].grad
        assert found is not None
        # Of the fused tensor as a whole: a bias of the keys changes no softmax, its own gradient is rounding.
        close(found, torch.from_numpy(gradient), f"gradient of {name}")

    back = move(
        config.schema,
        {name: p.detach().numpy() for name, p in ours.parameters.items()},
        native(layout, [0]),
        hugging_face(config.schema),
    )
    assert all(np.array_equal(back[name], state[name]) for name in state)


def test_the_random_models_cover_what_they_should() -> None:
    llamas: list[Any] = [llama(seed) for seed in range(14)]
    gpts: list[Any] = [gpt2(seed) for seed in range(14)]
    assert {c.rope_parameters["rope_type"] for c in llamas} == set(ROPE_TYPES)
    for condition in (
        lambda c: c.num_key_value_heads < c.num_attention_heads,
        lambda c: c.num_key_value_heads == c.num_attention_heads,
        lambda c: c.tie_word_embeddings,
        lambda c: c.pad_token_id is None,
        lambda c: c.pad_token_id is not None and c.tie_word_embeddings,
        lambda c: c.pad_token_id is not None and not c.tie_word_embeddings,
        lambda c: c.attention_bias,
        lambda c: c.mlp_bias,
        lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
        lambda c: c.max_position_embeddings < LENGTH,
    ):
        assert 0 < sum(map(condition, llamas)) < 14
    assert {c.activation_function for c in gpts} == set(ACTIVATIONS)
    assert {c.n_inner for c in gpts} == {None, 7, 40}
    assert {c.tie_word_embeddings for c in gpts} == {True, False}
