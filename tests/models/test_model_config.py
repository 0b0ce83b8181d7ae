"""Model configurations: Hugging Face's fields in both directions, presets, and what is counted from the schema."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from families import ALWAYS_PADDED, drawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig

from megacore.models.assemble import Model
from megacore.models.config import (
    ModelConfig,
    ModelConfigError,
    active_parameters,
    flops_per_token,
    looks,
    matmul_parameters,
    parameters_in_words,
)
from megacore.models.decoder import Microbatch
from megacore.models.mtp import FIELD
from megacore.models.positions import Distances
from megacore.models.registry import FAMILIES, configure, family, presets
from megacore.models.stages import layout_of
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}


def read(config: Mapping[str, Any]) -> ModelConfig:
    return family(config["model_type"]).config.from_hugging_face(config)


# -- both directions

# Where the defaults of a class are no model.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"hidden_size": 6144},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}

THEIRS: dict[str, tuple[type, dict[str, Any]]] = {
    **{f"{name} defaults": (CONFIG_MAPPING[name], NEEDED.get(name, {})) for name in FAMILIES},
    **{f"{name} drawn": (CONFIG_MAPPING[name], drawn(name, pad_token_id=None)) for name in FAMILIES},
    "llama 3.1": (
        LlamaConfig,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
            "initializer_range": 0.01,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama padding": (LlamaConfig, {"pad_token_id": 3}),
    "llama head_dim": (LlamaConfig, {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 64}),
    "gpt2 other": (
        GPT2Config,
        {
            "n_inner": 100,
            "activation_function": "relu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.3,
            "layer_norm_epsilon": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
        },
    ),
}


NULL_ENDS = ("cwm", "glm", "glm4", *ALWAYS_PADDED)
"""Whose class takes an ``eos_token_id`` of null for its own, and maybe no ``bos_token_id`` of null."""
YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None}
"""What we write of a yarn although it says nothing else than if it were left out."""
TEMPERED = ("ministral3", "mistral4")
"""Whose class says some numbers of its rope, by another name of the type."""


@pytest.mark.in_turn(3)
@pytest.mark.quick
@pytest.mark.parametrize("case", THEIRS)
def test_their_config_comes_and_goes(case: str) -> None:
    """What we write, transformers reads as the same config; and what we read of that is what we had."""
    kind, values = THEIRS[case]
    theirs = kind(**{name: value for name, value in values.items() if name != "family"})
    ours = read(theirs.to_dict())
    written = ours.to_hugging_face()
    json.dumps(written)
    again = kind(**written)
    fields = theirs.to_dict() | {"architectures": [ours.architecture]}
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id"))  # which nobody knows
    if ours.family in NULL_ENDS:
        fields |= {token: getattr(kind(), token) for token in ("bos_token_id", "eos_token_id")}
    for size in ("head_dim", "intermediate_size", "num_key_value_heads"):
        if fields.get(size, 0) is None:
            del fields[size]  # what it is then, we say
    # A size that theirs derives, such as head_dim, may be said.
    found = {name: again.to_dict()[name] for name in fields}
    if ours.family in TEMPERED:
        rope = fields["rope_parameters"]
        rope["rope_type"] = rope.pop("type", rope.get("rope_type"))
        found["rope_parameters"] = {name: found["rope_parameters"][name] for name in rope}
    ropes = fields.get("rope_parameters") or {}
    for kind_of_layer in [each for each in ropes if isinstance(ropes[each], dict)]:
        said = found["rope_parameters"][kind_of_layer]
        beside = {name: said[name] for name in said if name not in ropes[kind_of_layer]}
        assert beside.items() <= YARN.items()
        found["rope_parameters"][kind_of_layer] = {name: said[name] for name in ropes[kind_of_layer]}
    assert found == fields
    assert read(again.to_dict()) == read(written) == ours


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("times", [1, 2], ids=["defaults", "more heads"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_out_means_what_transformers_takes_it_for(name: str, times: int) -> None:
    """Each field in turn, unless it must be there: from a default of our own another model would come."""
    kind = CONFIG_MAPPING[name]
    if times > 1 and not hasattr(kind(), "num_attention_heads"):
        pytest.skip("it has none")
    changes = {"num_attention_heads": times * kind().num_attention_heads} if times > 1 else {}
    whole, taken = kind(**NEEDED.get(name, {}), **changes).to_dict(), set()
    try:
        read(whole)
    except ModelConfigError:
        assert changes, "the class's defaults are a model"
        return  # so many heads do not fit its other sizes
    for field in whole.keys() - {"model_type", FIELD}:  # which the tensors of a folder say
        less = {key: value for key, value in whole.items() if key != field}
        try:
            ours = read(less)
        except ModelConfigError as error:
            assert f"field {field!r} is missing" in str(error)
            continue
        taken.add(field)
        assert ours == read(kind(**less).to_dict()), field
    config = family(name).config
    saved = getattr(config, "saved", {})
    said = {f.name for f in fields(config) if f.default is not MISSING and f.compare} - {FIELD, "labels"}
    defaulted = {saved.get(name, name) for name in said}
    if "per_layer_config" in taken:  # which transformers makes of them, and saves
        defaulted -= {"global_head_dim", "num_global_key_value_heads"}
    assert defaulted - getattr(config, "derived", frozenset()) - config.fixed.keys() <= taken


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ALWAYS_PADDED])
def test_no_padding_is_said(name: str) -> None:
    """Else the default of transformers' class comes back, which may lie beyond the vocabulary."""
    assert configure(drawn(name, pad_token_id=None)).to_hugging_face()["pad_token_id"] is None


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_of_another_tokenizer_ends_a_text(name: str, tmp_path: Path) -> None:
    """Of a model that was not read from a folder, nobody knows the tokens; transformers' class has some of its own."""
    if name in NULL_ENDS:
        pytest.skip("its class takes null for its own")
    (tmp_path / "config.json").write_text(json.dumps(configure(drawn(name)).to_hugging_face()))
    made = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path))
    assert (made.bos_token_id, made.eos_token_id) == (None, None)


