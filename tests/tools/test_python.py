"""The functions of `megacore` do what the commands do: the same tokens, bytes and numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engine import RECIPE, write_recipe
from families import loaded
from hub import adapted, converted, save
from pool import Pool

import megacore
from megacore import ConfigError, MeshShape, StoreError, convert, evaluate, finetune, generate, load_model, train
from megacore import recipe as recipe_reader
from megacore.data import tokenizer
from megacore.inference.answers import Decoding, Prompts
from megacore.models.lora import Lora
from megacore.parallel.mesh import Mesh
from megacore.tools import convert as convert_command
from megacore.tools import evaluate as evaluate_command
from megacore.tools import generate as generate_command
from megacore.training import main as rank_of_a_run

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
TEXTS = ["The sun rose over the quiet harbour.", "naïve façade, 5 € and £4.99; 日本語 🎉", "a b c d " * 7]
PROMPTS = ["The sun", "5 €", "a b c d e"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save("llama", tmp_path_factory.mktemp("llama") / "hf", vocab_size=290, max_position_embeddings=64)
    tokenizer.train(TEXTS, 290, made)
    (made / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


def lines(capsys: Capture, *arguments: object) -> list[dict[str, Any]]:
    """What `megacore generate --json` prints."""
    capsys.readouterr()
    assert generate_command.main([*map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# -- the names


@pytest.mark.quick
def test_no_module_takes_the_place_of_a_name() -> None:
    """An import of megacore.plan, were there such a module, would put it where the function is."""
    beside = {path.name.removesuffix(".py") for path in (ROOT / "megacore").iterdir()}
    assert not beside & set(megacore._PUBLIC)


@pytest.mark.quick
def test_importing_and_what_moves_bytes_needs_no_torch() -> None:
    names = sorted(name for name, module in megacore._PUBLIC.items() if "training" not in module)
    script = f"from megacore import {', '.join(names)}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


# -- generating


@pytest.mark.in_turn(3, 0)
def test_a_loaded_model_says_what_the_command_says(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    asked = [each for prompt in PROMPTS for each in ("--prompt", prompt)]
    ways: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["--temperature", "1.5", "--top-k", "200", "--top-p", "0.9", "--seed", "3"],
         {"temperature": 1.5, "top_k": 200, "top_p": 0.9, "seed": 3}),
        (["--chat", "--system", "b"], {"chat": True, "system": "b"}),
    ]  # fmt: skip
    made = set()
    for folder in (llama, converted(llama, tmp_path / "checkpoint", "--tp", "2", "--pp", "3")):
        model = load_model(folder, dtype="float64")
        for arguments, options in ways:
            said = lines(capsys, folder, *asked, "--dtype", "float64", "--max-new-tokens", "12", *arguments)
            texts = model.generate(PROMPTS, max_new_tokens=12, batch=2, **options)
            assert texts == [each["text"] for each in said]
            assert generate(folder, PROMPTS, max_new_tokens=12, dtype=torch.float64, **options) == texts
            made.add(tuple(texts))
    assert len(made) == len(ways)
    (answer,) = model.answers(Prompts.of(model.folder, ["The sun"]), Decoding(5))
    given = ["--prompt", "The sun", "--dtype", "float64", "--max-new-tokens", "5"]
    assert answer.data() == lines(capsys, llama, *given)[0]


def of_a_rank(folder: Path, shape: MeshShape, tokens: list[int]) -> tuple[list[str], list[list[float]]]:
    model = load_model(folder, dtype="float64", mesh=Mesh.create(shape))
    texts = model.generate(PROMPTS, max_new_tokens=9, temperature=1.5, seed=1)
    return texts, model.logits(tokens).tolist()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", [MeshShape(tp=2, pp=2), MeshShape(cp=2, tp=2), MeshShape(dp=2)], ids=str)
def test_every_rank_of_a_mesh_gets_the_texts_and_logits_of_one_process(
    shape: MeshShape, llama: Path, pool: Pool
) -> None:
    """Of five tokens too, which four ranks do not share out evenly."""
    tokens = [3, 1, 4, 1, 5]
    alone = load_model(llama, dtype="float64")
    wanted = alone.generate(PROMPTS, max_new_tokens=9, temperature=1.5, seed=1)
    with torch.no_grad():
        theirs = loaded(llama)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(alone.logits(tokens), theirs, rtol=1e-5, atol=1e-5)
    for texts, logits in pool.run(shape.world, of_a_rank, llama, shape, tokens):
        assert texts == wanted
        torch.testing.assert_close(torch.tensor(logits).double(), alone.logits(tokens), rtol=1e-6, atol=1e-6)


def under_torchrun(arguments: list[str]) -> str:
    """What two processes print."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


