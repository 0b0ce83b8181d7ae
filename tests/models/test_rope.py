"""Rotary embeddings against transformers, for every type and both spellings of a config."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from draws import draw_rope, draw_ropes
from operators import kept_for_backward
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.persimmon.modeling_persimmon import PersimmonRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from megacore.models import rope as rope_module
from megacore.models.decoder import Decoder, Microbatch
from megacore.models.rope import Rotary, inverse_frequencies, tables
from megacore.models.rope_config import (
    ROPE_TYPES,
    Convention,
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    Spelling,
    YarnRope,
    by_kind,
    by_kind_to_hugging_face,
    from_hugging_face,
    override,
    override_by_kind,
    partial_rotary_factor,
    to_hugging_face,
)
from megacore.parallel.kernels.rotation import apply, split_and_apply

_FIELDS = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text())
FLOAT64_AND_32 = [torch.float64, torch.float32]
QKV_SHAPES = [  # leading, t, heads, kv, head_dim, turning
    ((), 5, 4, 2, 8, 8),
    ((3,), 7, 2, 2, 6, 6),
    ((2, 2), 4, 3, 1, 2, 2),
    ((), 5, 4, 2, 8, 6),
    ((3,), 7, 2, 1, 6, 2),
]

# What the families' classes say where a file says nothing, and by which names.
PARTIAL_FAMILIES: dict[str, tuple[Any, Convention]] = {
    "gpt_neox": (
        GPTNeoXRotaryEmbedding,
        Convention(partial_rotary_factor=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct"),
    ),
    "phi": (PhiRotaryEmbedding, Convention(partial_rotary_factor=0.5)),
    "stablelm": (StableLmRotaryEmbedding, Convention(partial_rotary_factor=0.25)),
    "nemotron": (NemotronRotaryEmbedding, Convention(partial_rotary_factor=0.5)),
    "glm": (GlmRotaryEmbedding, Convention(partial_rotary_factor=0.5)),
    "glm4": (Glm4RotaryEmbedding, Convention(partial_rotary_factor=0.5)),
    "persimmon": (PersimmonRotaryEmbedding, Convention(partial_rotary_factor=0.5)),
    "phi3": (
        Phi3RotaryEmbedding,
        Convention(
            partial_rotary_factor=1.0,
            original_max_position_embeddings=4096,
            rope_types={"su": "longrope", "yarn": "longrope"},
        ),
    ),
}
PHI3 = PARTIAL_FAMILIES["phi3"][1]
GPT_OSS = Convention(
    rope_theta=150000.0,
    parameters={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
)
NESTED: dict[str, tuple[str, Any, dict[str, Convention]]] = {
    "gemma3": (
        "gemma3_text",
        Gemma3RotaryEmbedding,
        {
            "full_attention": Convention(rope_theta=1e6),
            "sliding_attention": Convention(rope_theta=1e4, theta_key="rope_local_base_freq", scaled=False),
        },
    ),
    "olmo3": (
        "olmo3",
        Olmo3RotaryEmbedding,
        {"full_attention": Convention(rope_theta=5e5), "sliding_attention": Convention(rope_theta=5e5, scaled=False)},
    ),
}
GEMMA3 = NESTED["gemma3"][2]


def linear(factor: float, theta: float = 1e5, **more: Any) -> LinearRope:
    return LinearRope(rope_theta=theta, factor=factor, **more)


def yarn(factor: float, original: int, **more: Any) -> YarnRope:
    return YarnRope(factor=factor, original_max_position_embeddings=original, **more)


def llama3(factor: float, original: int, low: float = 1.0, high: float = 4.0, **more: Any) -> Llama3Rope:
    more |= {"original_max_position_embeddings": original}
    return Llama3Rope(factor=factor, low_freq_factor=low, high_freq_factor=high, **more)


def longrope(short: tuple[float, ...], long: tuple[float, ...], factor: float, original: int, **more: Any) -> LongRope:
    more |= {"original_max_position_embeddings": original}
    return LongRope(short_factor=short, long_factor=long, factor=factor, **more)


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN2 = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def draw(rope_type: str, seed: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Random (rope_parameters without type and theta, config around them, head_dim)."""
    r = random.Random(f"{rope_type} {seed}")
    head_dim = r.choice([4, 6, 16, 64, 80, 128])
    length = r.choice([32, 48, 2048])
    original = r.choice([16, 24, 31, 2000])
    some = lambda **fields: {name: value for name, value in fields.items() if r.random() < 0.6}  # noqa: E731
    factors = lambda: [r.uniform(1, 30) for _ in range(head_dim // 2)]  # noqa: E731
    factor = r.choice([1, 2, 8.0, 2.3, r.uniform(1, 40)])
    parameters: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": factor}
        | some(original_max_position_embeddings=original, attention_factor=r.uniform(0.5, 2), truncate=r.random() < 0.5)
        | some(beta_fast=r.uniform(4, 64), beta_slow=r.uniform(0.2, 4))
        | some(mscale=r.uniform(0.5, 2), mscale_all_dim=r.uniform(0.5, 2)),
        "longrope": {"short_factor": factors(), "long_factor": factors()}
        | some(factor=factor, attention_factor=r.uniform(0.5, 2), original_max_position_embeddings=original),
        "llama3": {"factor": factor, "low_freq_factor": r.uniform(0.5, 2), "high_freq_factor": r.uniform(2.1, 8)}
        | {"original_max_position_embeddings": original},
        "proportional": some(factor=factor, partial_rotary_factor=r.uniform(0.1, 1)),
    }
    theta = r.choice([100.0, 10000, 10000.0, 500000.0, r.uniform(100, 1e6)])
    return parameters[rope_type], {"max_position_embeddings": length, "rope_theta": theta}, head_dim


def new(rope_type: str, parameters: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    inside = {"rope_type": rope_type, "rope_theta": config["rope_theta"]} | parameters
    return {"max_position_embeddings": config["max_position_embeddings"], "rope_parameters": inside}


def old(rope_type: str, parameters: dict[str, Any], config: dict[str, Any], key: str = "type") -> dict[str, Any]:
    return config | {"rope_scaling": {key: rope_type} | parameters}


def transformers_tables(config: dict[str, Any], head_dim: int, tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    theirs = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=head_dim, **config)
    return LlamaRotaryEmbedding(theirs)(torch.empty(0, dtype=dtype), torch.arange(tokens)[None])


def check(rope: Rope, head_dim: int, tokens: int, theirs: Any, dtype: torch.dtype = torch.float32) -> None:
    """Tables are bitwise theirs: (cos, sin), each [1, tokens, two halves that are the same]."""
    ours = tables(rope, head_dim, torch.arange(tokens), sequence_length=tokens, dtype=dtype)
    for our, their in zip(ours, theirs, strict=True):
        assert our.shape == (tokens, their.shape[-1] // 2) and our.dtype == dtype
        assert torch.equal(our, their[0, :, : their.shape[-1] // 2])


# -- frequencies and tables


def test_every_type_of_transformers_is_known() -> None:
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    assert all(kind.rope_type == name for name, kind in ROPE_TYPES.items())


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_tables_are_bitwise_those_of_transformers(rope_type: str, seed: int) -> None:
    parameters, config, head_dim = draw(rope_type, seed)
    rope = from_hugging_face(new(rope_type, parameters, config))
    for spelling in (new, old):
        for length in (16, 40, 100):  # up to, between and beyond the original and the trained length
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                theirs = transformers_tables(spelling(rope_type, parameters, config), head_dim, length, dtype)
                check(rope, head_dim, length, theirs, dtype)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [(32, 1), (3, 0.01), (1, 1), (500, 400), (500, 330), (0.01, 0.001)])
def test_the_ramp_of_yarn_at_its_ends(betas: tuple[float, float], truncate: bool) -> None:
    """Within the frequencies, reaching beyond the last one, of length 0, and wholly outside."""
    parameters = {"factor": 4.0, "original_max_position_embeddings": 2048, "truncate": truncate}
    parameters |= dict(zip(("beta_fast", "beta_slow"), betas, strict=True))
    config = new("yarn", parameters, {"max_position_embeddings": 8192, "rope_theta": 100.0})
    check(from_hugging_face(config), 64, 16, transformers_tables(config, 64, 16))


def test_the_seeds_tell_types_and_lengths_apart() -> None:
    """The comparison above would be idle if every case gave the plain frequencies."""
    plain = inverse_frequencies(DefaultRope(), 64, 100)[0]
    ones, twos = (1.0,) * 32, (2.0,) * 32
    ropes: list[Rope] = [
        LinearRope(factor=2),
        DynamicRope(factor=2, max_position_embeddings=32),
        yarn(2, 32),
        longrope(ones, twos, 2, 32),
        llama3(2, 32),
        ProportionalRope(partial_rotary_factor=0.5),
    ]
    for rope in ropes:
        assert not torch.equal(inverse_frequencies(rope, 64, 100)[0], plain), rope
        by_length = not torch.equal(inverse_frequencies(rope, 64, 100)[0], inverse_frequencies(rope, 64, 20)[0])
        assert by_length == isinstance(rope, DynamicRope | LongRope), rope


def test_the_length_is_that_of_the_sequence_and_not_of_the_positions() -> None:
    """A rank that holds a part of a sequence asks for its own positions and gets the rows of the whole."""
    for rope in (DynamicRope(factor=4, max_position_embeddings=8), DefaultRope()):
        whole = tables(rope, 16, torch.arange(32), sequence_length=32, dtype=torch.float64)
        part = tables(rope, 16, torch.tensor([3, 4, 30]), sequence_length=32, dtype=torch.float64)
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a[[3, 4, 30]], b)


def test_rotary_keeps_its_tables_for_each_length() -> None:
    rotary = Rotary(DynamicRope(factor=4, max_position_embeddings=8), 16)
    cpu = torch.device("cpu")
    for length, dtype in [(32, torch.float64), (16, torch.float64), (32, torch.float32)]:
        expected = tables(rotary.rope, 16, torch.arange(length), sequence_length=length, dtype=dtype)
        for our, their in zip(rotary(length, dtype, cpu), expected, strict=True):
            assert our.dtype == dtype
            assert torch.equal(our, their)
    assert rotary(32, torch.float64, cpu)[0] is rotary(32, torch.float64, cpu)[0]


# -- parts of heads


def of_family(model_type: str, head_dim: int, config: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(
        model_type, hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, pad_token_id=0, **config
    )


def types_of(family: str) -> list[str]:
    return ["default", "longrope"] if family == "phi3" else [name for name in ROPE_TYPES if name != "proportional"]


PARTIAL_CASES = [(family, rope_type) for family in PARTIAL_FAMILIES for rope_type in types_of(family)]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("family", "rope_type"), PARTIAL_CASES)
def test_parts_of_heads_have_the_tables_of_transformers(family: str, rope_type: str) -> None:
    embedding, convention = PARTIAL_FAMILIES[family]
    for seed in range(4):
        r = random.Random(f"{family} {rope_type} {seed}")
        head_dim, length = r.choice([16, 64, 80, 96]), r.choice([32, 48, 2048])
        said = draw_rope(r, head_dim, length, convention, [rope_type])
        config = {"max_position_embeddings": length, "rope_parameters": said}
        rope = from_hugging_face(config, convention)
        assert rope.turning(head_dim) == int(head_dim * said["partial_rotary_factor"])
        for spelling in ("rope_parameters", "rope_scaling"):
            written = {"max_position_embeddings": length} | to_hugging_face(rope, spelling, convention)
            assert from_hugging_face(written, convention) == rope
            theirs = of_family(family, head_dim, written)
            assert from_hugging_face(theirs.to_dict(), convention) == rope
            for tokens in (16, 40, 100):
                made = embedding(theirs)(torch.empty(0), torch.arange(tokens)[None])
                assert made[0].shape[-1] == rope.turning(head_dim)
                check(rope, head_dim, tokens, made)


def test_a_number_of_dimensions_as_a_factor() -> None:
    """As GPT-J says it. 0.29 * 100 is 28.999999999999996."""
    for head_dim in range(2, 513):
        for turning in range(2, head_dim + 1, 2):
            part = partial_rotary_factor(turning, head_dim)
            assert DefaultRope(partial_rotary_factor=part).turning(head_dim) == turning
    sin, cos = create_sinusoidal_positions(32, 64).chunk(2, -1)
    rope = DefaultRope(partial_rotary_factor=partial_rotary_factor(64, 256))
    ours = tables(rope, 256, torch.arange(32), sequence_length=32, dtype=torch.float32)
    assert torch.equal(ours[0], cos) and torch.equal(ours[1], sin)


# -- several ropes


def tables_by_kind(family: str, config: dict[str, Any], head_dim: int, tokens: int) -> None:
    model_type, embedding, kinds = NESTED[family]
    theirs = of_family(model_type, head_dim, config | {"num_hidden_layers": 12, "sliding_window": 8})
    made, positions = embedding(theirs), torch.arange(tokens)
    for kind, rope in by_kind(config, kinds).items():
        check(rope, head_dim, tokens, made(torch.empty(0), positions[None], kind))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", NESTED)
def test_each_kind_of_layer_has_the_tables_of_transformers(family: str, seed: int) -> None:
    _, _, kinds = NESTED[family]
    r = random.Random(seed)
    config = {"max_position_embeddings": 32, "rope_parameters": draw_ropes(r, dict.fromkeys(kinds, 16), 32, kinds)}
    ropes = by_kind(config, kinds)
    assert by_kind({"max_position_embeddings": 32} | by_kind_to_hugging_face(ropes, kinds), kinds) == ropes
    for tokens in (16, 40):
        tables_by_kind(family, config, 16, tokens)


OLD_BY_KIND = [
    ("gemma3", {}),
    ("gemma3", {"rope_theta": 1e5, "rope_local_base_freq": 50.0}),
    ("gemma3", {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3", {"rope_local_base_freq": 50.0, "rope_scaling": None}),
    ("olmo3", {}),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}}),
]


@pytest.mark.parametrize(("family", "said"), OLD_BY_KIND)
def test_kinds_of_layers_in_the_old_spelling(family: str, said: dict[str, Any]) -> None:
    kinds, length = NESTED[family][2], {"max_position_embeddings": 32}
    tables_by_kind(family, length | said, 16, 40)
    ropes = by_kind(length | said, kinds)
    written = by_kind_to_hugging_face(ropes, kinds, "rope_scaling")
    assert "rope_parameters" not in written
    assert by_kind(length | written, kinds) == ropes


def test_what_the_old_spelling_has_no_place_for() -> None:
    gemma = {"full_attention": DefaultRope(), "sliding_attention": LinearRope(factor=2.0)}
    with pytest.raises(ValueError, match="rope_scaling cannot say the 'linear' of sliding_attention"):
        by_kind_to_hugging_face(gemma, GEMMA3, "rope_scaling")
    olmo = {"full_attention": DefaultRope(), "sliding_attention": DefaultRope(rope_theta=7.0)}
    with pytest.raises(ValueError, match="sliding_attention has another rope_theta than the other layers"):
        by_kind_to_hugging_face(olmo, NESTED["olmo3"][2], "rope_scaling")


def test_a_model_of_several_ropes() -> None:
    """Each has its own tables, at the microbatch's positions or by the lengths of its documents."""
    tokens = torch.zeros(12, dtype=torch.int64)
    ropes = {"near": DefaultRope(rope_theta=50.0), "far": DynamicRope(factor=4, max_position_embeddings=4)}
    rotaries = {name: Rotary(rope, 8) for name, rope in ropes.items()}
    decoder = Decoder(None, {}, None, torch.float32, (0,), rotaries)
    positions = torch.tensor([*range(6), *range(6)])
    whole = Microbatch(tokens, tokens, positions, 2, (12, 8))
    parts = replace(whole, documents=(6, 6), lengths=(6, 9))
    for name, rope in ropes.items():
        for batch, lengths in ((whole, (6, 6)), (parts, (6, 9))):
            made = [tables(rope, 8, torch.arange(6), sequence_length=n, dtype=torch.float32) for n in lengths]
            for our, theirs in zip(decoder.context(batch).rotations[name], zip(*made, strict=True), strict=True):
                assert torch.equal(our, torch.cat(theirs)), name
    assert Decoder(None, {}, None, torch.float32, (0,)).context(whole).rotations == {}


# -- applying them


def textbook(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """transformers' own, for x: [..., t, heads, head_dim], of which a part may turn."""
    cos, sin = (torch.cat((table, table), -1) for table in (cos, sin))
    return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)[0]


def some_tables(t: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tables(DefaultRope(rope_theta=50.0), head_dim, torch.arange(t), sequence_length=t, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOAT64_AND_32)
@pytest.mark.parametrize(("leading", "t", "heads", "kv", "head_dim", "turning"), QKV_SHAPES)
def test_split_and_apply_and_its_gradient(
    leading: tuple[int, ...], t: int, heads: int, kv: int, head_dim: int, turning: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(*leading, t, (heads + 2 * kv) * head_dim, dtype=dtype, requires_grad=True)
    cos, sin = some_tables(t, turning, dtype)
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv, kv], dim=-2)
    expected = textbook(q, cos, sin), textbook(k, cos, sin), v
    grads = [torch.randn_like(out) for out in expected]
    (expected_grad,) = torch.autograd.grad(expected, qkv, grads)
    for name, ours in {
        "split_and_apply": split_and_apply(qkv, cos, sin, heads, kv),
        "apply": (apply(q, cos, sin), apply(k, cos, sin), v),  # q and k are strided views
    }.items():
        for our, their in zip(ours, expected, strict=True):
            torch.testing.assert_close(our, their, msg=f"the outputs of {name} differ")
        (grad,) = torch.autograd.grad(ours, qkv, grads)
        torch.testing.assert_close(grad, expected_grad, msg=f"the gradients of {name} differ")


def test_gradients_of_strided_and_partial_outputs() -> None:
    """Gradients may arrive transposed, expanded, or not at all."""
    cos, sin = some_tables(4, 6, torch.float64)
    x = torch.randn(2, 4, 3, 6, dtype=torch.float64, requires_grad=True)
    qkv = torch.randn(2, 4, 5 * 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply(x, cos, sin).transpose(-2, -3).sum((0, 1)), x)
    assert torch.autograd.gradcheck(lambda x: split_and_apply(x, cos, sin, 3, 1), qkv)
    assert torch.autograd.gradcheck(lambda x: split_and_apply(x, cos, sin, 3, 1)[1], qkv)
    cos, sin = some_tables(4, 4, torch.float64)  # of 6
    assert torch.autograd.gradcheck(lambda x: apply(x, cos, sin).transpose(-2, -3).sum((0, 1)), x)
    assert torch.autograd.gradcheck(lambda x: split_and_apply(x, cos, sin, 3, 1), qkv)


def test_input_is_neither_changed_nor_kept() -> None:
    cos, sin = some_tables(4, 8, torch.float64)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: apply(x.unflatten(-1, (4, 8)), cos, sin),
        lambda x: split_and_apply(x, cos, sin, 2, 1)[0],
    ]
    for call in calls:
        x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
        before = x.detach().clone()
        with kept_for_backward() as kept:
            out = call(x)
        assert torch.equal(x, before)
        assert {tensor.data_ptr() for tensor in kept} == {cos.data_ptr(), sin.data_ptr()}
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_bfloat16_is_as_close_as_transformers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 4, 32)
    exact = textbook(x.double(), *some_tables(64, 32, torch.float64))
    low = x.bfloat16(), *some_tables(64, 32, torch.bfloat16)
    ours, theirs = apply(*low), textbook(*low)
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).abs().mean() <= 1.02 * (theirs.double() - exact).abs().mean()


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("turning", [8, 6])
def test_compiles_without_a_graph_break(turning: int) -> None:
    cos, sin = some_tables(4, turning, torch.float64)
    qkv = torch.randn(2, 4, 32, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(split_and_apply, fullgraph=True, backend="aot_eager")
    expected, ours = split_and_apply(qkv, cos, sin, 2, 1), compiled(qkv, cos, sin, 2, 1)
    grads = [torch.randn_like(out) for out in expected]
    for our, their in zip(ours, expected, strict=True):
        torch.testing.assert_close(our, their)
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, grads), torch.autograd.grad(expected, qkv, grads))
    q = torch.randn(4, 2, 8, dtype=torch.float64)
    turned = torch.compile(apply, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(turned(q, cos, sin), apply(q, cos, sin))


# -- the config, in both spellings


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_both_spellings_read_and_write(rope_type: str, seed: int) -> None:
    parameters, config, head_dim = draw(rope_type, seed)
    rope = from_hugging_face(new(rope_type, parameters, config))
    assert type(rope) is ROPE_TYPES[rope_type]
    assert rope.problems(head_dim) == []
    assert from_hugging_face(old(rope_type, parameters, config)) == rope
    assert from_hugging_face(old(rope_type, parameters, config, key="rope_type")) == rope
    length = {"max_position_embeddings": config["max_position_embeddings"]}
    assert from_hugging_face(length | to_hugging_face(rope)) == rope
    assert from_hugging_face(length | to_hugging_face(rope, "rope_scaling")) == rope
    written = to_hugging_face(rope)["rope_parameters"]
    assert None not in written.values()
    for name, value in parameters.items():
        assert written.get(name, 1.0 if name == "factor" else None) == value  # nothing given is lost
    read_back = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=head_dim, **length, rope_parameters=written)
    assert from_hugging_face(read_back.to_dict()) == rope


