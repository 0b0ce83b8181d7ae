"""Going on: bitwise on the same layout, to rounding on any other; and what is said or refused before a run starts."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from device_store import device_store
from engine import GPT2, LENGTH, LLAMA, RECIPE, VOCAB, Result, of, path_of, problems, same, train, trainer, weights
from pool import Pool

from megacore import checkpoints
from megacore.config import Config
from megacore.inference.model_loader import model_from
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.gradients.buckets import WholeSpan
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import execute, native, plan
from megacore.recipe import load
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training import metrics
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.check import check
from megacore.training.progress import Progress
from megacore.training.resume import find, model_of, raw_of, remarks

TOLERANCE = 1e-9
OFF = ["evaluate.every=0"]
STATES = ("weights", "exp_avg", "exp_avg_sq")
ONE = MeshShape()


@pytest.fixture(scope="module")
def six(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one process in float64, with checkpoints after 3 and 6."""
    out = tmp_path_factory.mktemp("six") / "run"
    train(recipe, [f"out={out}", "train.steps=6", "checkpoint.every=3"])
    return out


# -- on the same layout, bitwise

FP16 = ["train.precision=fp16", "loss_scale.growth_interval=2"]
BF16 = ["train.precision=bf16", "optimizer.moments=bf16"]


@pytest.mark.parametrize(
    ("overrides", "scale", "moments"),
    [
        pytest.param(FP16, {"scale": 2.0**17, "good_steps": 1}, torch.float32, id="fp16"),
        pytest.param(BF16, None, torch.bfloat16, id="moments", marks=pytest.mark.in_turn(2, 0)),
        pytest.param(["train.precision=fp8"], None, torch.float32, id="fp8", marks=pytest.mark.in_turn(2, 0)),
    ],
)
def test_a_run_in_few_bits_goes_on_bitwise(
    tmp_path: Path, overrides: list[str], scale: dict[str, float] | None, moments: torch.dtype
) -> None:
    """With masters of fp32, the scale of the loss, and moments of their own dtype."""
    model = LLAMA | {"hidden_size": 32, "intermediate_size": 64}  # fp8 takes blocks of 16
    recipe = engine.write_recipe(tmp_path, RECIPE | {"model": model})
    common = ["train.steps=6", "checkpoint.every=3", *OFF, *overrides]
    straight = train(recipe, [f"out={tmp_path / 'straight'}", *common])
    resume = f"checkpoint.resume={path_of(tmp_path / 'straight', 3)}"
    made = trainer(recipe, [f"out={tmp_path / 'rest'}", resume, *common], log=True)
    assert made.train_step.scaler.state() == scale
    states = {"master": torch.float32, "exp_avg": moments, "exp_avg_sq": moments}
    kept = made.train_step.optimizer.states()
    assert {state: {*dtypes.values()} for state, dtypes in kept.items()} == {name: {states[name]} for name in states}
    rest = engine.result(made, made.fit())
    for key in ("loss", "loss_scale", "grad_norm"):
        assert rest.values(key) == straight.values(key)[3:], key
    assert same(rest.weights, straight.weights)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("world", "files", "overrides"),
    [
        pytest.param(2, 3, ["train.precision=fp32"], id="dp2-fp32"),
        pytest.param(4, 16, ["train.precision=bf16", "mesh.tp=2", "mesh.pp=2"], id="tp2-pp2-bf16"),
        pytest.param(2, 4, ["train.precision=bf16", "zero.shard=gradients", "zero.compress=bf16"], id="dp2-rounded"),
        pytest.param(4, 12, ["train.precision=bf16", "mesh.tp=2", "zero.compress=int8"], id="dp2-tp2-int8"),
        pytest.param(2, 6, ["mesh.tp=2", "memory.compress_activations=true"], id="tp2-8bits"),
    ],
)
def test_ten_steps_and_ten_are_twenty_bitwise(
    pool: Pool, tmp_path: Path, world: int, files: int, overrides: list[str]
) -> None:
    """With dropout, whose masks must go on too."""
    recipe = engine.write_recipe(tmp_path, RECIPE | {"model": GPT2})
    overrides = ["train.steps=20", "checkpoint.every=10", "evaluate.every=5", "batch.micro_size=2", *overrides]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    twenty = pool.run(world, train, recipe, [f"out={straight}", *overrides])
    ten = pool.run(world, train, recipe, [f"out={resumed}", f"checkpoint.resume={path_of(straight, 10)}", *overrides])
    assert [result.last for result in ten] == [20] * world
    for key in ("loss", "grad_norm", "lr", "tokens", "validation_loss"):
        values = ten[0].values(key)
        assert len(values) == (2 if key == "validation_loss" else 10)
        assert values == twenty[0].values(key)[-len(values) :], key
    for one, other in zip(twenty, ten, strict=True):
        assert same(one.weights, other.weights)
    # Every state, to the byte; and there was something to lose in it.
    half, end = (engine.tensor_files(path_of(straight, step)) for step in (10, 20))
    engine.assert_same_files(path_of(straight, 20), path_of(resumed, 20), files)
    assert all(data != half[name] for name, data in end.items())