UNDER_TORCHRUN = """
import json, sys
from megacore import MeshShape, load_model
with load_model(sys.argv[1], dtype="float64", device="cpu", mesh=MeshShape(tp=2)) as model:
    texts = model.generate(json.loads(sys.argv[2]), max_new_tokens=8)
    with load_model(sys.argv[1], dtype="float64", device="cpu", mesh=MeshShape(pp=2)) as other:
        assert other.generate(json.loads(sys.argv[2]), max_new_tokens=8) == texts
print(json.dumps(texts) + "\\n", end="", flush=True)
"""


@pytest.mark.in_turn(12, 7)
@pytest.mark.slow
def test_under_torchrun_the_ranks_meet_and_leave_each_other(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(UNDER_TORCHRUN)
    said = under_torchrun([str(tmp_path / "own.py"), str(llama), json.dumps(PROMPTS)])
    wanted = generate(llama, PROMPTS, max_new_tokens=8, dtype="float64")
    assert [json.loads(line) for line in said.splitlines()] == [wanted] * 2


def test_what_is_wrong_is_said_before_the_weights_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(llama)
    monkeypatch.setattr("megacore.store.weight_folders.loader.Loader.tensors", None)
    loading: list[tuple[dict[str, Any], str]] = [
        ({"mesh": MeshShape(tp=2)}, r"alone, and pp=1 x dp=1 x ep=1 x cp=1 x tp=2 takes 2: start it by `torchrun --n"),
        ({"mesh": MeshShape(tp=3, pp=4)}, r"split heads \(4\) over tp=3(.|\n)*`pp=4` stages one of the 3 layers"),
        ({"dtype": "float8"}, "`dtype=float8`: choose from"),
        ({"dtype": torch.int64}, "`dtype=int64`: choose from"),
        ({"device": "tpu"}, "`device=tpu`: choose auto, cpu or cuda"),
        ({"exchange": "gather"}, "`exchange=gather`: `cp` is 1"),
    ]
    for options, says in loading:
        with pytest.raises(StoreError, match=says):
            load_model(llama, **options)
    asking: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "there is no prompt"),
        ("The sun", {}, "the prompts are 'The sun': give a list of texts, even of one"),
        ([5], {}, r"the prompts are \[5\]: give a list of texts, even of one"),
        (["a"], {"temperature": 0.0}, "`temperature=0.0`: choose one above 0"),
        (["a"], {"top_k": 3, "max_new_tokens": 0}, r"`max_new_tokens=0`(.|\n)*`top_k` is of sampling"),
        (["a"], {"temperature": 1.0, "top_p": 1.5}, "`top_p=1.5`: choose a number above 0 and up to 1"),
        (["a"], {"system": "b"}, "give `chat` too"),
        (["a b c d " * 90], {}, "64 positions: shorten it"),
    ]
    for prompts, options, says in asking:
        for ask in (model.generate, lambda prompts, **options: generate(llama, prompts, **options)):
            with pytest.raises(StoreError, match=says):
                ask(prompts, **options)
    for tokens, says in (([], "no tokens"), ([290], "from 290 to 290: .* from 0 to 289"), ([0] * 65, "64 positions")):
        with pytest.raises(StoreError, match=says):
            model.logits(tokens)
    with pytest.raises(StoreError, match="nowhere is not a folder"):
        load_model("nowhere")