def test_published_configs() -> None:
    llama_2 = {"max_position_embeddings": 4096, "rope_scaling": None}
    assert from_hugging_face(llama_2) == DefaultRope(rope_theta=10000.0)
    assert from_hugging_face(llama_2 | {"rope_theta": 500000.0}) == DefaultRope(rope_theta=500000.0)
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    llama_31 = {"max_position_embeddings": 131072, "rope_scaling": scaling, "rope_theta": 500000.0}
    assert from_hugging_face(llama_31) == LLAMA3_1
    assert to_hugging_face(LLAMA3_1, "rope_scaling") == {"rope_theta": 500000.0, "rope_scaling": scaling}


def test_what_may_be_left_out() -> None:
    base = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    found = from_hugging_face(base | {"rope_scaling": {"type": "yarn", "factor": None}})
    assert found == yarn(4.0, 16)
    nulls = {"rope_type": "yarn", "type": "yarn", "factor": 2.0, "mscale": None, "partial_rotary_factor": 1.0}
    same = from_hugging_face({"max_position_embeddings": 64, "rope_parameters": nulls})
    assert same == yarn(2.0, 64)
    assert from_hugging_face({"rope_parameters": LINEAR, "rope_scaling": LINEAR}) == LinearRope(factor=2.0)


WHOLE = ("partial_rotary_factor", 1.0)
"""What need not be said."""
DEFAULTS = {family: convention for family, (_, convention) in PARTIAL_FAMILIES.items()} | {"gpt_oss": GPT_OSS}


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_a_family_means_by_saying_nothing(family: str) -> None:
    theirs, convention = AutoConfig.for_model(family), DEFAULTS[family]
    if original := convention.original_max_position_embeddings:
        assert original == theirs.original_max_position_embeddings
        found = from_hugging_face({"max_position_embeddings": 2 * original, "rope_scaling": LONG}, convention)
        assert isinstance(found, LongRope) and (found.original_max_position_embeddings, found.factor) == (original, 2.0)
    length = {"max_position_embeddings": theirs.max_position_embeddings}
    ours = from_hugging_face(length, convention)
    wanted = {field: value for field, value in theirs.rope_parameters.items() if (field, value) != WHOLE}
    assert to_hugging_face(ours, convention=convention)["rope_parameters"] == wanted
    assert from_hugging_face(theirs.to_dict(), convention) == ours


