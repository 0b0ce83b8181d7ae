"""One process against transformers: logits and every gradient, in float64, for random tiny models of every family."""

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draws import ACTIVATED, CHOICES, DRAWS
from families import drawn, in_float64, of_transformers, one_in, small
from pool import Pool
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax_m2

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import FAMILIES, configure, family
from megacore.models.rope_config import ROPE_TYPES
from megacore.models.stages import layout_of
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import Stored, execute, hugging_face, native, plan

TOLERANCE = 1e-9
Arrays = Mapping[str, np.ndarray]
SEQUENCES, LENGTH = 2, 13
FIRST, SEEDS = 3, 60


def section(name: str, seed: int) -> dict[str, Any]:
    r = Random(seed)
    # Shorter than the sequence half of the time, which is where dynamic and longrope change; a table must be as long.
    bounded = "position" in family(name).config.axes or name in ("ctrl", "mpt")
    positions = LENGTH if bounded else r.choice([8, 32])
    return drawn(name, seed, layers=r.choice([1, 2, 3]), vocab=r.choice([17, 64]), positions=positions, tp=1)


def telling(name: str) -> set[int]:
    """The first seeds, and each that draws a choice (no number) that none before it has drawn."""
    found, seen = set(range(FIRST)), set[str]()
    for seed in range(SEEDS):
        values = section(name, seed)
        chosen = [*values.items(), *values.get("rope_parameters", {}).items()]
        new = {f"{key}={value}" for key, value in chosen if isinstance(value, bool | str | None)} - seen
        found |= {seed} if new else set()
        seen |= new
    return found


def marks(seed: int, told: set[int]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.quick] * (seed < 2) + [pytest.mark.grid] * (seed not in told)


CASES = [
    pytest.param(name, seed, id=f"{name}-{seed}", marks=marks(seed, told))
    for name, told in ((name, telling(name)) for name in FAMILIES)
    for seed in range(SEEDS)
]