# -- converting


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("not_durable")
def test_convert_writes_the_bytes_of_the_command(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    ours = converted(llama, tmp_path / "ours", "--tp", "2")
    lora = adapted(llama, tmp_path / "lora", Lora(2, 3.0, ("*",)))
    uneven = ["--tp", "2", "--pp", "2", "--layers-per-stage", "1,2"]
    cases: list[tuple[Path, list[str], dict[str, Any]]] = [
        (llama, uneven, {"tp": 2, "pp": 2, "layers_per_stage": (1, 2)}),
        (llama, ["--dtype", "bfloat16", "--chunks", "3"], {"dtype": "bfloat16", "chunks": 3}),
        (ours, ["--to", "hf", "--max-shard-size", "20kB"], {"to": "hf", "max_shard_size": "20kB"}),
        (lora, ["--to", "peft"], {"to": "peft"}),
        (lora, ["--to", "hf", "--base", str(llama)], {"to": "hf", "base": llama}),
    ]
    for number, (source, arguments, options) in enumerate(cases):
        theirs, own = tmp_path / f"command-{number}", tmp_path / f"function-{number}"
        capsys.readouterr()
        assert convert_command.main([str(source), str(theirs), *arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        planned = convert(source, own, **options, dry_run=True)
        assert not planned.written and not own.exists()
        made = convert(source, str(own), **options)
        assert contents(own) == contents(theirs)
        assert made.as_data() == told | {"target": str(own)} == planned.as_data() | {"written": True}
        assert (made.path, made.bytes) == (own, told["bytes"])
        assert made.tensors == sum(file["tensors"] for file in told["files"]) > 3
        assert {file.path: file.bytes for file in made.files}.items() <= {
            name: len(content) for name, content in contents(own).items()
        }.items()


# -- evaluating


def measured(capsys: Capture, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate_command.main([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def loss_of_a_rank(folder: Path, data: Path, shape: MeshShape) -> dict[str, Any]:
    return evaluate(folder, data, by_position=8, tokens=40, dtype="float64", mesh=Mesh.create(shape))


@pytest.mark.in_turn(2, 1)
def test_evaluate_returns_what_the_command_prints(llama: Path, tmp_path: Path, pool: Pool, capsys: Capture) -> None:
    texts, chats = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl"
    texts.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    (tmp_path / "plain.txt").write_text("The sun rose.")
    turns = [{"role": role, "content": "The sun"} for role in ("user", "assistant") * 2]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    cases: list[tuple[list[object], Any, dict[str, Any]]] = [
        (["--data", tmp_path / "plain.txt"], str(tmp_path / "plain.txt"), {}),
        (["--data", chats, "--count", "last"], chats, {"count": "last"}),
        (
            ["--data", texts, "--data", texts, "--text-key", "body", "--sequence-length", 12, "--stride", 5,
             "--tokens", 30, "--by-position", 8],
            [texts, texts],
            {"text_key": "body", "sequence_length": 12, "stride": 5, "tokens": 30, "by_position": 8},
        ),
    ]  # fmt: skip
    for arguments, data, options in cases:
        told = measured(capsys, llama, *arguments, "--dtype", "float64")
        assert evaluate(llama, data, dtype="float64", **options) == told
    wanted = measured(capsys, llama, "--data", tmp_path / "plain.txt", "--by-position", 8, "--dtype", "float64")
    for found in pool.run(2, loss_of_a_rank, llama, tmp_path / "plain.txt", MeshShape(tp=2)):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-9)
        assert [each["tokens"] for each in found["by_position"]] == [each["tokens"] for each in wanted["by_position"]]


# -- training


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what the clock says."""
    return [{key: value for key, value in each.items() if key in ("step", "loss", "validation_loss")} for each in found]


QUIET = {"checkpoint": {"every": 2, "at_end": True}, "train": RECIPE["train"] | {"steps": 3}}


@pytest.mark.in_turn(3, 2)
def test_train_returns_the_run_that_the_command_makes(tmp_path: Path) -> None:
    """Of a file, of the sections that stand in it, and of what was read of it; a stop and a resume are seen."""
    recipe, theirs = write_recipe(tmp_path, RECIPE | QUIET), tmp_path / "theirs"
    assert rank_of_a_run.main([recipe, f"out={theirs}"]) == 0
    sections = yaml.safe_load(Path(recipe).read_text())
    for number, given in enumerate((Path(recipe), sections, recipe_reader.load(recipe))):
        out = tmp_path / f"own-{number}"
        run = train(given, [f"out={out}"])
        assert (run.folder, run.step, run.config.train.steps) == (out, 3, 3)
        assert run.metrics == records(out) and timeless(run.metrics) == timeless(records(theirs))
        assert run.checkpoints == [out / "checkpoints" / f"step-0000000{step}" for step in (2, 3)]
        for path in run.checkpoints:
            assert contents(path / "weights") == contents(theirs / "checkpoints" / path.name / "weights")
    assert "out" not in sections
    more = train(run.config, ["train.steps=4", "checkpoint.resume=auto"])
    assert [each["step"] for each in more.metrics if "loss" in each] == [1, 2, 3, 4]
    tokens = [1, 2, 3]
    newest = load_model(more.folder).logits(tokens)
    assert torch.equal(newest, load_model(more.checkpoints[-1]).logits(tokens))
    assert not torch.equal(newest, load_model(more.checkpoints[0]).logits(tokens))


@pytest.mark.in_turn(3, 2)
def test_finetune_starts_from_a_model_and_exports(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE | QUIET)
    first = train(recipe, [f"out={tmp_path / 'first'}"])
    with pytest.raises(ConfigError, match="finetune starts from a model that there is"):
        finetune(recipe, [f"out={tmp_path / 'wrong'}"])
    # What else is wrong is said with it.
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*starts from a model that(.|\n)*data.train"):
        finetune(recipe, [f"out={tmp_path / 'wrong'}", "data.train=nowhere"])
    assert not (tmp_path / "wrong").exists()
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    run = finetune(recipe, [f"out={own}"], init=first.folder, export=own / "hf")
    assert rank_of_a_run.main(
        [recipe, f"out={theirs}", f"checkpoint.init={first.folder}", f"checkpoint.export={theirs / 'hf'}"]
    ) == 0  # fmt: skip
    assert timeless(run.metrics) == timeless(records(theirs)) != timeless(first.metrics)
    assert contents(own / "hf") == contents(theirs / "hf") and first.exported is None
    assert run.exported is not None and (run.exported.path, run.exported.written) == (own / "hf", True)
    assert finetune(recipe, [f"out={own}", "train.steps=4", "checkpoint.resume=auto"]).step == 4