@pytest.mark.parametrize("family", NESTED)
def test_what_a_family_means_by_saying_nothing_of_kinds(family: str) -> None:
    model_type, _, kinds = NESTED[family]
    theirs = AutoConfig.for_model(model_type)
    ours = by_kind({"max_position_embeddings": theirs.max_position_embeddings}, kinds)
    assert by_kind_to_hugging_face(ours, kinds)["rope_parameters"] == theirs.rope_parameters


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_the_longrope_of_phi3_by_its_names(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.5] * 3, "long_factor": [3.0] * 3}
    config: dict[str, Any] = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config |= {"partial_rotary_factor": 0.75, "rope_theta": 1e4, "rope_scaling": scaling}
    rope = from_hugging_face(config, PHI3)
    assert rope == longrope((1.5,) * 3, (3.0,) * 3, 4.0, 16, partial_rotary_factor=0.75)
    written = {"max_position_embeddings": 64} | to_hugging_face(rope, convention=PHI3)
    # transformers 5.23 knows "su" by name, and then refuses to load it.
    said = [written] if name == "su" else [written, config]
    embeddings = [Phi3RotaryEmbedding(cast(Any, of_family("phi3", 8, each))) for each in said]
    for tokens in (16, 17):
        for made in embeddings:
            check(rope, 8, tokens, made(torch.empty(0), torch.arange(tokens)[None]))


