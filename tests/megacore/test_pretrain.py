"""The program: problems are found before anything starts, and a run ends with what it promised, however it ends."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from device_store import device_store
from engine import VOCAB, of, problems, trainer, write_corpus, write_recipe
from PIL import Image
from pool import Pool

from megacore import resources
from megacore.control import Control
from megacore.data.corpus import Corpus as Facts
from megacore.models.registry import configure
from megacore.parallel import kernels
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.planning import capacity
from megacore.recipe import ConfigError, load
from megacore.training import build, main, metrics
from megacore.training.callbacks import signals
from megacore.training.callbacks.metrics import Metrics
from megacore.training.callbacks.signals import Signals
from megacore.training.check import check
from megacore.training.resume import Start
from megacore.training.start import headline
from megacore.training.trainer import Trainer

FACTS = Facts("corpus", 60, 1440, 5000, 3.5, VOCAB, None, 4.0625, 0, 0)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write_recipe(tmp_path)


# -- before anything starts


def damaged(folder: Path) -> None:
    (folder / "corpus.idx").write_bytes(b"not an index")


PREPARED: Mapping[str, Callable[[Path], object]] = {
    "short": lambda folder: write_corpus(folder / "short", documents=2),
    "facts": FACTS.write,
    "link": lambda folder: (folder / "tokenizer.json").symlink_to("/proc/self/environ"),
    "damaged": damaged,
}
LONG_SAMPLES = ["data.sequence_length=64", "model.max_position_embeddings=64"]
PROBLEMS: list[tuple[str, int, list[str], list[list[str]]]] = [
    (
        "",
        4,
        ["data.train=nowhere/corpus", "mesh.dp=3", "mesh.tp=2", "train.steps=0"],
        [["train.steps (0)"], ["mesh.dp (3)", "set mesh.dp=2 or null"], ["nowhere/corpus.bin", "megacore tokenize"]],
    ),
    (
        "",
        1,
        ["model.num_atention_heads=4", "model.mlp_bias=3"],
        [["model: ", "num_attention_heads"], ["model: ", "mlp"]],
    ),
    (
        "",
        1,
        ["model.num_key_value_heads=3", "optimizer.lr=0", "data.train=nowhere", "mesh.pp=2"],
        [["model: num_attention_heads"], ["optimizer.lr"], ["nowhere.bin"], ["cannot divide 1 ranks"]],
    ),
    ("facts", 1, [f"model.vocab_size={VOCAB - 1}"], [["set model.vocab_size to 61 or more"]]),
    ("short", 1, ["data.train={folder}/short", *LONG_SAMPLES], [["data: ", "one sample of length 64 takes 65"]]),
    ("link", 1, [], [["data: ", "tokenizer.json"]]),
    ("damaged", 1, ["optimizer.lr=0"], [["optimizer.lr"], ["data: ", "it is no index"]]),
]


@pytest.mark.parametrize(("prepared", "world", "overrides", "said"), PROBLEMS, ids=range(len(PROBLEMS)))
def test_all_problems_are_said_together(
    recipe: str, tmp_path: Path, prepared: str, world: int, overrides: list[str], said: list[list[str]]
) -> None:
    if prepared:
        PREPARED[prepared](tmp_path)
    found = problems(recipe, *(each.format(folder=tmp_path) for each in overrides), world=world)
    assert len(found) == len(said)
    for words in said:
        assert any(all(word in problem for word in words) for problem in found), (words, found)


@pytest.mark.parametrize("name", ["x" * 300, "a\\0b"], ids=["long", "nul"])
def test_names_that_no_folder_can_have_are_told(recipe: str, tmp_path: Path, name: str) -> None:
    found = problems(recipe, f'checkpoint.export="{tmp_path / name}"', "checkpoint.at_end=true")
    assert any(problem.startswith("a path of the recipe cannot be used: ") for problem in found), found


@pytest.mark.parametrize("name", ["checkpoints", "examples", "tensorboard", "wandb"])
def test_a_run_s_folder_that_leads_elsewhere_is_refused(recipe: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).symlink_to("../elsewhere")
    (problem,) = problems(recipe, f"out={tmp_path / 'run'}", "checkpoint.resume=auto")
    assert f"{name} leads to {tmp_path / 'elsewhere'}, and a run writes to its own folder alone" in problem


def test_a_model_that_cannot_fit_is_found(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its state alone, of all ranks here: 8 bytes each of weight, gradient and two moments."""
    needed = 32 * configure(load(recipe).model).schema.parameters
    check(recipe, [], 1, 1)
    monkeypatch.setattr(capacity, "host_memory", lambda: needed)
    check(recipe, [], 1, 1)
    monkeypatch.setattr(capacity, "host_memory", lambda: needed - 1)
    (problem,) = problems(recipe)
    assert "the 1 process here" in problem and "model.vocab_size" in problem and "megacore plan" in problem
    # Two ranks hold it twice; where one of them is elsewhere, or each holds half, there is room.
    monkeypatch.setattr(capacity, "host_memory", lambda: 2 * needed - 1)
    assert problems(recipe, "mesh.dp=2", world=2)
    check(recipe, ["mesh.dp=2"], 2, 1)
    check(recipe, ["mesh.pp=2"], 2, 2)
    monkeypatch.undo()
    assert any("GB" in problem for problem in problems(recipe, "model.vocab_size=100000000000"))