def theirs_of(config: PretrainedConfig, seed: int, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Their model in float64 with every weight random: biases of zero and norms of one would hide mistakes."""
    torch.manual_seed(seed)
    # Their other attentions leave softcaps and sinks out, and their other products of experts know no float64.
    config._experts_implementation = "eager"
    made = auto.from_config(config, attn_implementation="eager")
    model: PreTrainedModel = made.double().eval()
    for module in model.modules():
        # Rotary frequencies are rounded to float32, here and there.
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.float() if buffer.is_floating_point() else buffer)
    with torch.no_grad():
        for buffer in saved_buffers(model).values():
            if buffer.is_floating_point():
                buffer.normal_(0.0, 0.3)
            else:  # a table of experts
                buffer.random_(config.n_routed_experts)
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.3)
            if not parameter.requires_grad:
                parameter.copy_(parameter.float())  # as buffers are, which it is here
    return model


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Those that are saved with the weights, such as what corrects a router's choice, a parameter of some that gets no
    gradient."""
    kept = model.state_dict().keys()
    still = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: buffer for name, buffer in model.named_buffers() if name in kept} | still


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Those of all weights; zeros where the loss sends none: to buffers, and to indexers, which only choose."""
    nothing = {name: torch.zeros_like(tensor) for name, tensor in saved_buffers(model).items()}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()} | nothing


def as_saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Arrays:
    """Under the names that ``save_pretrained`` gives them."""
    arrays = {name: tensor.numpy() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}
    return recut(model.config, arrays) if model.config.model_type == "olmo_hybrid" else arrays


def recut(config: PretrainedConfig, arrays: Arrays) -> Arrays:
    """With the convolutions of queries, keys and values as in published files of OLMo Hybrid: transformers reads these,
    and saves them in three equal parts."""
    made, keys = {**arrays}, config.linear_num_key_heads * config.linear_key_head_dim
    for name in arrays:
        if name.endswith("q_conv1d.weight"):
            names = [name.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
            parts = np.split(np.concatenate([arrays[each] for each in names]), [keys, 2 * keys])
            made |= dict(zip(names, parts, strict=True))
    return made


def move(schema: Any, arrays: Arrays, sources: Iterable[Stored], targets: Iterable[Stored]) -> dict[str, np.ndarray]:
    moved = {}
    for target, copies in plan(schema, sources, targets):
        moved[target.name] = np.zeros(target.shape)
        for copy in copies:
            execute(copy, arrays[copy.source.name], moved[target.name])
    return moved


def close(got: Tensor, want: Tensor, what: str) -> None:
    error = float((got - want).norm() / (want.norm() or 1.0))
    assert error <= TOLERANCE, f"{what} is off by {error:.1e}"


@pytest.mark.in_turn(14)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_logits_and_gradients(name: str, seed: int) -> None:
    same_numbers(name, of_transformers(section(name, seed)), seed)


@pytest.mark.parametrize("name", ["gpt_neox", "glm", "glm4", "nemotron", "phi3"])
def test_an_odd_part_of_a_head_turns_with_one_dimension_more(name: str) -> None:
    """3 of 12 dimensions, which are wavelengths over 3 and 2 pairs."""
    fields: dict[str, Any] = {
        "vocab_size": 17,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        **({} if name == "gpt_neox" else {"num_key_value_heads": 2, "head_dim": 12}),
    }
    made = AutoConfig.for_model(name, **fields)
    same_numbers(name, made, 0)


def test_as_much_of_a_head_turns_as_minimax_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By M2's function in transformers: its own turns all of a head, whatever is said."""

    def frequencies(config: PretrainedConfig, **_: Any) -> tuple[Tensor, float]:
        steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.float) / config.rotary_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** steps, 1.0

    own = minimax.MiniMaxRotaryEmbedding
    monkeypatch.setattr(own, "compute_default_rope_parameters", staticmethod(frequencies))
    monkeypatch.setattr(minimax, "apply_rotary_pos_emb", minimax_m2.apply_rotary_pos_emb)
    turns = {"head_dim": 12, "rotary_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    same_numbers("minimax", of_transformers(section("minimax", 1) | turns), 1)


@pytest.mark.parametrize("each", [1, 2])
def test_values_that_are_wider_than_keys(each: int) -> None:
    """As OLMo Hybrid publishes them."""
    base = section("olmo_hybrid", 1)
    wide = {"linear_num_value_heads": each * base["linear_num_key_heads"], "linear_value_head_dim": 9}
    same_numbers("olmo_hybrid", of_transformers(base | wide), 1)


def test_granite_without_experts() -> None:
    fields = {"num_local_experts": 0, "layer_types": ["linear_attention", "full_attention"]}
    base = section("granitemoehybrid", 0)
    same_numbers("granitemoehybrid", of_transformers(base | {"num_hidden_layers": 2} | fields), 0)


def test_layers_that_share_an_indexer() -> None:
    """As a pattern says it, or every so many layers, one before the last of the first ones."""
    base = drawn("glm_moe_dsa", 3, positions=32, index_topk=3)
    every = {"index_topk_freq": 3, "index_skip_topk_offset": 2}
    config = configure(base | every)
    assert config.to_hugging_face()["indexer_types"] == ["full", "full", "shared", "shared", "full"]
    assert of_transformers(base | every).indexer_types == config.to_hugging_face()["indexer_types"]
    kinds = ["full", "shared", "full", "shared", "shared"]
    same_numbers("glm_moe_dsa", of_transformers(base | {"indexer_types": kinds}), 0)


def test_layers_that_share_keys_and_values() -> None:
    """Of both kinds, behind several layers, and with networks that are twice as wide."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    shared = {"layer_types": kinds, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 5}
    wide = {"enable_moe_block": False, "use_double_wide_mlp": True, "sliding_window": 3, "global_head_dim": 4}
    same_numbers("gemma4_text", of_transformers(drawn("gemma4_text", 3, positions=32, vocab=17) | shared | wide), 0)


def test_weights_of_streams_are_kept_within_a_limit_in_training() -> None:
    """Beyond it those that correct have no gradient, and those that predict have one."""
    fields = section("gemma3n_text", 1) | {"altup_coef_clip": 0.2}
    same_numbers("gemma3n_text", of_transformers(fields), 0, training=True)


def same_numbers(name: str, hf_config: PretrainedConfig, seed: int, training: bool = False) -> None:
    theirs = theirs_of(hf_config, seed).train(training)
    config = family(name).config.from_hugging_face(hf_config.to_dict())
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64)
    ours.train(training)
    (decoder,) = ours.chunks

    buffers = saved_buffers(theirs)
    state = as_saved(theirs, {name: p.detach().clone() for name, p in theirs.named_parameters()} | buffers)
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
    with in_float64():
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

    theirs_gradients = as_saved(theirs, gradients_of(theirs))
    assert theirs_gradients.keys() == state.keys()
    gradients = move(config.schema, theirs_gradients, hugging_face(config.schema), native(layout, [0]))
    assert gradients.keys() == set(ours.parameters)
    for name, gradient in gradients.items():
        found = ours.parameters[name].grad
        if found is None:
            assert not gradient.any()
            continue
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
    llamas, gpts = (
        [of_transformers(section(name, seed)) for seed in sorted(telling(name))] for name in ("llama", "gpt2")
    )
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
        assert 0 < sum(map(condition, llamas)) < len(llamas)
    assert {c.activation_function for c in gpts} == set(ACTIVATED)
    assert {c.n_inner for c in gpts} == {None, 7, 40}
    assert {c.tie_word_embeddings for c in gpts} == {True, False}


@pytest.mark.parametrize("name", one_in(4))
def test_no_draw_is_refused(name: str) -> None:
    """Heads that split over tp, and sizes that are asked for, whatever the seed."""
    for seed in range(SEEDS):
        config = configure(drawn(name, seed, layers=5, vocab=13, positions=16, tp=4))
        # Slopes of heads reach over any number of positions, and so do states.
        most = None if name in ("bloom", "falcon_mamba", "mamba", "mamba2", "recurrent_gemma") else 16
        assert (config.sizes["layer"], config.sizes["vocab"], config.max_positions) == (5, 13, most)
        layout_of(config, MeshShape(tp=4, pp=2))


def test_every_drawing_is_of_a_family() -> None:
    classes = {base.__name__ for name in FAMILIES for base in family(name).config.__mro__}
    assert classes >= DRAWS.keys() | CHOICES.keys()


def test_the_correction_of_a_router_is_drawn() -> None:
    """With zeros nothing would be corrected."""
    buffers = {name: buffer for name, buffer in theirs_of(small("deepseek_v3"), 0).named_buffers() if "correct" in name}
    assert len(buffers) == 2 and all(buffer.all() for buffer in buffers.values())


# -- packed documents, split over cp


PACKED = (7, 1, 2, 13, 5)
SPREAD = {
    "llama": ContextParallel(4, "ring", "documents"),
    "gpt2": ContextParallel(2, "gather", "rows"),
    "gemma2": ContextParallel(4, "gather", "auto"),
    "gemma3n_text": ContextParallel(4, "ring", "rows"),
    "gemma4_text": ContextParallel(4, "ring", "documents"),
    "gpt_oss": ContextParallel(4, "ring", "rows", 2),
    "deepseek_v3": ContextParallel(2, "ring", "documents"),
    "deepseek_v32": ContextParallel(4, "ring", "rows", 2),
    "deepseek_v4": ContextParallel(4, "gather", "rows", 2),
    "qwen3_moe": ContextParallel(4, "heads", "rows", 4),
    "lfm2": ContextParallel(4, "gather", "rows"),
    "kimi_linear": ContextParallel(4, "gather", "rows"),
    "bamba": ContextParallel(4, "ring", "rows"),
    "mamba": ContextParallel(4, "gather", "rows"),
    "jamba": ContextParallel(2, "ring", "documents"),
    "minimax": ContextParallel(4, "ring", "rows"),
    "recurrent_gemma": ContextParallel(4, "ring", "rows"),
    "zamba2": ContextParallel(4, "ring", "rows"),
    "qwen3_next": ContextParallel(),
    "qwen3_5_text": ContextParallel(4, "ring", "rows", 2),
}


def of_rank(
    hf_config: dict[str, Any], weights: Arrays, tokens: Tensor, labels: Tensor, context: ContextParallel
) -> tuple[np.ndarray, np.ndarray, float, dict[str, np.ndarray]]:
    """(tokens, logits of this rank's tokens, the sum of their losses, its gradients) of packed documents."""
    config = family(hf_config["model_type"]).config.from_hugging_face(hf_config)
    mesh = Mesh.create(MeshShape(cp=context.size))
    ours = Model.create(config, layout_of(config, mesh.shape), mesh, torch.float64, context=context)
    ours.train(False)
    with torch.no_grad():
        for name, array in weights.items():
            ours.parameters[name].copy_(torch.from_numpy(array))
    split = context.split(PACKED, len(tokens))
    own = torch.from_numpy(split.indices(mesh.place.cp))
    positions = torch.cat([torch.arange(length) for length in PACKED])
    shape = (len(own), config.sizes["embed"])
    batch = Microbatch(
        tokens[own],
        labels[own],
        positions[own],
        1,
        shape,
        PACKED,
        lengths=PACKED,
        split=split if context.size > 1 else None,
        rows=own.new_zeros(own.shape),
    )
    (decoder,) = ours.chunks
    with torch.no_grad():
        logits = decoder.logits(None, batch)
    loss = decoder(None, batch)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in ours.parameters.items() if p.grad is not None}
    return own.numpy(), logits.numpy(), loss.item(), gradients


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", SPREAD)
def test_packed_documents_over_cp_are_each_by_itself(pool: Pool, name: str) -> None:
    context = SPREAD[name]
    hf_config = of_transformers(drawn(name, 1, layers=2, vocab=64, positions=32))
    theirs = theirs_of(hf_config, 1)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(64, (2, sum(PACKED)), generator=generator)
    labels[::5] = IGNORE
    with in_float64():
        each = [theirs(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(PACKED)]
    want = torch.cat(each)
    loss = F.cross_entropy(want, labels, ignore_index=IGNORE, reduction="sum")
    loss.backward()

    config = family(name).config.from_hugging_face(hf_config.to_dict())
    one, buffers = [*native(layout_of(config, MeshShape()), [0])], saved_buffers(theirs)
    state = as_saved(theirs, {name: p.detach() for name, p in theirs.named_parameters()} | buffers)
    weights = move(config.schema, state, hugging_face(config.schema), one)
    found = pool.run(context.size, of_rank, hf_config.to_dict(), weights, tokens, labels, context)
    logits = np.zeros((len(tokens), config.vocab_size))
    for own, some, _, _ in found:
        logits[own] = some
    close(torch.from_numpy(logits), want.detach(), "logits")
    assert sum(part for _, _, part, _ in found) == pytest.approx(loss.item(), rel=TOLERANCE)
    gradients = as_saved(theirs, gradients_of(theirs))
    for name, gradient in move(config.schema, gradients, hugging_face(config.schema), one).items():
        if name in found[0][3]:
            total = sum(part[name] for _, _, _, part in found)
            close(torch.from_numpy(total), torch.from_numpy(gradient), f"gradient of {name}")
        else:
            assert not gradient.any()