LLAMA3_1 = llama3(8.0, 8192, rope_theta=5e5)
PARTIAL = ProportionalRope(rope_theta=1e5, factor=2.0, partial_rotary_factor=0.5)
OVERRIDES: list[tuple[Rope, dict[str, Any], Rope]] = [
    # The type and its numbers, by either name: theta stays.
    (DefaultRope(rope_theta=1e5), {"rope_scaling": LINEAR}, linear(2.0)),
    (DefaultRope(rope_theta=1e5), {"rope_parameters": LINEAR}, linear(2.0)),
    (LLAMA3_1, {"rope_scaling": {"type": "linear", "factor": 2.0}}, linear(2.0, 5e5)),
    (LLAMA3_1, {"rope_scaling": None}, DefaultRope(rope_theta=5e5)),
    (LLAMA3_1, {"rope_parameters": {}}, DefaultRope(rope_theta=5e5)),
    (LLAMA3_1, {"rope_parameters": {"rope_type": "default"}}, DefaultRope(rope_theta=5e5)),
    # An original length is a number of its type: the new type has its own, which is that of the model.
    (LLAMA3_1, {"rope_scaling": YARN2}, yarn(2.0, 64, rope_theta=5e5)),
    # Theta alone, or with the type.
    (LLAMA3_1, {"rope_theta": 7.0}, replace(LLAMA3_1, rope_theta=7.0)),
    (LLAMA3_1, {"rope_theta": None}, replace(LLAMA3_1, rope_theta=10000.0)),
    (LLAMA3_1, {"rope_parameters": {"rope_theta": 7.0}}, replace(LLAMA3_1, rope_theta=7.0)),
    (LLAMA3_1, {"rope_theta": 7.0, "rope_scaling": LINEAR}, linear(2.0, 7.0)),
    (LLAMA3_1, {"rope_parameters": LINEAR | {"rope_theta": 7.0}}, linear(2.0, 7.0)),
    # Numbers of the type that is there.
    (LLAMA3_1, {"rope_scaling": {"factor": 32.0}}, replace(LLAMA3_1, factor=32.0)),
    (LLAMA3_1, {"original_max_position_embeddings": 16}, replace(LLAMA3_1, original_max_position_embeddings=16)),
    (PARTIAL, {"rope_theta": 7.0}, replace(PARTIAL, rope_theta=7.0)),
    (PARTIAL, {"partial_rotary_factor": 0.25}, replace(PARTIAL, partial_rotary_factor=0.25)),
    (PARTIAL, {"rope_scaling": {"rope_type": "proportional", "factor": 3.0}}, replace(PARTIAL, factor=3.0)),
    (PARTIAL, {"rope_scaling": LINEAR, "partial_rotary_factor": None}, linear(2.0)),
    # Nothing of it.
    (LLAMA3_1, {"hidden_size": 8}, LLAMA3_1),
]