def test_old_spelling_of_rope() -> None:
    """What transformers 4 wrote: the published config.json of LLaMA 3.2."""
    old = LLAMA | {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008],
    }
    ours = read(old)
    assert ours.to_hugging_face()["rope_parameters"] == {**old["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]


def test_a_field_without_its_type_is_told() -> None:
    """It would be lost without a word: instances have the default of the field."""
    with pytest.raises(TypeError, match=r"Own\.rms_norm_eps is a field of its bases: say it with its type"):
        type("Own", (family("llama").config,), {"family": "own", "rms_norm_eps": 1e-5})


def test_a_file_says_nothing_else_than_what_is_taken() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(type(read(LLAMA))):  # type: ignore[misc]
        taken: ClassVar[Mapping[str, Any]] = {"hidden_act": "relu"}
        mlp_ratio = 2

    with pytest.raises(ModelConfigError) as caught:
        Own.from_hugging_face({**LLAMA, "hidden_act": "silu"})
    of_file = ("hidden_act is 'silu'", "'relu'"), ("intermediate_size is 24", "32")
    assert caught.value.problems == [f"{said}: LlamaForCausalLM takes {own}" for said, own in of_file]


def test_derived_fields() -> None:
    fields = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
    assert read(fields).sizes["kv"] == 4 and read(fields).sizes["head"] == 4
    assert read(fields | {"num_key_value_heads": None, "head_dim": None}) == read(fields)
    assert read(GPT2).sizes["mlp"] == 64
    assert read(GPT2 | {"n_inner": 10}).sizes["mlp"] == 10
    assert read(GPT2).max_positions == read(LLAMA).max_positions == 64


# -- what is refused


def test_all_reasons_at_once() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    with pytest.raises(ModelConfigError) as caught:
        read(config | {"quantization_config": {"bits": 4}, "sliding_window": 1, "mlp_bias": "no"})
    assert len(caught.value.problems) == 4
    for name in ("quantization_config", "sliding_window", "mlp_bias", "'vocab_size' is missing"):
        assert name in str(caught.value)


def test_fields_that_do_not_change_the_maths_are_read_over() -> None:
    harmless = {"use_cache": False, "torch_dtype": "bfloat16", "bos_token_id": 3, "_name_or_path": "x"}
    assert read(LLAMA | harmless | {"pretraining_tp": 2, "quantization_config": None}) == read(LLAMA)
    assert read(GPT2 | harmless | {"summary_type": "mean", "reorder_and_upcast_attn": True}) == read(GPT2)


# -- a recipe's model section


def test_sections(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    folder = configure({"config": str(tmp_path)})
    assert folder == configure({"config": str(tmp_path / "config.json"), "family": "llama"}) == read(LLAMA)
    assert configure({"config": str(tmp_path), "num_hidden_layers": 7}).sizes["layer"] == 7
    assert configure({"preset": "gpt2-xl", "n_layer": 3}).sizes["layer"] == 3
    plain = {k: v for k, v in GPT2.items() if k != "model_type"}
    assert configure({"family": "gpt2"} | plain) == read(GPT2)


SECTIONS = [
    ({"family": "llamma"}, "unknown family 'llamma': did you mean 'llama'?"),
    ({"preset": "gpt2-x1"}, "unknown preset 'gpt2-x1': did you mean 'gpt2-xl'?"),
    ({"family": ["llama"]}, "family is ['llama']: it must be text"),
    ({"preset": 3}, "preset is 3: it must be text"),
    ({"config": 3}, "config is 3: it must be text"),
    ({}, f"give one of family ({', '.join(FAMILIES)}), preset"),
    ({"family": "gpt2", "preset": "llama-tiny"}, "family is 'gpt2', but the preset is of family 'llama'"),
    ({"config": "nowhere/config.json"}, "cannot read nowhere/config.json"),
]


@pytest.mark.parametrize(("section", "message"), SECTIONS)
def test_sections_that_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        configure(section)
    assert message in str(caught.value)


def test_layers_have_a_limit() -> None:
    with pytest.raises(ModelConfigError, match=f"num_hidden_layers is {2**62}: it may be up to 65536"):
        configure({"preset": "llama-tiny", "num_hidden_layers": 2**62})
    with pytest.raises(ModelConfigError, match=f"it has {2**62} layers, and may have up to 65536"):
        configure({"preset": "gpt2-tiny", "n_layer": 2**62})


def test_a_config_json_must_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="does not hold a JSON object"):
        configure({"config": str(tmp_path)})
    for text in ("{", "[" * 99_999, "\udcff"):
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ModelConfigError, match="cannot read"):
            configure({"config": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": ' + "[" * 950 + "]" * 950 + "}")
    with pytest.raises(ModelConfigError):
        configure({"config": str(tmp_path)})


# -- what is counted

PUBLISHED: dict[str, int] = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text())


@pytest.mark.quick
def test_presets_have_the_published_numbers_of_parameters() -> None:
    assert {name: configure({"preset": name}).schema.parameters for name in PUBLISHED} == PUBLISHED


ACTIVE = {
    46_702_792_704: 12_879_925_248,  # Mixtral 8x7B
    6_919_161_856: 1_282_017_280,  # OLMoE 1B-7B
    30_532_122_624: 3_353_032_704,  # Qwen3 30B-A3B
    671_026_404_352: 37_552_282_624,  # DeepSeek-V3
    20_914_757_184: 4_187_440_704,  # gpt-oss 20B, and below 120B
    116_829_156_672: 5_711_982_912,
}
"""{parameters: those that a token meets}."""


def test_a_token_meets_the_published_numbers_of_parameters() -> None:
    configs = [configure({"preset": name}) for name, count in PUBLISHED.items() if count in ACTIVE]
    assert configs
    for config in configs:
        active = ACTIVE[config.schema.parameters]
        assert active_parameters(config) == active
        assert f"{config.schema.parameters:,} parameters ({active:,} active)" == parameters_in_words(config)


@pytest.mark.in_turn(14)
@pytest.mark.parametrize("preset", sorted(presets().keys() - PUBLISHED.keys()))
def test_other_presets_have_as_many_parameters_as_in_transformers(preset: str) -> None:
    config = configure({"preset": preset})
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.family](**config.to_hugging_face()))
    assert config.schema.parameters == theirs.num_parameters(only_trainable=True)


