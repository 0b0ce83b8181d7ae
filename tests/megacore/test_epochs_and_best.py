"""How long a run is, and which of its checkpoints stay: passes over the data, and the losses of its evaluations."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import engine
import pytest
from engine import LENGTH, write_corpus, write_recipe

import megacore
from megacore import checkpoints
from megacore.data.blend import Blend
from megacore.data.corpora import Corpora
from megacore.data.indexed import IndexedDataset
from megacore.data.samples import Samples, split_documents
from megacore.recipe import load
from megacore.store.io.errors import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools.status import RunState
from megacore.training import main
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.check import check
from megacore.training.save import SaveError

KEEP_BEST = (
    "train.steps=12",
    "checkpoint.best=true",
    "checkpoint.keep=1",
    "checkpoint.every=4",
    "checkpoint.at_end=true",
)


def losses(*values: float) -> AbstractContextManager[object]:
    """Evaluations after steps 2, 4, ... find these."""

    def found(self: Evaluation, run: engine.Trainer) -> list[float]:
        return [values[run.step // 2 - 1]]

    return mock.patch.object(Evaluation, "losses", found)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5])
def test_epochs_are_counted(tmp_path: Path, epochs: float) -> None:
    recipe = write_recipe(tmp_path)
    dataset = IndexedDataset(tmp_path / "corpus")
    kept, _ = split_documents(dataset.documents, 0.2, 0)
    tokens = 24 * len(kept)
    rows = (tokens - 1) // LENGTH
    for mesh, world in (("mesh.tp=1", 1), ("mesh.tp=2", 2), ("mesh.pp=2", 4)):
        setup = check(recipe, [f"train.epochs={epochs}", "schedule.warmup_steps=1", mesh], world, world)
        assert setup.config.train.steps == math.ceil(math.ceil(epochs * rows) / 8)


def test_epochs_of_a_blend_are_of_the_corpus_that_takes_longest(tmp_path: Path) -> None:
    sources = [Samples(IndexedDataset(Path(write_corpus(tmp_path / f"{n}", n))), LENGTH, 0) for n in (5, 30, 12)]
    blend = Blend(sources, [1.0, 0.2, 3.0])
    corpora = Corpora(blend, None, False, (), ())
    for epochs in (0.5, 1, 3):
        missing = [math.ceil(epochs * source.per_epoch) for source in sources]
        count = 0
        while any(each > 0 for each in missing):  # by hand
            missing[int(blend.locate(count)[0])] -= 1
            count += 1
        assert corpora.samples_of(epochs) == count


def test_steps_come_from_the_epochs_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    run = [f"out={tmp_path / 'run'}", "train.steps=1", "schedule.warmup_steps=1", "checkpoint.at_end=true"]
    done = megacore.train(recipe, [*run, "train.epochs=0.1"])
    assert f"train.epochs=0.1: {done.step} steps of 8 samples" in capsys.readouterr().out
    last = [each["loss"] for each in done.metrics if "loss" in each][-1]
    assert repr(done) == f"FinishedRun('{tmp_path / 'run'}', step {done.step} of {done.step}, loss {last:.4f})"
    assert load(tmp_path / "run/config.yaml").train.steps == done.step > 1
    steps = engine.train(recipe, [f"out={tmp_path / 'steps'}", "schedule.warmup_steps=1", f"train.steps={done.step}"])
    for key in ("lr", "loss", "validation_loss"):
        assert [each[key] for each in done.metrics if key in each] == steps.values(key)
    again = [recipe, *run, "train.epochs=0.01", "checkpoint.resume=auto"]
    assert main.main(again) == 2
    assert f"train.epochs (0.01, 1 steps) is below the {done.step} steps that are done" in capsys.readouterr().err
    (problem,) = engine.problems(recipe, "train.epochs=0.1", "schedule.warmup_steps=100")
    assert f"must be below train.steps ({done.step})" in problem


def test_tasks_without_evaluations_are_said(tmp_path: Path) -> None:
    found = engine.problems(write_recipe(tmp_path), "evaluate.tasks=[piqa]", "evaluate.every=0")
    assert any("evaluate.tasks are asked at evaluations" in each for each in found)


@pytest.mark.in_turn(2, 1)
def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    recipe, out, made = write_recipe(tmp_path), tmp_path / "run", tmp_path / "hf"
    with losses(5, 3, 4, math.nan, 4, 3):
        assert main.main([recipe, f"out={out}", f"checkpoint.export={made}", *KEEP_BEST]) == 0
    folder = checkpoints.folder_of(out)
    assert list(checkpoints.complete(folder)) == [4, 12]  # the first of two that are alike
    assert checkpoints.best(checkpoints.complete(folder)) == 4
    assert json.loads((engine.path_of(out, 12) / "trainer.json").read_text())["evaluations"] == [
        [4, 3], [6, 4], [8, None], [10, 4], [12, 3]
    ]  # fmt: skip
    exported = megacore.load_model(made)
    assert exported is not None
    best = Checkpoint.open(engine.path_of(out, 4))
    assert best.index.step == 4


@pytest.mark.in_turn(3, 0)
def test_an_evaluation_that_is_better_is_saved_at_once(tmp_path: Path) -> None:
    with losses(5, 4, 6, 3, 7, 8):
        engine.train(write_recipe(tmp_path), [f"out={tmp_path / 'run'}", *KEEP_BEST, "checkpoint.every=0"])
    assert list(checkpoints.complete(checkpoints.folder_of(tmp_path / "run"))) == [8, 12]


@pytest.mark.in_turn(4, 1)
def test_patience_ends_a_run_that_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out, made = write_recipe(tmp_path), tmp_path / "run", tmp_path / "hf"
    given = [recipe, f"out={out}", *KEEP_BEST, "evaluate.patience=2", f"checkpoint.export={made}"]
    with losses(5, 3, 4, 3.5, 1, 1):
        assert main.main(given) == 0
        assert (
            "No validation loss below 3.0000, of step 4, in 2 evaluations (evaluate.patience)"
            in capsys.readouterr().err
        )
        state = RunState.of(out)
        assert state.is_done and state.training is not None and state.training["step"] == 8
        assert list(checkpoints.complete(checkpoints.folder_of(out))) == [4, 8] and made.is_dir()
        # A scheduler that starts it again hears the same.
        assert main.main([*given, "checkpoint.resume=auto"]) == 0
        assert RunState.of(out).is_done and list(checkpoints.complete(checkpoints.folder_of(out))) == [4, 8]
        assert main.main([*given, "checkpoint.resume=auto", "evaluate.patience=3", "checkpoint.export=null"]) == 0
    assert list(checkpoints.complete(checkpoints.folder_of(out))) == [10, 12]


def _killed_before_its_save(recipe: str, given: Sequence[str], step: int) -> None:
    plain = Checkpoints._save

    def save(self: Checkpoints, run: engine.Trainer) -> None:
        if run.step == step:
            self._saver.finish()
            raise KeyboardInterrupt
        plain(self, run)

    with mock.patch.object(Checkpoints, "_save", save), pytest.raises(KeyboardInterrupt):
        engine.train(recipe, given)


@pytest.fixture
def evaluations() -> Iterator[None]:
    with losses(5, 4, 3, 6, 7, 8):
        yield


@pytest.mark.in_turn(4, 1)
@pytest.mark.usefixtures("evaluations")
def test_a_kill_between_an_evaluation_and_its_save_changes_nothing(tmp_path: Path) -> None:
    recipe, want, got = write_recipe(tmp_path), tmp_path / "want", tmp_path / "got"
    engine.train(recipe, [f"out={want}", *KEEP_BEST])
    given = [f"out={got}", *KEEP_BEST, "checkpoint.resume=auto"]
    for step in (6, 8, 12):
        _killed_before_its_save(recipe, given, step)
    engine.train(recipe, given)
    for step in (6, 12):
        engine.assert_same_files(engine.path_of(got, step), engine.path_of(want, step), 3)
        theirs, ours = (json.loads((engine.path_of(out, step) / "trainer.json").read_text()) for out in (want, got))
        assert ours["evaluations"] == theirs["evaluations"]
    assert list(checkpoints.complete(checkpoints.folder_of(got))) == [6, 12]


@pytest.mark.in_turn(3, 0)
def test_a_best_one_that_cannot_be_saved_leaves_the_one_before(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    made = engine.trainer(recipe, [f"out={out}", *KEEP_BEST], log=True)
    saver, plain = engine.of(made, Checkpoints)._saver, engine.of(made, Checkpoints)._saver.save

    def save(step: int, document: dict[str, object]) -> None:
        if step == 6:
            raise SaveError("the disk is full")
        plain(step, document)

    with losses(5, 4, 3, 6, 7, 8), mock.patch.object(saver, "save", save):
        made.fit()
    assert list(checkpoints.complete(checkpoints.folder_of(out))) == [4, 12]


def test_evaluations_that_are_none_are_said(tmp_path: Path) -> None:
    recipe, given = write_recipe(tmp_path), [f"out={tmp_path / 'run'}", "train.steps=3", "checkpoint.at_end=true"]
    engine.train(recipe, given)
    trainer = engine.path_of(tmp_path / "run", 3) / "trainer.json"
    trainer.write_text(json.dumps(json.loads(trainer.read_text()) | {"evaluations": [["a"]]}))
    with pytest.raises(StoreError, match="evaluations are no pairs of a step and a loss"):
        engine.train(recipe, [*given, "train.steps=4", "checkpoint.resume=auto"])