@pytest.mark.quick
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("before", "given", "after"), OVERRIDES, ids=[str(given) for _, given, _ in OVERRIDES])
def test_what_is_not_overridden_stays(before: Rope, given: dict[str, Any], after: Rope, spelling: Spelling) -> None:
    base = {"max_position_embeddings": 64} | to_hugging_face(before, spelling)
    made = override(base, given)
    assert from_hugging_face(made) == after
    assert ("rope_parameters" in made) == (spelling == "rope_parameters"), "a folder keeps its spelling"


UNSAID = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0}
STRETCHED: list[tuple[dict[str, Any], dict[str, Any], Rope]] = [
    # (the base's rope, what is said of it beside 128 positions, what it is then)
    ({}, YARN2, yarn(2.0, 64, rope_theta=1e5)),
    ({}, LLAMA3, llama3(8.0, 64, rope_theta=1e5)),
    ({}, LONG, longrope((1.0,), (2.0,), 2.0, 64, rope_theta=1e5)),
    # The longer model may name it, and a base that does not name its own keeps it.
    ({}, YARN2 | {"original_max_position_embeddings": 16}, yarn(2.0, 16, rope_theta=1e5)),
    (UNSAID, {}, yarn(4.0, 64, rope_theta=1e5)),
    (UNSAID, {"factor": 8.0}, yarn(8.0, 64, rope_theta=1e5)),
    # Others have none.
    ({}, {}, DefaultRope(rope_theta=1e5)),
    ({}, LINEAR, linear(2.0)),
]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("before", "given", "after"), STRETCHED, ids=[str(given) for _, given, _ in STRETCHED])
def test_the_original_length_is_the_bases(
    before: dict[str, Any], given: dict[str, Any], after: Rope, spelling: Spelling
) -> None:
    """Where a model is taken to more positions, theta stays, and an original length that nobody names."""
    held = {"rope_theta": 1e5} | before
    base: dict[str, Any] = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"} | held}
    if spelling == "rope_scaling":
        base = {"max_position_embeddings": 64, "rope_theta": 1e5, "rope_scaling": before or None}
    for name in ("rope_scaling", "rope_parameters"):
        made = override(base, {"max_position_embeddings": 128} | ({name: given} if given else {}))
        assert from_hugging_face(made) == after and made["max_position_embeddings"] == 128
        assert ("rope_parameters" in made) == (spelling == "rope_parameters")
    if not before and not given:
        assert made == base | {"max_position_embeddings": 128}, "what has no original length is left as it is written"