def test_inputs_of_blocks_must_fit_the_host(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait there for the backward: 8 bytes for each token, layer and dimension."""
    config = load(recipe)
    model = configure(config.model)
    tokens = config.batch.micro_size * config.data.sequence_length
    needed = 32 * model.schema.parameters + 8 * tokens * model.sizes["layer"] * model.sizes["embed"]
    monkeypatch.setattr(capacity, "host_memory", lambda: needed)
    check(recipe, ["memory.offload_activations=true"], 1, 1)
    monkeypatch.setattr(capacity, "host_memory", lambda: needed - 1)
    check(recipe, [], 1, 1)
    (problem,) = problems(recipe, "memory.offload_activations=true")
    assert "mesh.cp" in problem


def test_a_gpu_is_asked_too(recipe: str) -> None:
    config = load(recipe, ["train.device=cuda", "train.precision=fp32"])
    model = configure(config.model)
    needed = 16 * model.schema.parameters
    assert not list(capacity.capacity_problems(config, model, 1, 1, needed))
    (problem,) = capacity.capacity_problems(config, model, 1, 1, needed - 1)
    assert "a GPU here has" in problem


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    """And what is to be had of it is what its processes have not taken, but for an eighth."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\nSwapTotal: 1000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/step\n4:memory:/old\n")
    groups = tmp_path / "sys" / "fs" / "cgroup"

    def found() -> tuple[int | None, int | None]:
        return resources.host_memory(tmp_path), resources.free_memory(tmp_path)

    assert found() == (9000 * 1024, 5000 * 1024)
    (groups / "job" / "step").mkdir(parents=True)
    (groups / "job" / "step" / "memory.max").write_text("max\n")
    assert found() == (9000 * 1024, 5000 * 1024)
    for name, text in {"max": "4096000", "current": "3000000", "stat": "anon 1\ninactive_file 1000000"}.items():
        (groups / "job" / f"memory.{name}").write_text(f"{text}\n")
    assert found() == (4096000 + 1000 * 1024, 4096000 - 2000000 - 4096000 // 8)
    (groups / "memory" / "old").mkdir(parents=True)
    (groups / "memory" / "old" / "memory.limit_in_bytes").write_text("2048\n")
    assert found()[0] == 2048 + 1000 * 1024
    assert resources.host_memory(tmp_path / "nowhere") is None


def test_problems_end_the_program_with_status_2_and_nothing_is_written(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = [recipe, f"out={out}", "train.steps=0", "data.train=nowhere"]
    assert main.main(arguments) == 2
    shown = capsys.readouterr()
    assert "2 problems in the config" in shown.err and not shown.out
    assert not out.exists()
    # The other ranks of a node leave it to its first one to say so.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main.main(arguments) == 2
    assert "2 problems in the config" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main.main(arguments) == 2
    assert capsys.readouterr() == ("", "")


# -- a run


def test_a_run_leaves_what_it_says(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FACTS.write(tmp_path)
    out = tmp_path / "new" / "run"
    given = [f"out={out}", "train.precision=fp32", "log.report=true"]
    assert main.main([recipe, *given]) == 0
    shown = capsys.readouterr().out
    config = load(recipe, given)
    assert load(out / "config.yaml") == config
    records = metrics.read(out / "metrics.jsonl")
    losses = [loss for _, loss in metrics.curve(records, "loss")]
    held_out = [loss for _, loss in metrics.curve(records, "validation_loss")]
    assert len(losses) == 5 and len(held_out) == 3
    with Image.open(out / "loss.png") as picture:
        assert picture.format == "PNG"
    files = ["config.yaml", "loss.png", "metrics.jsonl", "report.html"]
    assert sorted(path.name for path in out.iterdir()) == files
    parameters = configure(config.model).schema.parameters
    assert f"llama of {parameters:,} parameters" in shown and "1 x cpu as pp=1 x dp=1" in shown
    assert "\nDone.\n" in shown
    assert f"training loss    {sum(losses) / 5:.4f} nats per token" in shown
    assert f"validation loss  {held_out[-1]:.4f}" in shown
    assert "unigram entropy  4.0625" in shown
    assert all(str(out / name) in shown for name in files)
    # A second run does not write over it.
    assert main.main([recipe, f"out={out}"]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_run_without_facts_and_evaluation_reports_what_there_is(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"out={tmp_path / 'run'}", "evaluate.every=0", "log.every=2", "batch.micro_size=3"]
    assert main.main([recipe, *given]) == 0
    shown = capsys.readouterr().out
    assert "a step computes 9 sequences, 1 of them blank (11%); none is with 6 or 9" in shown
    assert "(the last 3 records)" in shown
    assert "validation" not in shown and "unigram" not in shown


@pytest.mark.parametrize(
    ("cp", "overrides", "said"),
    [
        (1, [], "cp=1 x tp=1, bf16"),
        (4, [], "cp=4 x tp=1 (context by ring, balance auto), bf16"),
        (4, ["context.heads=2", "context.balance=rows"], "(context by ring, heads over 2, balance rows)"),
        (2, ["model.attention_dropout=0.1"], "(context by heads, balance auto)"),
    ],
)
def test_the_first_line_says_how_sequences_are_split(recipe: str, cp: int, overrides: list[str], said: str) -> None:
    setup = check(recipe, [f"mesh.cp={cp}", "train.precision=bf16", *overrides], cp, 1)
    assert headline(setup.config, setup.model, MeshShape(cp=cp), "cpu").count(said) == 1


def different_kernels() -> str:
    mesh = Mesh.create(MeshShape(dp=2))
    try:
        setup: Any = SimpleNamespace(start=Start(), corpora=SimpleNamespace(identities=[]), config=None, order=None)
        build._agree(Control.create(mesh), setup, f"Kernels: those of {mesh.rank}")
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_data_do_not_start(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """Of the same size, as of a file that only some nodes have made anew."""
    corpora = [write_corpus(tmp_path / name) for name in ("one", "other")]
    data = np.memmap(f"{corpora[1]}.bin", np.uint16, "r+")
    data[data.size // 2] ^= 1
    data.flush()
    for said in pool.run(2, engine.apart, recipe, [[f"data.train={each}"] for each in corpora]):
        assert " hold other tokens on ranks 1 than on rank 0: give" in said and "all nodes the same files" in said


def test_ranks_with_different_kernels_do_not_start(pool: Pool) -> None:
    """Those of some GPUs would wait for messages that those of others do not send."""
    for said in pool.run(2, different_kernels):
        assert "different kernels: make their machines alike (Kernels: those of 0; Kernels: those of 1)" in said


def test_the_recipe_s_loss_and_optimizer_arrive(recipe: str) -> None:
    overrides = ["loss.label_smoothing=0.1", "loss.z_loss=0.01", "optimizer.betas=[0.8,0.9]", "optimizer.eps=1e-5"]
    overrides += ["optimizer.clip=null", "log.peak_tflops=3.5"]
    overrides += ["pipeline.schedule=interleaved", "pipeline.chunks=2", "pipeline.group=3"]
    mesh = Mesh.single()
    made = build.trainer_of(check(recipe, overrides, 1, 1), mesh, Control.create(mesh))
    head = made.model.chunks[-1].head
    assert head is not None and (head.losses.label_smoothing, head.losses.z_loss) == (0.1, 0.01)
    pipeline = made.train_step.pipeline
    assert (pipeline.schedule, pipeline.group, len(made.model.chunks)) == ("interleaved", 3, 2)
    adamw, clip = device_store(made.train_step.optimizer).adamw, made.train_step.optimizer.clip
    assert {(group["betas"], group["eps"]) for group in adamw.param_groups} == {((0.8, 0.9), 1e-5)}
    assert clip is None and of(made, Metrics).peak_tflops == 3.5


def test_the_peak_is_that_of_a_step_s_products(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step that upcasts would be above the peak of one that cannot."""
    asked = list[Any]()
    monkeypatch.setattr(build, "peak_tflops", lambda *given: asked.append(given))
    mesh = Mesh.single()
    build.trainer_of(check(recipe, ["train.precision=bf16", "log.peak_tflops=null"], 1, 1), mesh, Control.create(mesh))
    assert asked == [(mesh.device, torch.bfloat16, kernels.mm)]


# -- how a run ends


@pytest.mark.in_turn(2, 0)
def test_skipped_steps_are_in_the_progress_and_in_the_report(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*given: Any) -> Trainer:
        made = build.trainer_of(*given)
        engine.scale_losses(made, dict.fromkeys(range(1, 9), torch.nan))
        return made

    monkeypatch.setattr("megacore.training.main.trainer_of", poisoned)
    arguments = [recipe, "optimizer.non_finite=skip", "train.precision=fp32"]
    assert main.main([*arguments, f"out={tmp_path / 'run'}"]) == 0
    shown = capsys.readouterr()
    assert "skipped steps    5 of 5, which changed nothing" in shown.out
    assert "step 1 of 5: loss nan" in shown.err and "skipped 1\n" in shown.err
    assert main.main([*arguments, f"out={tmp_path / 'other'}", "optimizer.max_skipped=3"]) == 1
    shown = capsys.readouterr()
    assert (
        "step 4, samples 24 to 31" in shown.err
        and "raise optimizer.max_skipped (3): with this one 4 of the last" in shown.err
    )
    assert "Done" not in shown.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_its_step(
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    def signalled(*given: Any) -> Trainer:
        made = build.trainer_of(*given)
        engine.in_steps(made, lambda step: signal.raise_signal(number) if step == 3 else None)
        return made

    monkeypatch.setattr(main, "trainer_of", signalled)
    out = tmp_path / "run"
    assert main.main([recipe, f"out={out}", "train.steps=9", "evaluate.every=4", "log.every=100"]) == 0
    assert "Done after step 3 of 9." in capsys.readouterr().out
    (last,) = metrics.read(out / "metrics.jsonl")
    assert last["step"] == 3 and "loss" in last, "its turn had not come, and it does not wait for an evaluation"
    assert (out / "loss.png").is_file()


def test_only_a_second_sigint_ends_at_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, however often, leaves the time that a checkpoint takes; one Ctrl-C may arrive twice, from the terminal
    and from a launcher, which passes it on as SIGTERM."""
    hasty, patient, made = Signals(), Signals(), trainer(recipe)
    patient.on_start(made)
    try:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    except KeyboardInterrupt:
        pytest.fail("the second signal has ended the run at once")
    finally:
        patient.on_end(made)
    monkeypatch.setattr(signals, "PATIENCE_S", 0.0)
    hasty.on_start(made)
    try:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert hasty.stop and patient.stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        hasty.on_end(made)


def test_a_second_ctrl_c_without_a_launcher_is_a_line(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "fit", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main.main([recipe, f"out={tmp_path / 'run'}"])
    assert ended.value.code == 130
    assert capfd.readouterr().err == "Interrupted again: ended at once, without a checkpoint.\n"
