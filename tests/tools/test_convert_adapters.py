"""Adapters on their way out, beside the peft library where it is installed, and beside the formula everywhere."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from families import drawn, loaded
from hub import adapted
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from wrapped import saved

from megacore.config import CheckpointConfig, Config, LoraConfig
from megacore.control import Control
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.lora import MISTAKEN_IN, UNKNOWN_TO_PEFT, Lora, linears, mistaken_by_peft
from megacore.models.registry import FAMILIES, configure
from megacore.models.stages import layout_of
from megacore.models.tuning import Tuning
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.loader import Loader
from megacore.tools import convert, inspect, reshard
from megacore.training.resume import Start, remarks

LLAMA: Mapping[str, Any] = engine.LLAMA | {"head_dim": 4, "max_position_embeddings": 16}
GPT2: Mapping[str, Any] = engine.GPT2 | {"n_positions": 16, "n_layer": 4}
CASES = {
    "llama": (LLAMA, Lora(3, 6.0, ("q_proj", "attn.qkv.v", "attn.out", "mlp"), rslora=True)),
    **{
        f"{name}-all": (drawn(name, 3, layers=4, vocab=61), Lora(2, 1.0, ("*",)))
        for name in FAMILIES
        if name not in UNKNOWN_TO_PEFT
    },
    # The others are refused: test_what_peft_would_load_wrongly_is_refused.
    **{
        f"{name}-all": (drawn(name, 3, layers=4, vocab=61), Lora(2, 1.0, ("attn", "router", "experts")))
        for name in sorted(MISTAKEN_IN)
    },
    "afmoe-all": (drawn("afmoe", 3, layers=4, vocab=61), Lora(2, 1.0, ("q_proj", "attn.out", "router", "experts"))),
    "longcat_flash-all": (drawn("longcat_flash", 3, layers=4, vocab=61), Lora(2, 1.0, ("attn", "experts"))),
    "jamba-all": (drawn("jamba", 3, layers=4, vocab=61), Lora(2, 1.0, ("attn", "ssm.[!d]*", "router", "experts"))),
    **{
        f"{name}-all": (drawn(name, 3, layers=4, vocab=61), Lora(2, 1.0, ("ssm.inner", *scans)))
        for name, scans in (("falcon_mamba", ["ssm.select"]), ("mamba", ["ssm.select"]), ("mamba2", []))
    },
    "zamba2-all": (drawn("zamba2", 3, layers=4, vocab=61), Lora(2, 1.0, ("ssm.*", "then.*", "join"))),
    "falcon_h1-all": (drawn("falcon_h1", 3, layers=4, vocab=61), Lora(2, 1.0, ("attn", "ssm.inner", "mlp"))),
    "gpt2": (GPT2, Lora(3, 6.0, ("c_attn", "mlp.down", "mlp.up"))),
}
TOKENS = torch.arange(12) * 5 % 61


@dataclass(frozen=True)
class Made:
    """A model in a folder, adapters of it in a checkpoint, and what they are."""

    folder: Path
    checkpoint: Path
    lora: Lora


def model_folder(path: Path, section: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    raw = configure(section).to_hugging_face()
    (path / "raw").mkdir(parents=True)
    (path / "raw" / "config.json").write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path / "raw"), dtype=dtype)
    model.save_pretrained(path / "model")
    return path / "model"


def make(path: Path, name: str, dtype: torch.dtype = torch.float32) -> Made:
    section, lora = CASES[name]
    folder = model_folder(path, section, dtype)
    return Made(folder, adapted(folder, path / "ckpt", lora), lora)


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest, tmp_path: Path, not_durable: None) -> Made:
    return make(tmp_path, request.param)


def run(*arguments: object) -> int:
    return convert.main([str(each) for each in arguments])


def ours(made: Made) -> Tensor:
    """Our logits of the model with its adapters beside it."""
    base, adapters, mesh = HuggingFace.open(made.folder), Checkpoint.open(made.checkpoint), Mesh.single()
    tuning = Tuning(made.lora)
    layout = layout_of(base.config, MeshShape(), tuning=tuning)
    model = Model.create(base.config, layout, mesh, torch.float32, tuning=tuning)
    model.train(False)
    loader = Loader(model.parameters, Control.create(mesh))
    with torch.no_grad():
        for folder in (base, adapters):
            held = {name for name in model.parameters if ("lora" in name) == (folder is adapters)}
            for name, tensor in loader.tensors(folder, "weights", held):
                model.parameters[name].copy_(tensor)
    batch = Microbatch(TOKENS, TOKENS, torch.arange(len(TOKENS)), 1, (len(TOKENS), base.config.sizes["embed"]))
    logits = model.logits(batch)
    assert logits is not None
    return logits


def theirs(model: torch.nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(TOKENS[None]).logits[0]
    return logits


def stacked(name: str, adapters: Mapping[str, Tensor], rank: int, family: str) -> tuple[set[str], Tensor] | None:
    """The names of A and B, and B A, of what transformers stacks or holds in no linear: of an expert, of a router."""
    name = name.replace("experts.fc1.weight", "experts.gate_up_proj").replace("experts.fc2.weight", "experts.down_proj")
    if found := re.fullmatch(r"(model\.layers\.\d+(?:\.\w+)?\.experts)\.(gate_up_proj|down_proj)", name):
        # Whose weights are [experts, in, out]; Llama 4's are, too, and nothing tells peft.
        turned = "eio" if family in ("aria_text", "gpt_oss") else "eoi"
        nested = ".base_layer" if found[2] == "gate_up_proj" else ""
        names = [f"base_model.model.{found[1]}{nested}.lora_{each}.weight" for each in "AB"]
        a, b = (adapters[each].double() for each in names)
        return {*names}, torch.einsum(
            f"ore,eri->{turned}", b.reshape(len(b), rank, -1), a.reshape(-1, rank, a.shape[1])
        )
    found = re.fullmatch(r"(model\.layers\.\d+)\.(\w+)\.(?:experts\.(\d+)\.)?(\w+)(?:\.layer)?\.weight", name)
    if not found or (found[3] is None and found[4] not in ("gate", "router", "input_linear", "output_linear")):
        return None
    if found[2] == "shared_mlp":  # Granite's shared expert, of linears
        return None
    block, module, number, which = found.groups()
    end = "experts" if which in ("w2", "down_proj", "output_linear") else "experts.base_layer"
    # Mixtral's module has another name in memory.
    end = which if which in ("gate", "router") else end
    module = "mlp" if module == "block_sparse_moe" and ("gate" in name or number) else module
    if which == "gate" and f"base_model.model.{block}.{module}.router.lora_A.weight" in adapters:
        end = "router"  # so Phi-3.5-MoE's in memory
    names = [f"base_model.model.{block}.{module}.{end}.lora_{each}.weight" for each in "AB"]
    a, b = (adapters[each].double() for each in names)
    if "linear" in which:
        return {*names}, torch.einsum("ore,eri->eoi", b.reshape(len(b), rank, -1), a.reshape(-1, rank, a.shape[1]))
    if number is not None:
        # As ParamWrapper of peft takes them apart: A by expert, then rank; B by rank, then expert.
        a, b = a.reshape(-1, rank, a.shape[1])[int(number)], b.reshape(len(b), rank, -1)[..., int(number)]
        half = len(b) // 2
        b = {"w1": b[:half], "gate_proj": b[:half], "w3": b[half:], "up_proj": b[half:]}.get(which, b)
    return {*names}, b @ a


@pytest.mark.in_turn(10)
def test_merged_weights_are_the_formula(made: Made, tmp_path: Path) -> None:
    """W + scale B A of the peft folder's A and B; and transformers computes with them what we do beside them."""
    assert run(made.checkpoint, tmp_path / "hf", "--to", "hf", "--base", made.folder, "--jobs", 2) == 0
    assert run(made.checkpoint, tmp_path / "peft", "--to", "peft") == 0
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", made.folder))
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    prefix, used = "base_model.model.", set()
    family = json.loads((made.folder / "config.json").read_text())["model_type"]
    for name, weight in base.items():
        a, b = (f"{prefix}{name.removesuffix('.weight')}.lora_{each}.weight" for each in "AB")
        if delta_of := stacked(name, adapters, made.lora.rank, family):
            names, delta = delta_of
            used |= names
            wanted = weight.double() + made.lora.scale * delta
            torch.testing.assert_close(merged[name].double(), wanted, rtol=1e-6, atol=1e-6)
        elif a in adapters:
            used |= {a, b}
            delta = adapters[b].double() @ adapters[a].double() * made.lora.scale
            want = weight.double() + (delta.T if family in ("gpt2", "openai-gpt") and ".c_" in name else delta)
            torch.testing.assert_close(merged[name].double(), want, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(merged[name], weight), name
    assert used == adapters.keys()
    logits = theirs(loaded(tmp_path / "hf", torch.float32))
    plain = theirs(loaded(made.folder, torch.float32))
    assert (logits - plain).abs().max() > 0.1 * plain.abs().max()
    torch.testing.assert_close(ours(made), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.in_turn(10)
def test_peft_computes_what_we_compute(made: Made, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the peft library is not installed")
    assert run(made.checkpoint, tmp_path / "peft", "--to", "peft") == 0
    model = peft.PeftModel.from_pretrained(loaded(made.folder, torch.float32), tmp_path / "peft")
    torch.testing.assert_close(theirs(model), ours(made), rtol=1e-4, atol=1e-4)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (made.lora.rank, made.lora.alpha, made.lora.rslora)
    # All that peft would save is what it was given.
    saved = peft.get_peft_model_state_dict(model)
    given = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert saved.keys() == given.keys() and all(torch.equal(saved[name], given[name]) for name in given)


def test_a_base_of_bf16_is_rounded_once(tmp_path: Path, not_durable: None) -> None:
    made = make(tmp_path, "llama", torch.bfloat16)
    assert run(made.checkpoint, tmp_path / "hf", "--to", "hf", "--base", made.folder) == 0
    assert run(made.checkpoint, tmp_path / "peft", "--to", "peft") == 0
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", made.folder))
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    name = "model.layers.3.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{each}.weight"].double() for each in "AB")
    exact = (base[f"{name}.weight"].double() + b @ a * made.lora.scale).bfloat16()
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    assert (merged[f"{name}.weight"] != exact).float().mean() < 0.01  # but for ties of fp32's own rounding
    assert run(made.checkpoint, tmp_path / "wide", "--to", "hf", "--base", made.folder, "--dtype", "float32") == 0
    assert {each.dtype for each in load_file(tmp_path / "wide" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.in_turn(10)
def test_adapters_reshard(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To another layout and out: the same bytes; and an inspection says what they are."""
    assert reshard.main([str(made.checkpoint), str(tmp_path / "other"), "--tp", "4"]) == 0
    for source, target in ((made.checkpoint, "one"), (tmp_path / "other", "two")):
        assert run(source, tmp_path / target, "--to", "peft") == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert inspect.main([str(tmp_path / "other"), "--diff", str(made.checkpoint), "--check", "--tensors"]) == 0
    said = capsys.readouterr().out
    assert f"LoRA, rank {made.lora.rank}" in said and f"{made.folder} (fingerprint" in said and "Equal to" in said


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(*arguments) == 1
    return capsys.readouterr().err


def test_what_cannot_be_done_is_said(tmp_path: Path, not_durable: None, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(tmp_path, "llama")
    target = tmp_path / "x"
    said = refused(capsys, made.checkpoint, target, "--to", "hf")
    assert f"convert {made.checkpoint} FOLDER --to hf --base {made.folder}" in said
    other = model_folder(tmp_path / "other", LLAMA, torch.float32, seed=1)
    said = refused(capsys, made.checkpoint, target, "--to", "hf", "--base", other)
    assert "are not those that the adapters were trained on" in said
    larger = model_folder(tmp_path / "larger", {**LLAMA, "intermediate_size": 32}, torch.float32)
    assert "other sizes" in refused(capsys, made.checkpoint, target, "--to", "hf", "--base", larger)
    turned = model_folder(tmp_path / "turned", {**LLAMA, "rms_norm_eps": 0.5}, torch.float32)
    said = refused(capsys, made.checkpoint, target, "--to", "hf", "--base", turned)
    assert "rms_norm_eps is 0.5 and was" in said
    assert "is a Hugging Face folder already" in refused(capsys, made.folder, target, "--to", "peft")
    assert "--base is for --to hf" in refused(capsys, made.checkpoint, target, "--to", "peft", "--base", made.folder)
    assert run(made.folder, tmp_path / "model-ckpt") == 0
    assert "holds a model and no adapters" in refused(capsys, tmp_path / "model-ckpt", target, "--to", "peft")
    said = refused(capsys, tmp_path / "model-ckpt", target, "--to", "hf", "--base", made.folder)
    assert "holds a model and no adapters" in said
    assert run(made.checkpoint, target, "--to", "hf", "--base", made.folder, "--dry-run") == 0
    assert not target.exists()


WRONG = {
    "deepseek_v3": (
        "mlp.shared.down",
        "peft takes those of mlp.shared_experts.down_proj for those of deepseek_v3's experts",
    ),
    "afmoe": ("attn.qkv", "peft takes those of self_attn.gate_proj for those of afmoe's experts"),
    "falcon_h1": ("ssm.out", "peft refuses adapters of out_proj of falcon_h1"),
    "mamba2": ("ssm.out", "peft refuses adapters of out_proj of mamba2"),
    "zamba2": ("mlp.down", "several layers of zamba2 share shared_transformer.feed_forward.down_proj, "),
    "longcat_flash": ("router", "transformers' longcat_flash multiplies by the weight of classifier itself, past its"),
    "jamba": ("ssm.dt", "transformers' jamba multiplies by the weight of dt_proj itself, past its adapters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_peft_would_load_wrongly_is_refused(
    name: str, tmp_path: Path, not_durable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    target, message = WRONG[name]
    folder = model_folder(tmp_path, drawn(name, 3, layers=4, vocab=61), torch.float32)
    checkpoint = adapted(folder, tmp_path / "ckpt", Lora(2, 1.0, ("*.out", target)))
    said = refused(capsys, checkpoint, tmp_path / "peft", "--to", "peft")
    assert message in said
    assert f"--to hf --base {folder}" in said and not (tmp_path / "peft").exists()
    # A run that is to export them is refused before it trains them.
    adapters = ["lora.rank=2", "lora.alpha=1", f"lora.targets=['*.out',{target}]", f"checkpoint.init={folder}"]
    exports = [
        "model=null",
        f"out={tmp_path / 'run'}",
        f"checkpoint.export={tmp_path / 'hf'}",
        "checkpoint.at_end=true",
    ]
    found = engine.problems(engine.write_recipe(tmp_path), *adapters, *exports)
    assert any(message in each and "checkpoint.export" in each and f"--base {folder}" in each for each in found)


def test_what_peft_would_not_find_is_refused(
    tmp_path: Path, not_durable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    section, lora = drawn("nemotron_h", 3, layers=4, vocab=61), ("attn",)
    folder = model_folder(tmp_path, section, torch.float32)
    checkpoint = adapted(folder, tmp_path / "ckpt", Lora(2, 1.0, lora))
    said = refused(capsys, checkpoint, tmp_path / "peft", "--to", "peft")
    assert "modules of nemotron_h have other names in memory" in said and not (tmp_path / "peft").exists()
    config = Config(lora=LoraConfig(rank=2, alpha=1.0, targets=lora))
    (told,) = remarks(Start(), config, configure(section), MeshShape())
    assert "modules of nemotron_h have other names in memory" in told


def test_adapters_of_a_part_of_their_base_are_merged_alone(
    tmp_path: Path, not_durable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a model that also sees the linears have other names: peft would warn, and leave the model as it is."""
    folder = model_folder(tmp_path, drawn("gemma3_text", 3, layers=4, vocab=61), torch.float32)
    checkpoint = adapted(folder, tmp_path / "ckpt", Lora(2, 1.0, ("attn",)))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": raw}))
    said = refused(capsys, checkpoint, tmp_path / "peft", "--to", "peft")
    assert "of which gemma3_text is a part, and peft would find no linear of these names" in said
    assert f"--to hf --base {folder}" in said and not (tmp_path / "peft").exists()
    lora = LoraConfig(rank=2, alpha=1.0, targets=("attn",))
    config = Config(lora=lora, checkpoint=CheckpointConfig(init=str(folder)))
    (told,) = remarks(Start(), config, configure({"config": str(folder)}), MeshShape())
    assert f"{folder} is a larger model of which gemma3_text is a part" in told


@pytest.mark.parametrize(("targets", "count"), [(("attn", "mlp.shared.down"), 1), (("attn", "experts"), 0)])
def test_a_run_says_when_it_starts_that_peft_would_load_them_wrongly(targets: tuple[str, ...], count: int) -> None:
    config = Config(lora=LoraConfig(rank=2, alpha=1.0, targets=targets))
    said = remarks(Start(), config, configure(drawn("deepseek_v3", 3, layers=4, vocab=61)), MeshShape())
    assert len(said) == count and all("peft takes those of mlp.shared_experts.down_proj for" in line for line in said)


def test_a_stage_may_have_no_adapters(tmp_path: Path, not_durable: None) -> None:
    """Of what only some layers have."""
    folder = model_folder(tmp_path, drawn("qwen2_moe", 3, layers=4, vocab=61), torch.float32)
    checkpoint = adapted(folder, tmp_path / "ckpt", Lora(2, 1.0, ("mlp.shared",)))
    files = Checkpoint.open(checkpoint).index.files
    assert len(files) == 2 and reshard.main([str(checkpoint), str(tmp_path / "one")]) == 0


def test_peft_mistakes_the_linears_that_we_refuse() -> None:
    """Of the families that there are, by its own table."""
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion", reason="the peft library is missing")
    for name in FAMILIES:
        found = [*linears(configure(drawn(name, 3, layers=4, vocab=61)).schema)]
        taken = conversion._MOE_TARGET_MODULE_MAPPING.get(conversion._MODEL_TO_CONVERSION_PATTERN.get(name), {})
        modules = {linear.hf_name for linear in found if not linear.is_parameter}
        assert mistaken_by_peft(name, found) == sorted(each for each in modules if each.split(".")[-1] in taken), name


def test_a_damaged_index_is_refused(tmp_path: Path, not_durable: None) -> None:
    made = make(tmp_path, "gpt2")
    index = made.checkpoint / "index.json"
    tree = json.loads(index.read_text())
    for change in ({"rank": 4}, {"rank": 0}, {"alpha": "x"}, {"targets": [3]}, {"base": {"path": "x"}}, {"dropout": 1}):
        index.write_text(json.dumps(tree | {"adapters": tree["adapters"] | change}))
        with pytest.raises(ValueError, match=r"index\.json"):
            Checkpoint.open(made.checkpoint)


def test_adapters_are_merged_into_the_whole(tmp_path: Path) -> None:
    whole = saved("gemma3", tmp_path / "hf")
    ours = adapted(whole, tmp_path / "adapters", Lora(2, 4.0, ("attn.qkv",)))
    assert convert.main([str(ours), str(tmp_path / "merged"), "--to", "hf", "--base", str(whole)]) == 0
    before, after = load_file(whole / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if re.search(r"language_model.*\.[qkv]_proj", name)}