def test_the_original_length_is_the_bases_in_each_kind() -> None:
    config = {"max_position_embeddings": 64, "rope_theta": 1e5, "rope_local_base_freq": 50.0}
    longer = {"max_position_embeddings": 128}
    made = by_kind(override_by_kind(config, longer | {"rope_scaling": YARN2}, GEMMA3), GEMMA3)
    assert made == {GLOBAL: yarn(2.0, 64, rope_theta=1e5), LOCAL: DefaultRope(rope_theta=50.0)}
    assert override_by_kind(config, longer, GEMMA3) == config | longer
    assert by_kind(override_by_kind(config | {"rope_scaling": YARN2}, longer, GEMMA3), GEMMA3) == made


def test_a_length_beside_the_scaling_stays() -> None:
    """As Phi-3 spells it; what the fields name themselves counts."""
    base = {"original_max_position_embeddings": 16, "max_position_embeddings": 64, "rope_theta": 1e5}
    for said, original in ((YARN2, 16), (YARN2 | {"original_max_position_embeddings": 32}, 32)):
        assert from_hugging_face(override(base, {"rope_scaling": said})) == yarn(2.0, original, rope_theta=1e5)


@pytest.mark.parametrize(
    ("base", "given", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 1e4}, {"rope_scaling": LINEAR}, "disagree"),
        ({"rope_theta": 1e4}, {"rope_scaling": LINEAR | {"rope_theta": 2.0}, "rope_theta": 3.0}, "given twice"),
        ({"rope_theta": 1e4}, {"rope_scaling": "linear"}, "rope_scaling is 'linear': it must be a mapping"),
        ({"rope_theta": 1e4}, {"rope_scaling": {"factor": 2.0}}, "rope_type 'default' has no field 'factor'"),
        (to_hugging_face(PARTIAL), {"rope_scaling": LINEAR}, "'linear' has no field 'partial_rotary_factor'"),
    ],
)
def test_an_override_hides_no_contradiction(base: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hugging_face(override(base, given))


def test_an_override_by_other_names() -> None:
    neox = PARTIAL_FAMILIES["gpt_neox"][1]
    base = {"max_position_embeddings": 64, "rotary_emb_base": 1e5, "rotary_pct": 0.5}
    half = DefaultRope(rope_theta=1e5, partial_rotary_factor=0.5)
    cases: list[tuple[dict[str, Any], Rope]] = [
        ({"rotary_pct": 1.0}, replace(half, partial_rotary_factor=1.0)),
        ({"rotary_emb_base": 7.0}, replace(half, rope_theta=7.0)),
        ({"rotary_pct": None}, replace(half, partial_rotary_factor=0.25)),
        ({"rope_scaling": LINEAR}, linear(2.0, partial_rotary_factor=0.5)),
        ({"hidden_size": 8}, half),
    ]
    for given, after in cases:
        made = override(base, given, neox)
        assert from_hugging_face(made, neox) == after
        assert "rope_parameters" not in made and "rope_theta" not in made
    # The family's own scaling stays until it is taken away, and then it does not come back.
    assert from_hugging_face(override({}, {"rope_theta": 7.0}, GPT_OSS), GPT_OSS).rope_theta == 7.0
    for base in ({}, {"rope_theta": 1e5}):
        made = override({"max_position_embeddings": 64} | base, {"rope_scaling": None}, GPT_OSS)
        assert type(from_hugging_face(made, GPT_OSS)) is DefaultRope
    # Phi-3 says its original length at the top level, whatever its rope.
    phi = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": LONG}
    written = to_hugging_face(from_hugging_face(phi, PHI3), convention=PHI3)
    for spelled in (phi, {"max_position_embeddings": 64} | written):
        assert from_hugging_face(override(spelled, {"rope_scaling": None}, PHI3), PHI3) == DefaultRope()


GLOBAL, LOCAL = "full_attention", "sliding_attention"
OVERRIDES_BY_KIND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_parameters": {GLOBAL: LINEAR}}, {GLOBAL: linear(2.0)}),
    ({"rope_parameters": {LOCAL: {"rope_theta": 7.0}}}, {LOCAL: DefaultRope(rope_theta=7.0)}),
    ({"rope_local_base_freq": 7.0}, {LOCAL: DefaultRope(rope_theta=7.0)}),
    ({"rope_theta": 7.0}, {GLOBAL: linear(8.0, 7.0)}),
    ({"rope_scaling": {"factor": 3.0}}, {GLOBAL: linear(3.0)}),
    ({"rope_scaling": None}, {GLOBAL: DefaultRope(rope_theta=1e5)}),
    ({"rope_parameters": None}, {GLOBAL: DefaultRope(rope_theta=1e5)}),
    ({"hidden_size": 8}, {}),
]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("given", "after"), OVERRIDES_BY_KIND, ids=[str(given) for given, _ in OVERRIDES_BY_KIND])
def test_what_is_not_overridden_stays_in_each_kind(
    given: dict[str, Any], after: dict[str, Rope], spelling: Spelling
) -> None:
    ropes: dict[str, Rope] = {GLOBAL: linear(8.0), LOCAL: DefaultRope(rope_theta=50.0)}
    base = {"max_position_embeddings": 64} | by_kind_to_hugging_face(ropes, GEMMA3, spelling)
    assert by_kind(override_by_kind(base, given, GEMMA3), GEMMA3) == ropes | after


