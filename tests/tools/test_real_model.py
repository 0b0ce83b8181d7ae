"""A real, trained model through every command. It runs where MEGACORE_REAL_MODEL names a folder with one.

pip install gguf accelerate && python ../shared/real_model.py FOLDER       # SmolLM2-135M, 9 heads, 3 kv heads, tied
MEGACORE_REAL_MODEL=FOLDER python -m pytest tests/tools/test_real_model.py
"""

import filecmp
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pool import Pool

from megacore.control import Control
from megacore.data.batches import Batches
from megacore.parallel.mesh import Mesh
from megacore.store.tensor_files.tensors import TensorFile
from megacore.tools import convert, generate, tokenize, verify
from megacore.training import build, metrics
from megacore.training.check import check

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPT, ANSWER = "The capital of France is", " Paris"
LAYOUTS = {"tp3-pp2": (3, 2), "tp1-pp4": (1, 4), "tp9-pp1": (9, 1)}
LENGTH = 96


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request: pytest.FixtureRequest, real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tp, pp = LAYOUTS[request.param]
    made = tmp_path_factory.mktemp("checkpoint") / request.param
    assert convert.main([str(real), str(made), "--tp", str(tp), "--pp", str(pp)]) == 0
    return made


def export(checkpoint: Path, folder: Path, *arguments: str) -> Path:
    assert convert.main([str(checkpoint), str(folder), "--to", "hf", *arguments]) == 0
    return folder


def bits(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """{tensor: (dtype, bits)} of all files of a folder."""
    files = [TensorFile.open(path) for path in folder.glob("*.safetensors")]
    return {name: (file.entries[name].dtype, file.array(name)) for file in files for name in file.entries}


def assert_same_folder(source: Path, made: Path) -> None:
    from transformers import AutoConfig

    expected, found = bits(source), bits(made)
    assert found.keys() == expected.keys()
    for name, (dtype, array) in expected.items():
        assert found[name][0] == dtype, name
        np.testing.assert_array_equal(found[name][1], array, name)
    ours, theirs = (AutoConfig.from_pretrained(folder).to_diff_dict() for folder in (made, source))
    assert ours == theirs
    others = [path.name for path in source.iterdir() if path.suffix != ".safetensors" and path.name != "config.json"]
    assert others
    assert filecmp.cmpfiles(source, made, others, shallow=False)[0] == others


def test_there_and_back_it_is_the_same_bits(real: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert_same_folder(real, export(checkpoint, tmp_path / "hf"))


def test_generate_says_what_transformers_says(real: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(real)
    model: Any = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    given = ["--max-new-tokens", "24", "--dtype", "float32", "--json", "--prompt", PROMPT, "--prompt", "Water boils at"]
    for chat in ((), ("--chat", "--system", "Be brief.")):
        capsys.readouterr()
        assert generate.main([str(checkpoint), *given, *chat]) == 0
        for line in capsys.readouterr().out.splitlines():
            found = json.loads(line)
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": found["prompt"]}]
            kind = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            prompt = (
                words.apply_chat_template(messages, **kind) if chat else words(found["prompt"], return_tensors="pt")
            )
            made = model.generate(**prompt, max_new_tokens=24, do_sample=False)
            assert found["tokens"] == made[0, prompt["input_ids"].shape[1] :].tolist()
            assert chat or found["text"].startswith(ANSWER) or found["prompt"] != PROMPT


def test_evaluate_finds_the_loss_of_transformers(real: Path, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.md"
    text.write_text((ROOT / "README.md").read_text()[:1500])
    words: Any = AutoTokenizer.from_pretrained(real)
    model: Any = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    ids = words(text.read_text(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = float(model(ids, labels=ids).loss)
    launcher = [sys.executable, "-m", "megacore.tools.main", "evaluate", str(checkpoint), "--data", str(text), "--json"]
    for layout in ((), ("--tp", "3")):
        command = [*launcher, "--dtype", "float32", *layout]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["loss"] == pytest.approx(wanted, abs=5e-5)


def test_verify_finds_the_same_model(real: Path, checkpoint: Path) -> None:
    assert verify.main([str(checkpoint), str(real)]) == 0


@pytest.fixture(scope="module")
def recipe(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step on this project's own README."""
    folder = tmp_path_factory.mktemp("recipe")
    source = [str(ROOT / "README.md"), "--out", str(folder), "--name", "readme", "--tokenizer", str(real)]
    assert tokenize.main([*source, "--workers", "1"]) == 0
    settings = {
        "data": {"train": str(folder / "readme"), "sequence_length": LENGTH, "validation_fraction": 0.0},
        "batch": {"global_size": 4, "micro_size": 2},
        "optimizer": {"lr": 1e-9},
        "train": {"steps": 1, "precision": "fp32", "device": "cpu"},
        "checkpoint": {"init": str(real), "at_end": False, "every": 0},
        "log": {"peak_tflops": 1.0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(recipe: Path, overrides: list[str]) -> None:
    """A run on this rank."""
    world = torch.distributed.get_world_size()
    setup = check(str(recipe), overrides, world, world)
    torch.distributed.barrier()  # in a real run every rank checks before the process group starts
    mesh = Mesh.create(setup.config.mesh.shape(world))
    Path(setup.config.out).mkdir(parents=True, exist_ok=True)
    made = build.trainer_of(setup, mesh, Control.create(mesh))
    made.fit()


@pytest.fixture(scope="module")
def expected_loss(real: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the first global batch, by transformers in fp32."""
    from transformers import AutoModelForCausalLM

    setup = check(str(recipe), [f"out={tmp_path_factory.mktemp('check')}"], 1, 1)
    corpora, batch = setup.corpora, setup.config.batch
    batches = Batches(corpora.train, batch.global_size, batch.micro_size, 0, 1, corpora.separate).microbatches(0)
    tokens = torch.from_numpy(np.concatenate([batch.tokens for batch in batches]))
    labels = torch.from_numpy(np.concatenate([batch.labels for batch in batches]))
    model = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(1, [], id="one"),
        pytest.param(3, ["mesh.tp=3"], id="tp3"),
        pytest.param(2, ["mesh.pp=2", "batch.micro_size=1"], id="pp2"),
    ],
)
def test_training_goes_on_from_the_loss_that_transformers_computes(
    pool: Pool, recipe: Path, expected_loss: float, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    out = tmp_path / "run"
    pool.run(world, train, recipe, [f"out={out}", *overrides])
    ((_, loss),) = metrics.curve(metrics.read(out / metrics.METRICS), "loss")
    assert 1 < expected_loss < 6  # it has learned something
    assert loss == pytest.approx(expected_loss, abs=5e-5)