def residuals(recipe: str, overrides: list[str]) -> tuple[dict[str, np.ndarray], bool]:
    """What rounding has left of this rank's gradients when a run goes on, and whether that is saved again."""
    optimizer = trainer(recipe, overrides).train_step.optimizer
    found = {name: torch.empty(each.shape) for name, each in optimizer._gradients.parameters.items()}
    for name, host in found.items():
        optimizer.read_into("residual_of_0", name, host)
    return {name: host.numpy() for name, host in found.items()}, "residual_of_0" in optimizer.states()


def test_what_rounding_has_left_is_dealt_out_to_fewer_and_to_more_ranks(
    recipe: str, pool: Pool, tmp_path: Path
) -> None:
    out = [f"out={tmp_path}", "zero.compress=int8", "train.precision=fp32", "train.steps=3", "checkpoint.every=3", *OFF]
    pool.run(2, train, recipe, out)
    saved = path_of(tmp_path, 3)
    left = [engine.whole(saved, f"residual_of_{rank}") for rank in range(2)]
    together = {name: left[0][name] + left[1][name] for name in left[0]}
    assert all(np.abs(each).max() > 0 for each in together.values())
    on = [*out, f"checkpoint.resume={saved}", f"out={tmp_path / 'on'}"]
    for world, more in ((4, []), (4, ["mesh.cp=2"]), (2, ["zero.shard=optimizer"])):
        found, _ = zip(*pool.run(world, residuals, recipe, [*on, *more]), strict=True)
        assert all(np.array_equal(found[rank][name], left[rank][name]) for rank in range(2) for name in together)
        assert not any(each.any() for rank in range(2, world) for each in found[rank].values())
    for world, more, line in (
        (2, [], None),
        (4, [], "on 2 ranks (dp x cp) is dealt out to 4: its sum stays"),
        (1, [], "(zero.compress=int8) is left out from here on"),
        (2, ["zero.compress=none"], "(zero.compress=int8) is left out from here on"),
    ):
        told = [each for each in said(recipe, *on, *more, mesh=MeshShape(dp=world)) if "what rounding" in each]
        assert line in told[0] if line else not told
    ((nothing, again),) = pool.run(1, residuals, recipe, on)
    assert not again and not any(each.any() for each in nothing.values())
    pool.run(4, train, recipe, [*on, "train.steps=4", "checkpoint.every=4"])
    four = path_of(tmp_path / "on", 4)
    left = [engine.whole(four, f"residual_of_{rank}") for rank in range(4)]
    on = [*out, f"checkpoint.resume={four}", f"out={tmp_path / 'two'}", "train.steps=4"]
    (one, _), (other, _) = pool.run(2, residuals, recipe, on)
    for name in together:
        for found_here, first in ((one, 0), (other, 1)):
            want = left[first][name].astype(np.float32) + left[first + 2][name].astype(np.float32)
            assert np.array_equal(found_here[name], want), name