@pytest.mark.parametrize(("config", "message"), _FIELDS["ropes_of_kinds"])
def test_what_cannot_be_read_of_a_kind_is_named(config: dict[str, Any], message: str) -> None:
    for given in (config, override_by_kind({}, config, GEMMA3)):
        with pytest.raises(ValueError) as error:
            by_kind(given, GEMMA3)
        assert message in str(error.value)


@pytest.mark.parametrize(("config", "message"), _FIELDS["ropes"])
def test_what_cannot_be_read_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        from_hugging_face({"max_position_embeddings": 64} | config)
    assert message in str(error.value)


def test_all_problems_of_reading_come_together() -> None:
    broken = {"rope_type": "llama3", "factors": 8.0, "lowfreq_factor": 1.0}
    message = r"'factors'.*'lowfreq_factor'.*'factor'.*'low_freq_factor'.*'high_freq_factor'"
    with pytest.raises(ValueError, match=message):
        from_hugging_face({"max_position_embeddings": 64, "rope_parameters": broken})


@pytest.mark.parametrize(
    ("rope", "head_dim", "message"),
    [
        (DefaultRope(), 7, "head_dim 7 is odd"),
        (DefaultRope(rope_theta=0), 8, "rope_theta is 0: it must be a number above 1"),
        (DefaultRope(rope_theta=float("nan")), 8, "rope_theta is nan"),
        (DefaultRope(partial_rotary_factor=0.05), 16, "turns 0 of the head_dim 16: choose 0.125 to turn pairs"),
        (yarn(2, 8, partial_rotary_factor=0.2), 16, "turns 3 of the head_dim 16: choose 0.25 to turn pairs"),
        (DefaultRope(partial_rotary_factor=0.0), 8, "partial_rotary_factor is 0.0: it must be a number above 0 and"),
        (DynamicRope(factor=2, max_position_embeddings=64, partial_rotary_factor=0.5), 4, "2 turning dimensions of he"),
        (LinearRope(factor=-2), 8, "factor is -2: it must be a number above 0"),
        (LinearRope(factor=True), 8, "factor is True"),
        (LinearRope(factor="2"), 8, "factor is '2'"),  # type: ignore[arg-type]
        (DynamicRope(factor=2, max_position_embeddings=64), 2, "2 turning dimensions of head_dim 2 are too few"),
        (yarn(2, 0), 8, "original_max_position_embeddings is 0"),
        (yarn(2, 8, beta_fast=1, beta_slow=2), 8, "beta_fast (1) must not"),
        (yarn(2, 8, mscale=-1), 8, "mscale is -1"),
        (yarn(2, 8, truncate=1), 8, "truncate is 1"),
        (longrope((1,) * 4, (1,) * 3, 2, 8), 8, "long_factor has 3 numbers: 8 turning dimensions of head_dim 8 need 4"),
        (longrope((1, 0), (1, 1), 2, 8), 4, "short_factor is (1, 0): it must be a list of numbers above 0"),
        (llama3(8, 8, low=4, high=2), 8, "high_freq_factor (2) must not be below low_freq_factor (4)"),
        (ProportionalRope(partial_rotary_factor=1.5), 8, "partial_rotary_factor is 1.5: it must be a number above 0 "),
    ],
)
def test_values_that_make_no_sense_are_named(rope: Rope, head_dim: int, message: str) -> None:
    assert any(message in problem for problem in rope.problems(head_dim))
    with pytest.raises(ValueError) as error:
        inverse_frequencies(rope, head_dim, 16)
    assert message in str(error.value)


def test_a_type_without_frequencies_is_an_error() -> None:
    with pytest.raises(TypeError, match="no frequencies are known for Rope"):
        rope_module.inverse_frequencies(Rope(rope_theta=100.0), 8, 16)