def test_every_family_has_a_tiny_preset() -> None:
    for name in FAMILIES:
        assert configure({"preset": f"{name}-tiny"}).schema.parameters < 1_000_000


def test_presets_read_back() -> None:
    for name in presets():
        config = configure({"preset": name})
        assert read(config.to_hugging_face()) == config


def by_hand(c: Mapping[str, Any], sequence: int) -> int:
    """FLOPs of a token, forward and backward, from the fields of a config: written down layer by layer."""
    if c["model_type"] == "gpt2":
        e, layers, vocab = c["n_embd"], c["n_layer"], c["vocab_size"]
        linears = layers * (3 * e * e + e * e + 8 * e * e) + vocab * e
        width = e
    else:
        e, layers, vocab = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
        width, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        k = c.get("num_experts_per_tok", 1)
        linears = layers * (e * (width + 2 * kv) + width * e + 3 * e * c["intermediate_size"] * k) + vocab * e
        linears += layers * e * c.get("num_local_experts", 0)
    attended = looked_at(sequence, c.get("sliding_window")) / sequence
    attention = layers * 2 * width * attended  # scores and attention: a multiplication and an addition each
    return round(3 * 2 * (linears + attention))


def looked_at(sequence: int, window: int | None, chunk: int | None = None) -> int:
    """How many tokens those of a sequence look at, one after the other."""
    return sum(min(token % (chunk or sequence) + 1, window or sequence) for token in range(sequence))