def test_it_goes_on_where_it_was_stopped(recipe: str, six: Path, tmp_path: Path) -> None:
    """In the same folder, its log read as if it had never stopped."""
    overrides = [f"out={tmp_path / 'run'}", "train.steps=6", "checkpoint.every=3", "checkpoint.resume=auto"]
    made = trainer(recipe, overrides, log=True)

    def stop(step: int) -> None:
        if step == 5:
            of(made, Checkpoints)._saver.finish()
            raise InterruptedError

    engine.in_steps(made, stop)
    with pytest.raises(InterruptedError):
        made.fit()
    assert [record["step"] for record in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    result = train(recipe, overrides)
    straight = metrics.read(six / "metrics.jsonl")
    timing = {"seconds_per_step", "tokens_per_second", "tflops_per_device", "mfu", "peak_memory_gib"}
    timing |= {"time", "wall_seconds", "goodput"}
    for record, want in zip(result.records, straight, strict=True):
        assert {k: v for k, v in record.items() if k not in timing} == {k: want[k] for k in want if k not in timing}
    assert list(checkpoints.complete(checkpoints.folder_of(tmp_path / "run"))) == [3, 6]


# -- on another layout, to rounding

BARE = ["pipeline.chunks=2", "pipeline.schedule=zb-interleaved", "pipeline.layers_per_stage=0,3,1,0"]
LAYOUTS = [
    pytest.param(4, ["mesh.tp=4", "batch.micro_size=4"], id="tp4"),  # kv heads shared, vocabulary padded
    pytest.param(2, ["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"], id="pp2-interleaved"),
    pytest.param(4, ["mesh.tp=2", "mesh.pp=2", "pipeline.layers_per_stage=[3,1]"], id="tp2-pp2-uneven"),
    pytest.param(4, ["mesh.tp=2", "mesh.pp=2", *BARE], id="tp2-pp2-bare"),
    pytest.param(2, ["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=zb-v"], id="pp2-zb-v"),
    pytest.param(2, ["mesh.pp=2", "memory.recompute=[full,none]"], id="pp2-each-stage"),
    pytest.param(2, [], id="dp2"),
    pytest.param(3, ["zero.shard=gradients"], id="dp3-uneven"),
    pytest.param(4, ["mesh.cp=2", "mesh.tp=2", "batch.micro_size=1"], id="cp2-tp2"),
]


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(("world", "overrides"), LAYOUTS)
def test_another_layout_goes_on_with_the_same_numbers(
    pool: Pool, recipe: str, six: Path, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    """There: from one process at step 3. And back: its own step 3 is that of one process, which goes on from it."""
    common = ["train.steps=6", "checkpoint.every=3", *OFF]
    there, here = tmp_path / "there", tmp_path / "here"
    start = f"checkpoint.resume={path_of(six, 3)}"
    ranks: list[Result] = pool.run(world, train, recipe, [f"out={there}", start, *common, *overrides])
    straight = metrics.curve(metrics.read(six / "metrics.jsonl"), "loss")
    np.testing.assert_allclose(ranks[0].values("loss"), [loss for _, loss in straight[3:]], rtol=TOLERANCE)
    for state in STATES:
        engine.assert_near(engine.whole(path_of(there, 6), state), engine.whole(path_of(six, 6), state), TOLERANCE)
    back = train(
        recipe,
        [f"out={here}", f"checkpoint.resume={path_of(there, 6)}", "train.steps=8", "checkpoint.at_end=true", *OFF],
    )
    forth = train(recipe, [f"out={tmp_path / 'forth'}", f"checkpoint.resume={path_of(six, 6)}", "train.steps=8", *OFF])
    np.testing.assert_allclose(back.values("loss"), forth.values("loss"), rtol=TOLERANCE)
    engine.assert_near(back.weights, forth.weights, TOLERANCE)


# -- other batches, other precision, left out steps


def test_another_batch_size_goes_on_with_the_next_sample(recipe: str, six: Path, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.resume={path_of(six, 3)}", "batch.global_size=4"]
    made = trainer(
        recipe, [*overrides, "batch.micro_size=1", "train.steps=5", "checkpoint.at_end=true", *OFF], log=True
    )
    trained = mock.Mock(wraps=made.train_step.backward)
    made.train_step.backward = trained  # type: ignore[method-assign]
    made.fit()
    seen = [batch.tokens.tolist() for call in trained.call_args_list for batch in call.args[0]]
    assert seen == [made.batches.source.sample(index).tokens[:-1].tolist() for index in range(24, 32)]
    told = json.loads((path_of(tmp_path / "run", 5) / "trainer.json").read_text())
    assert (told["consumed_samples"], told["tokens"]) == (32, 32 * LENGTH)
    tokens = metrics.curve(metrics.read(tmp_path / "run" / "metrics.jsonl"), "tokens")
    assert tokens == [(4, 28 * LENGTH), (5, 32 * LENGTH)]


@pytest.mark.in_turn(2, 0)
def test_masters_are_the_weights_of_a_wider_run_and_the_other_way_round(recipe: str, tmp_path: Path) -> None:
    common = ["train.steps=4", "checkpoint.every=2", *OFF]
    narrow, wide = tmp_path / "bf16", tmp_path / "fp32"
    train(recipe, [f"out={narrow}", "train.precision=bf16", *common])
    masters = engine.whole(path_of(narrow, 2), "master")
    made = trainer(recipe, [f"checkpoint.resume={path_of(narrow, 2)}", "train.precision=fp32", *common])
    assert same(weights(made), masters)
    train(recipe, [f"out={wide}", "train.precision=fp32", *common])
    exact = engine.whole(path_of(wide, 2), "weights")
    made = trainer(recipe, [f"checkpoint.resume={path_of(wide, 2)}", "train.precision=bf16", *common])
    rounded = {name: torch.from_numpy(value).bfloat16().double().numpy() for name, value in exact.items()}
    assert same(weights(made), rounded) and not same(exact, rounded)
    names = {id(part): part.span.name for part in made.train_step.gradients.parts if isinstance(part, WholeSpan)}
    for target in device_store(made.train_step.optimizer).targets:
        assert np.array_equal(target.tensor.double().numpy(), exact[names[id(target.part)]])
    # Without masters, in bf16 alone.
    pure = ["train.precision=bf16", "optimizer.master_weights=false", *common]
    made = trainer(recipe, [f"checkpoint.resume={path_of(narrow, 2)}", *pure])
    assert made.contents.dtypes.keys() == {*STATES}
    assert all(target.tensor.dtype == torch.bfloat16 for target in device_store(made.train_step.optimizer).targets)


def test_steps_that_were_left_out_do_not_count_in_the_bias_correction(recipe: str, tmp_path: Path) -> None:
    common = ["train.steps=6", "checkpoint.every=3", "optimizer.non_finite=skip", "train.precision=fp32", *OFF]
    made = trainer(recipe, [f"out={tmp_path / 'straight'}", *common], log=True)
    engine.scale_losses(made, {2: torch.nan})
    straight = engine.result(made, made.fit())
    told = json.loads((path_of(tmp_path / "straight", 3) / "trainer.json").read_text())
    assert (told["step"], told["optimizer_steps"]) == (3, 2)
    start = f"checkpoint.resume={path_of(tmp_path / 'straight', 3)}"
    resumed = train(recipe, [f"out={tmp_path / 'resumed'}", start, *common])
    assert resumed.values("loss") == straight.values("loss")[-3:]
    assert resumed.values("skipped_steps") == [1, 1, 1]
    assert same(resumed.weights, straight.weights)


# -- the weights of somebody else


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face folder as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "family"})
    path = tmp_path_factory.mktemp("hf") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_hugging_face_folder_starts_at_the_loss_that_transformers_computes(
    recipe: str, folder: Path, tmp_path: Path
) -> None:
    import transformers

    bare = engine.write_recipe(tmp_path, {**RECIPE, "model": {}})
    made = trainer(bare, [f"checkpoint.init={folder}"])
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    held = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    ours = weights(made)
    for layer in range(4):
        qkv = [held[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert np.array_equal(ours[f"layers.{layer}.attn.qkv.weight"], np.concatenate(qkv))
    assert any(np.array_equal(value, held["lm_head.weight"]) for value in ours.values())
    batches = made.batches.microbatches(0)
    tokens = torch.from_numpy(np.concatenate([batch.tokens for batch in batches]))
    labels = torch.from_numpy(np.concatenate([batch.labels for batch in batches]))
    logits = theirs(tokens).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    stats = made.train_step.backward(made.upload(batches, 1))
    assert stats.loss.item() == pytest.approx(want, rel=1e-6)  # rope in fp32 on their side
    assert made.start == Progress() and made.fit() == 5


def shards(recipe: str, overrides: list[str]) -> dict[str, np.ndarray]:
    return weights(trainer(recipe, overrides))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_weights_start_on_any_layout(pool: Pool, recipe: str, six: Path, folder: Path, kind: str) -> None:
    source = folder if kind == "folder" else path_of(six, 6)
    made = trainer(recipe, [f"checkpoint.init={source}"])
    store = device_store(made.train_step.optimizer)
    assert made.start == Progress() and made.train_step.optimizer.updates == 0
    assert not any(store.adamw.state[target.tensor]["exp_avg"].any() for target in store.targets)
    one, layout = weights(made), made.model.parameters.layout
    ranks = pool.run(4, shards, recipe, [f"checkpoint.init={source}", "mesh.tp=2", "mesh.pp=2"])
    target = native(layout_of(made.model.config, MeshShape(tp=2, pp=2)), range(4))
    for stored, copies in plan(layout.schema, native(layout, [0]), target):
        want = np.zeros(stored.shape)
        for copy in copies:
            execute(copy, one[copy.source.name], want)
        assert isinstance(stored.where, int)
        assert np.array_equal(ranks[stored.where][stored.name], want), stored.name


def test_the_config_of_the_source_comes_along(recipe: str, folder: Path, six: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    setup = check(recipe, [f"checkpoint.init={folder}"], 1, 1)
    assert raw_of(setup.model, setup.start.source) == {**raw, "max_position_embeddings": LENGTH}
    changed = replace(setup.model, attention_dropout=0.5)  # type: ignore[call-arg]
    assert raw_of(changed, setup.start.source) == {**raw, "attention_dropout": 0.5}
    assert raw_of(setup.model, None) == setup.model.to_hugging_face()


@pytest.mark.parametrize(
    ("held", "given", "written"),
    [
        (
            {"rope_theta": 1e5, "rope_scaling": None},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 2e5},
            {"rope_theta": 2e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
        ),
    ],
    ids=["scaling-over-old", "theta-over-old", "scaling-over-new"],
)
def test_a_rope_that_the_recipe_changes_is_written_as_the_source_spells_it(
    held: dict[str, Any], given: dict[str, Any], written: dict[str, Any]
) -> None:
    raw = {name: value for name, value in LLAMA.items() if name != "family"} | {
        "model_type": "llama",
        "eos_token_id": 7,
    }
    source: Any = SimpleNamespace(raw=raw | held, config=configure({"family": "llama"} | raw | held), path="hf")
    model = model_of(Config(model=given), source)
    assert raw_of(model, source) == raw | written


# -- before anything starts


def test_a_model_that_is_another_one_is_refused_and_each_difference_named(recipe: str, six: Path) -> None:
    other = ["model.hidden_size=32", "model.num_hidden_layers=2", "model.attention_bias=true", "train.steps=6"]
    for key in ("init", "resume"):
        found = problems(recipe, f"checkpoint.{key}={path_of(six, 6)}", *other)
        said = "\n".join(found)
        assert "embed is 32 in the recipe and 16 in the checkpoint" in said
        assert "layer is 2 in the recipe and 4 in the checkpoint" in said
        assert "attn.qkv.bias (q) is not in the checkpoint" in said
        assert all(problem.startswith("model: ") for problem in found)


def said(recipe: str, *overrides: str, mesh: MeshShape = ONE) -> list[str]:
    setup = check(recipe, overrides, mesh.world, mesh.world)
    return remarks(setup.start, setup.config, setup.model, mesh, setup.corpora.identities)


def test_what_has_changed_is_said_in_a_line_each(recipe: str, six: Path, tmp_path: Path) -> None:
    start = f"checkpoint.resume={path_of(six, 3)}"
    same = ["train.steps=6", start, f"out={tmp_path / 'run'}"]
    resuming = f"Resuming after step 3 (192 tokens) from {path_of(six, 3)}."
    assert said(recipe, *same) == [resuming]
    changed = ["optimizer.lr=0.5", "data.seed=3", "schedule.warmup_steps=1", "batch.global_size=4", "log.every=9"]
    assert said(recipe, *same, *changed) == [
        resuming,
        "  data.seed is 3, and was 0",
        "  batch.global_size is 4, and was 8",
        "  optimizer.lr is 0.5, and was 0.01",
        "  schedule.warmup_steps is 1, and was 2",
        REORDERED,
    ]
    # What the file says of the run before is told in its line, and does nothing to a terminal.
    evil = shutil.copytree(path_of(six, 3), tmp_path / "evil")
    trainer = json.loads((evil / "trainer.json").read_text())
    trainer["recipe"]["optimizer"]["lr"] = "\x1b[2J\nDone."
    (evil / "trainer.json").write_text(json.dumps(trainer))
    assert said(recipe, "train.steps=6", f"checkpoint.resume={evil}", f"out={tmp_path / 'run'}")[1:] == [
        r"  optimizer.lr is 0.01, and was '\x1b[2J\nDone.'"
    ]
    # Masks differ only where there are some.
    assert said(recipe, *same, mesh=MeshShape(dp=2)) == [resuming]
    first, dropout, masks = said(recipe, *same, "model.attention_dropout=0.1", mesh=MeshShape(dp=2))
    assert (first, dropout) == (resuming, "  model.attention_dropout is 0.1, and was 0.0")
    assert "dropout draws other masks" in masks
    assert len(said(recipe, *same, "model.attention_dropout=0.1")) == 2


REORDERED = (
    "  samples come in another order from here on: some of those that were trained on in this epoch may come again, "
    "and others never"
)


def test_other_tokens_or_another_order_are_said(recipe: str, tmp_path: Path) -> None:
    """The same tokens elsewhere are the same; others of the same size at the same place are not."""
    first, second = engine.write_corpus(tmp_path / "first"), engine.write_corpus(tmp_path / "second", 80)
    both = f"data.train=[{{path: {first}}}, {{path: {second}, weight: 2}}]"
    train(recipe, [f"out={tmp_path / 'run'}", both, "train.steps=6", "checkpoint.every=3", *OFF])
    same = ["train.steps=6", f"checkpoint.resume={path_of(tmp_path / 'run', 3)}", f"out={tmp_path / 'next'}"]
    assert len(said(recipe, *same, both)) == 1
    for suffix in ".bin", ".idx":
        shutil.copy(f"{second}{suffix}", tmp_path / f"moved{suffix}")
    moved, listed = said(recipe, *same, both.replace("second", "moved"))[1:], "  data.train is"
    assert len(moved) == 1 and moved[0].startswith(listed)
    weighted = said(recipe, *same, both.replace("weight: 2", "weight: 3"))[1:]
    assert weighted[0].startswith(listed) and weighted[1:] == [REORDERED]
    data = np.memmap(f"{second}.bin", np.uint16, "r+")
    data[-1] ^= 1
    data.flush()
    (refused,) = problems(recipe, *same, both)
    assert refused.startswith(f"data.train: {second} holds other tokens than those that the run was trained on: put")
    # Under another name they are meant; the rest of the line is the recipe's.
    assert said(recipe, *same, both.replace("second", "moved").replace("first", "second"))[2:] == [
        f"  {second} holds other tokens than those that the run was trained on",
        REORDERED,
    ]
    assert said(recipe, *same, both, "data.allow_changed=true")[1:] == [
        "  data.allow_changed is True, and was False",
        f"  {second} holds other tokens than those that the run was trained on",
        REORDERED,
    ]
    trainer = path_of(tmp_path / "run", 3) / "trainer.json"
    tree = json.loads(trainer.read_text())
    del tree["data"]  # as of a version that did not write it
    trainer.write_text(json.dumps(tree))
    assert len(said(recipe, *same, both)) == 1


def test_without_a_model_the_checkpoint_s_is_taken(six: Path, tmp_path: Path) -> None:
    bare = engine.write_recipe(tmp_path, {**RECIPE, "model": {}})
    setup = check(bare, [f"checkpoint.resume={path_of(six, 3)}"], 1, 1)
    assert setup.model == Checkpoint.open(path_of(six, 3)).config
    full = engine.write_recipe(tmp_path)
    assert check(full, [f"checkpoint.init={path_of(six, 3)}", "model=null"], 1, 1).model == setup.model
    bare = engine.write_recipe(tmp_path, {**RECIPE, "model": {}})
    changed = check(bare, [f"checkpoint.init={path_of(six, 3)}", "model.attention_dropout=0.25"], 1, 1)
    assert changed.model == replace(setup.model, attention_dropout=0.25)  # type: ignore[call-arg]
    (problem,) = problems(bare)
    assert "--init MODEL" in problem and "model.preset" in problem


REFUSED = [
    ("checkpoint.init={three} checkpoint.resume={three}", "both say where to start"),
    (
        "checkpoint.init=megacore/nowhere",
        "megacore/nowhere is not a folder, and megacore is one here",
        "megacore/nowhere@main",
    ),
    ("checkpoint.init={new}/nowhere", "checkpoint: ", "nowhere"),
    ("checkpoint.resume={new}", "checkpoint: ", "index.json"),
    (f"checkpoint.init={{six}} model.vocab_size={VOCAB + 1}", f"is {VOCAB + 1} in the recipe and {VOCAB} in the check"),
    ("out={out} checkpoint.resume=auto train.steps=5", "(5) is below the 6 steps that are done", "choose more than 6"),
    ("checkpoint.resume={six} optimizer.name=muon", "has the moments of adamw", "set optimizer.name=adamw"),
    ("out={out}", "already holds a run", "checkpoint.resume=auto"),
    ("out={out} checkpoint.init={six}", "already holds a run"),
    # The newer ones would be another run's.
    ("out={out} checkpoint.resume={three}", "is older than step-00000006"),
]


@pytest.mark.parametrize("case", REFUSED, ids=range(len(REFUSED)))
def test_what_a_run_does_not_start_from(recipe: str, six: Path, tmp_path: Path, case: tuple[str, ...]) -> None:
    overrides, *words = case
    given = overrides.format(out=six, three=path_of(six, 3), six=path_of(six, 6), new=tmp_path)
    (problem,) = problems(recipe, *given.split())
    assert all(word in problem for word in words), problem


def test_auto_takes_the_newest_or_begins(recipe: str, six: Path, tmp_path: Path) -> None:
    empty = [f"out={tmp_path / 'new'}", "checkpoint.resume=auto"]
    folder = checkpoints.folder_of(tmp_path / "new")
    begins = f"There is no checkpoint in {folder} to resume from: the run starts"
    assert said(recipe, *empty) == [f"{begins} afresh."]
    assert said(recipe, *empty, f"checkpoint.init={path_of(six, 3)}") == [f"{begins} from {path_of(six, 3)}."]
    config = load(recipe, [f"out={six}", "checkpoint.resume=auto"])
    assert find(config).progress.step == 6
    # Half written and half removed ones are none.
    for name in (".step-00000009.partial", ".step-00000008.doomed", "step-00000007"):
        (checkpoints.folder_of(six) / name).mkdir()
    try:
        assert find(config).progress.step == 6
        checkpoints.clean(checkpoints.folder_of(six))
        names = sorted(path.name for path in checkpoints.folder_of(six).iterdir())
        assert names == [f"step-0000000{step}" for step in (3, 6, 7)]
    finally:
        (checkpoints.folder_of(six) / "step-00000007").rmdir()


def test_a_runs_folder_stands_for_its_newest_checkpoint(recipe: str, six: Path, tmp_path: Path) -> None:
    for folder in (six, checkpoints.folder_of(six)):
        at = f"out={tmp_path / 'new'}"
        assert said(recipe, at, f"checkpoint.init={folder}") == [f"Starting from the weights of {path_of(six, 6)}."]
        resumed = said(recipe, at, f"checkpoint.resume={folder}", "train.steps=6")
        assert resumed[0].endswith(f"from {path_of(six, 6)}.") and "after step 6" in resumed[0]
        own = check(recipe, [f"out={six}", f"checkpoint.resume={folder}", "train.steps=6"], 1, 1)
        assert own.start.progress.step == 6
    assert checkpoints.newest_of(path_of(six, 3)) == path_of(six, 3)
    checkpoints.folder_of(tmp_path).mkdir()
    (problem,) = problems(recipe, f"checkpoint.init={tmp_path}")
    assert "is the folder of a run, and there is no checkpoint in" in problem


def loaded_apart(paths: list[Path]) -> str:
    """What is said where a run saves while ranks look for its newest checkpoint."""
    with pytest.raises(StoreError) as loading:
        model_from(open_folder(paths[torch.distributed.get_rank()]), Mesh.create(MeshShape(dp=2)))
    return str(loading.value)


def test_ranks_that_find_different_checkpoints_of_one_run_do_not_mix_them(
    pool: Pool, recipe: str, six: Path, tmp_path: Path
) -> None:
    paths = [path_of(six, 3), path_of(six, 6)]
    starts = [[f"out={tmp_path / 'run'}", f"checkpoint.init={path}"] for path in paths]
    for message in (*pool.run(2, engine.apart, recipe, starts), *pool.run(2, loaded_apart, paths)):
        assert f"different checkpoints of one run ({paths[0]}, {paths[1]})" in message


def test_a_folder_that_holds_a_run_is_gone_on_with_or_left_alone(recipe: str, six: Path, tmp_path: Path) -> None:
    check(recipe, [f"out={six}", f"checkpoint.resume={path_of(six, 6)}", "train.steps=6"], 1, 1)
    others = [f"out={tmp_path}", f"checkpoint.resume={path_of(six, 6)}", "train.steps=8"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 2.0}\n')
    (problem,) = problems(recipe, *others)
    assert "is not a checkpoint of it" in problem
    # One that began so, and ended before its first checkpoint, begins so again.
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 2.0}\n')
    check(recipe, others, 1, 1)
    train(recipe, [*others, "checkpoint.at_end=true"])
    (problem,) = problems(recipe, *others)
    assert "is not a checkpoint of it" in problem


@pytest.mark.in_turn(2, 0)
def test_records_of_a_run_whose_checkpoints_are_not_found_are_kept(recipe: str, tmp_path: Path) -> None:
    often = [f"out={tmp_path}", "checkpoint.every=2", "checkpoint.resume=auto", *OFF]
    for number in (1, 2):
        assert engine.fit(recipe, often) == 5
        path = tmp_path / "metrics.jsonl"
        assert [each["step"] for each in metrics.read(path)] == [1, 2, 3, 4, 5]
        assert len(path.read_text().splitlines()) == 5 * number
        checkpoints.folder_of(tmp_path).rename(tmp_path / f"moved-{number}")


def test_what_cannot_be_started_from_is_named(recipe: str, six: Path, tmp_path: Path) -> None:
    # Without a model of its own the recipe's other problems are still found.
    bare = engine.write_recipe(tmp_path, {**RECIPE, "model": {}})
    found = problems(bare, f"checkpoint.init={tmp_path / 'nowhere'}", "train.steps=0")
    assert len(found) == 2
    copied = tmp_path / "weights"
    shutil.copytree(path_of(six, 3), copied)
    (copied / "trainer.json").unlink()
    index = json.loads((copied / "index.json").read_text())
    (copied / "index.json").write_text(json.dumps({**index, "step": None}))  # as of converted weights
    (problem,) = problems(recipe, f"checkpoint.resume={copied}")
    assert "no training run (no trainer.json)" in problem and "checkpoint.init" in problem
    (copied / "index.json").write_text(json.dumps(index))
    (copied / "trainer.json").write_text('{"step": 3, "consumed_samples": -1, "tokens": 4}')
    (problem,) = problems(recipe, f"checkpoint.resume={copied}")
    assert "has no consumed_samples and no optimizer_steps and no recipe" in problem


@pytest.mark.quick
def test_progress_is_read_as_it_was_written() -> None:
    progress = Progress(step=7, samples=50, tokens=400, updates=6)
    config = replace(Config(), batch=replace(Config().batch, global_size=10))
    later = progress.at(9, config, updates=8)
    assert later == Progress(9, 70, 400 + 20 * config.data.sequence_length, 8) and later.skipped == 1
    tree = {"step": 7, "consumed_samples": 50, "tokens": 400, "optimizer_steps": 6, "data_order": 2, "recipe": {}}
    assert Progress.read(tree, "here") == progress
    for order in (1, 3, None, True):  # one of before the first release has none
        told = {key: value for key, value in {**tree, "data_order": order}.items() if value is not None}
        with pytest.raises(StoreError, match=r"here: data_order is .* go on with the version .* by checkpoint\.init"):
            Progress.read(told, "here")
    broken: list[Mapping[str, Any]] = [{**tree, "step": None}, {**tree, "step": True}, {**tree, "recipe": 3}]
    for wrong in broken:
        with pytest.raises(StoreError, match="here: has no"):
            Progress.read(wrong, "here")


def test_ranks_that_find_different_checkpoints_say_so(pool: Pool, recipe: str, six: Path, tmp_path: Path) -> None:
    out = f"out={tmp_path / 'run'}"
    for message in pool.run(2, engine.apart, recipe, [[out], [out, f"checkpoint.resume={path_of(six, 3)}"]]):
        assert "steps 0 to 3" in message and "all nodes share" in message