@pytest.mark.parametrize("preset", [p for p in PUBLISHED if presets()[p][0] in ("gpt2", "llama", "mistral", "mixtral")])
def test_flops_per_token_against_a_formula_by_hand(preset: str) -> None:
    config = configure({"preset": preset})
    for sequence in (1, 1024, 8192):
        assert flops_per_token(config, sequence) == by_hand(config.to_hugging_face(), sequence)


@pytest.mark.parametrize("top", [1, 5, 24, 100])
def test_flops_per_token_of_tokens_that_an_indexer_chooses(top: int) -> None:
    """All are scored and few looked at; the scores of those have gradients."""
    config, sequence = configure(drawn("deepseek_v32", index_topk=top)), 24
    sizes, every, chosen = config.sizes, looked_at(sequence, None), looked_at(sequence, top)
    index = sizes["index_heads"] * (2 * sizes["half"] + sizes["index_rest"]) * (2 * every + 4 * chosen)
    attention = 6 * sizes["heads"] * (sizes["head"] + sizes["value"]) * chosen
    wanted = 6 * matmul_parameters(config) * sequence + sizes["layer"] * (index + attention)
    assert abs(flops_per_token(config, sequence) - wanted / sequence) < 2


@pytest.mark.in_turn(14)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name in FAMILIES if "index_heads" not in family(name).config.axes])
def test_flops_per_token_against_torchs_counter(name: str, tied: bool) -> None:
    """The linears to the last operation; attention as torch counts it, all but for windows and chunks."""
    # Of rows of experts that do nothing it counts a share.
    none = {"zero_expert_num": 0} if name == "longcat_flash" else {}
    tied = tied or family(name).config.fixed.get("tie_word_embeddings", False)
    config = configure(drawn(name, positions=64, tie_word_embeddings=tied, **none))
    model = Model.create(config, layout_of(config, MeshShape()), Mesh.single(), torch.float32)
    model.parameters.initialise(0)
    length = 24
    zeros, positions = torch.zeros(length, dtype=torch.long), torch.arange(length)
    batch = Microbatch(zeros, zeros, positions, 1, (length, config.sizes["embed"]))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.chunks[0](None, batch).backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counted.pop("aten.bmm", 0)  # it does not look into windows
    linears = 6 * matmul_parameters(config) * length
    sizes, names = config.sizes, config.schema.by_name
    of_blocks = (
        6 * length * sum(config.schema.numel(param) for name, param in names.items() if name.endswith("lru.gates"))
    )
    linears -= of_blocks  # whose products it counts with attention's, and those of streams
    # Products of streams with each other, of which those of the backward count as attention's. Their router and its
    # norm have two tensors of a layer, of which the plan counts one.
    streams = 2 * length * sizes["layer"] * sizes.get("streams", 0) ** 2 * sizes["embed"]
    assert counted.pop("aten.baddbmm", 0) == streams + of_blocks // 3
    attention -= 2 * streams
    # A norm may sum its weight's gradient by a product with one row, where a token has one, and of its heads.
    of_heads = [
        n for n in names if re.search(r"(attn|delta|lightning|ssm)\.", n) and not re.search(r"_a_norm|ssm\.\w+_norm", n)
    ]
    alone = [n for n in names if n.endswith("norm.weight") and n not in of_heads]
    rows = [names[n] for n in alone]
    uses = [len(p.owners or "1") / len(p.layers or "1") * ((p.at == "layers" and sizes["layer"]) or 1) for p in rows]
    tokens = sum(config.schema.numel(row) * times for row, times in zip(rows, uses, strict=True))
    twice = sizes["layer"] * sizes["embed"] * (bool(streams) + 3 * sizes.get("ways", 0))
    heads = 0
    for kind, axis in (("attn", ""), ("local_attn", "local_")):
        if (normed := names.get(f"layers.{{layer}}.{kind}.q_norm.weight")) is not None:
            of_kind = sizes.get(f"{axis}heads", sizes["heads"]) + sizes.get(
                f"{axis}kv", sizes.get("kv", sizes["heads"])
            )
            heads += sizes.get(f"{axis}head", sizes["head"]) * of_kind * len(normed.values("layer", sizes))
    of_states = r"(delta|ssm|lru|short)\.conv\.weight|lightning\.norm"
    mixed = {n: p for n, p in names.items() if re.search(of_states, n)}
    mixers = {n.split(".")[-3] for n in mixed}
    with_state = [layer for param in mixed.values() for layer in param.values("layer", sizes)]
    values = len(with_state) * math.prod(
        sizes.get(axis, 1) for axis in ("channels", "state_heads", "each", "state_value")
    )
    heads += values * (not mixers.isdisjoint(("delta", "lightning", "ssm")))
    outs = [param for name, param in names.items() if name.endswith("attn.out.weight")]
    attends = [layer for param in outs for layer in param.used_in(range(sizes["layer"]))]
    windows = [(config.anatomy.layers[layer].window, config.anatomy.layers[layer].chunk) for layer in attends]
    assert (sum(counted.values()) - linears) / (2 * length) - twice in {0, tokens, heads, tokens + heads}
    further = 0 if config.anatomy.alibi is None else 12 * sizes["heads"] * Distances.dimensions
    count, head = sizes.get("heads", 0), sizes.get("head", 0)
    each = 12 * count * head + further
    of_local = names.get("layers.{layer}.local_attn.out.weight")
    local = () if of_local is None else of_local.values("layer", sizes)
    more = 12 * (sizes.get("local_heads", count) * sizes.get("local_head", head) - count * head)  # heads of those
    if {*windows} == {(None, None)} and len(windows) == sizes["layer"] and not mixed:
        assert attention == (each * sizes["layer"] + more * len(local)) * length * length
    causal = sum(looked_at(length, *window) for window in windows)
    # Dimensions that hold positions do not count, nor what pads values that are narrower than keys.
    each -= further + 6 * count * (head - sizes.get("value", head))
    for mixer, products in (("delta", 3), ("lightning", 2), ("ssm", 2), ("lru", 1)):
        linears += length * 6 * products * values * sizes.get("state_key", 1) * (mixer in mixers)
    taps = (param for param in mixed.values() if "taps" in param.sentence.axes)
    linears += length * sum(6 * config.schema.numel(param) for param in taps)
    linears += more * sum(looked_at(length, config.anatomy.layers[layer].window) for layer in local)
    linears += of_blocks
    assert flops_per_token(config, length) * length == linears + each * causal


@pytest.mark.parametrize(("block", "top"), [(1, None), (1, 5), (4, None), (4, 3), (64, 2)])
def test_a_token_looks_at_the_blocks_that_end_before_it(block: int, top: int | None) -> None:
    seen = [(token + 1) // block for token in range(30)]
    assert looks(30, top, block=block) == sum(min(each, top or each) for each in seen)


def test_the_work_of_blocks_is_that_of_what_is_looked_at() -> None:
    """By hand, of layers of each kind: windows, blocks, and an indexer that scores all of these."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = configure({"preset": "deepseek_v4-tiny", "num_hidden_layers": 3, "layer_types": kinds, "index_topk": 6})
    length, heads, head, index = 64, 4, 32, 4 * 16
    windows = 3 * looks(length, 64)
    chosen, every = (sum(min((token + 1) // 4, top) for token in range(length)) for top in (6, length))
    heavy = sum((token + 1) // 32 for token in range(length))
    attention = 6 * heads * 2 * head * (windows + chosen + heavy) // length + index * (2 * every + 4 * chosen) // length
    assert flops_per_token(config, length) == 6 * matmul_parameters(config) + attention
