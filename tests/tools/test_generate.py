"""`megacore generate`: token for token what transformers generates, on every layout, and text as it becomes certain."""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import loaded
from hub import converted, save
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from transformers import AutoTokenizer
from traps import set_traps

from megacore.data import tokenizer
from megacore.inference.generation import Ending, generate
from megacore.inference.model_loader import model_from
from megacore.inference.sampling import Choice, Greedy, Sampling
from megacore.inference.steps import prefill
from megacore.inference.texts import Stream, Texts
from megacore.models.registry import FAMILIES
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.tools import chat
from megacore.tools import generate as command

Capture = pytest.CaptureFixture[str]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [3, 8]]
NEW = 9


def theirs(folder: Path, prompt: list[int], stops: Sequence[int] = (), new: int = NEW) -> list[int]:
    """What transformers generates, without the prompt."""
    model = loaded(folder)
    eos = list(stops) or None
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=0, use_cache=True
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def ours(
    folder: Path,
    shape: MeshShape | None = None,
    choose: Choice = Greedy(),  # noqa: B008
    prompts: Sequence[list[int]] = PROMPTS,
    stops: Sequence[int] = (),
    together: int = 3,
    new: int = NEW,
    positions: int | None = 32,
) -> list[list[int]]:
    """What this rank learns of the new tokens of each prompt."""
    mesh = Mesh.create(shape) if shape else Mesh.single()
    model = model_from(open_folder(folder), mesh, torch.float64)
    found: list[list[int]] = [[] for _ in prompts]
    ended = set()
    for step in generate(model, prompts, choose, Ending(frozenset(stops), new, positions), together):
        for token in step:
            assert token.prompt not in ended
            found[token.prompt].append(token.token)
            ended |= {token.prompt} if token.last else set()
    assert ended == set(range(len(prompts)))
    return found


# Of five layers, the last two look at the keys of one before them, as gemma-4-e2b's.
SHARED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
}
KEYS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**SHARED, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.9, 0.0]},
    "gemma4_text": {**SHARED, "enable_moe_block": False, "use_double_wide_mlp": True},
}

# -- tokens


@pytest.mark.in_turn(40)
@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of different lengths together, some of which end earlier than others."""
    folder = save(family, tmp_path / "hf", **KEYS.get(family, {}))
    free = ours(folder)
    assert free == [theirs(folder, prompt) for prompt in PROMPTS]
    # One that is the first of all would end them alike.
    firsts = {tokens[0] for tokens in free}
    ends = {token: {[*each, token].index(token) for each in free} for tokens in (free[2], *free) for token in tokens}
    later = [token for token, lengths in ends.items() if token not in firsts and len(lengths) > 1]
    stops = [*dict.fromkeys([*later, free[2][1], free[2][5]])][:2]
    stopped = ours(folder, stops=stops)
    assert stopped == [theirs(folder, prompt, stops) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in stopped}) > 1
    assert stopped == [ours(folder, prompts=[prompt], stops=stops)[0] for prompt in PROMPTS]


def both_ways(folder: Path, shape: MeshShape | None, stops: Sequence[int]) -> list[list[list[int]]]:
    """Greedy and sampled, on this rank."""
    ways: list[Choice] = [Greedy(), Sampling(1.3, top_k=20, top_p=0.9, seed=11)]
    return [ours(folder, shape, choose, stops=stops) for choose in ways]


@pytest.mark.in_turn(13)
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", MeshShape(tp=2, pp=2)),
        ("gpt2", MeshShape(tp=2, pp=2)),
        ("llama", MeshShape(tp=4)),
        ("gpt2", MeshShape(pp=3)),
        ("mixtral", MeshShape(ep=2, tp=2)),
        ("mixtral", MeshShape(pp=2, ep=2)),
        ("gpt_oss", MeshShape(cp=2, tp=2)),
        ("gemma2", MeshShape(cp=4)),
        ("gemma3n_text", MeshShape(cp=2, tp=2)),
        ("gemma4_text", MeshShape(cp=2, tp=2)),
        ("qwen3_5_text", MeshShape(cp=2, tp=2)),
        ("lfm2", MeshShape(cp=4)),
        ("bamba", MeshShape(cp=2, tp=2)),
        ("kimi_linear", MeshShape(cp=2, tp=2)),
        ("falcon_mamba", MeshShape(tp=2, pp=2)),
        ("zamba2", MeshShape(tp=2, pp=2)),
        ("jamba", MeshShape(cp=2, tp=2)),
        ("minimax", MeshShape(cp=2, tp=2)),
        ("mimo_v2_flash", MeshShape(cp=2, tp=2)),
        ("recurrent_gemma", MeshShape(cp=2, tp=2)),
        ("deepseek_v2", MeshShape(cp=2, pp=2)),
        ("deepseek_v32", MeshShape(cp=2, tp=2)),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(f"{d}{case[d]}" for d in case.DIMS if case[d] > 1),
)
def test_every_layout_generates_the_same(family: str, shape: MeshShape, tmp_path: Path, pool: Pool) -> None:
    """Odd numbers of tokens too, which tp does not divide; with tp=4 two ranks share a kv head."""
    folder = save(family, tmp_path / "hf", **KEYS.get(family, {}))
    alone = ours(folder)
    stops = [alone[0][4], alone[2][1]]
    wanted = both_ways(folder, None, stops)
    results = pool.run(shape.world, both_ways, folder, shape, stops)
    assert all(result == wanted for result in results)


def beginnings(folder: Path, shape: MeshShape) -> tuple[list[list[float]], int]:
    """The logits of the last tokens of prompts, and the slots of the cache that they went into."""
    model = model_from(open_folder(folder), Mesh.create(shape), torch.float64)
    cache, logits = prefill(model, PROMPTS, [len(prompt) + NEW for prompt in PROMPTS])
    assert logits is not None
    return logits.tolist(), cache.positions.shape[1]


def test_ranks_of_cp_share_out_the_cache(tmp_path: Path, pool: Pool) -> None:
    folder = save("gemma2", tmp_path / "hf")
    ((wanted, slots),) = pool.run(1, beginnings, folder, MeshShape())
    assert slots == max(map(len, PROMPTS)) + NEW - 1 == 19
    for logits, own in pool.run(4, beginnings, folder, MeshShape(cp=4)):
        torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)
        assert own == 5


@pytest.mark.in_turn(2, 1)
def test_a_checkpoint_generates_on_any_layout(tmp_path: Path, pool: Pool) -> None:
    folder = save("llama", tmp_path / "hf", num_hidden_layers=4)
    checkpoint = converted(folder, tmp_path / "sharded", "--tp", "2", "--pp", "2", "--layers-per-stage", "3,1")
    wanted = ours(folder)
    assert ours(checkpoint) == wanted
    for shape in (MeshShape(tp=2, pp=2), MeshShape(pp=4)):
        assert all(result == wanted for result in pool.run(4, ours, checkpoint, shape))


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 9.0],
        "original_max_position_embeddings": 8,
        "factor": 2.0,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_go_by_the_length_of_each_sequence(rope: str, tmp_path: Path) -> None:
    """Prompts below and beyond the length at which they change, and some that pass it while they grow."""
    folder = save("llama", tmp_path / "hf", rope_parameters=ROPES[rope], max_position_embeddings=8)
    assert ours(folder, positions=None) == [theirs(folder, prompt) for prompt in PROMPTS]


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_is_the_first_without_a_position(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / "hf")
    prompts = [list(range(1, 31)), [5] * 32, [5] * 29]
    found = ours(folder, prompts=prompts, new=20)
    assert [len(tokens) for tokens in found] == [3, 1, 4]
    assert found == [theirs(folder, prompt, new=len(tokens)) for prompt, tokens in zip(prompts, found, strict=True)]


@pytest.mark.quick
def test_a_seed_gives_the_same_tokens_however_prompts_are_batched(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "hf")
    sampled = ours(folder, choose=Sampling(2.0, seed=3))
    assert sampled == ours(folder, choose=Sampling(2.0, seed=3), together=1)
    assert sampled != ours(folder, choose=Sampling(2.0, seed=4))
    assert sampled != ours(folder)
    same = ours(folder, choose=Sampling(2.0, seed=3), prompts=[PROMPTS[0]] * 2)
    assert same[0] == sampled[0] != same[1]


# -- text


TEXTS = ["The sun rose over the quiet harbour. ", "naïve façade, 5 € and £4.99; 日本語 🎉🎊 ", "a b c d e f g " * 9]


def with_text(folder: Path, template: str | None = None) -> Path:
    """With a byte-level tokenizer, whose tokens are often parts of characters."""
    tokenizer.train(TEXTS, 290, folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(with_text(tmp_path_factory.mktemp("words")))


@given(data=st.data())
def test_text_is_shown_as_it_becomes_certain(words: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 280), max_size=30)) + words(data.draw(st.text(max_size=10)))["input_ids"]
    before = words(data.draw(st.sampled_from(["", "x", "🎉"])))["input_ids"]

    def decode(tokens: Sequence[int]) -> str:
        return str(words.decode(list(tokens), skip_special_tokens=True))

    stream, shown = Stream(decode, before), ""
    for token in ids:
        shown += stream.add(token)
        assert decode([*before, *ids]).startswith(decode(before) + shown)
    assert decode(before) + shown + stream.end() == decode([*before, *ids])


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return with_text(save("llama", tmp_path / "hf", vocab_size=290, max_position_embeddings=64), TEMPLATE)


def text_of(folder: Path, ids: list[int], new: int) -> str:
    """The whole text that transformers generates."""
    words: Any = AutoTokenizer.from_pretrained(folder)
    return str(words.decode([*ids, *theirs(folder, ids, [words.eos_token_id], new)], skip_special_tokens=True))


def data(capsys: Capture, *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert command.main([*map(str, arguments), "--json", "--dtype", "float64"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_prints_what_transformers_says(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prompts").write_text("The sun rose\n\n5 € and\n")
    given = ["--prompts", tmp_path / "prompts", "--prompt", "a b c", "--max-new-tokens", 20]
    words: Any = AutoTokenizer.from_pretrained(llama)
    for folder in (llama, converted(llama, tmp_path / "checkpoint", "--tp", "2")):
        found = data(capsys, folder, *given)
        assert [each["prompt"] for each in found] == ["a b c", "The sun rose", "5 € and"]
        wanted = [text_of(llama, words(each["prompt"])["input_ids"], 20) for each in found]
        assert [each["prompt"] + each["text"] for each in found] == wanted
        assert command.main([str(folder), *map(str, given), "--dtype", "float64", "--batch", "2"]) == 0
        said = capsys.readouterr()
        assert said.out == "\n".join(f"{text}\n" for text in wanted) and "tokens in" in said.err


def test_a_stop_token_ends_the_answer_and_is_not_text(llama: Path, capsys: Capture) -> None:
    (free,) = data(capsys, llama, "--prompt", "a b", "--max-new-tokens", 8)
    assert free["ended"] == "length" and len(free["tokens"]) == 8
    stop = next(token for number, token in enumerate(free["tokens"]) if number and token != free["tokens"][0])
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop]}))
    (found,) = data(capsys, llama, "--prompt", "a b", "--max-new-tokens", 8)
    assert found["ended"] == "stop" and found["tokens"] == free["tokens"][: free["tokens"].index(stop) + 1]


@pytest.mark.in_turn(2, 1)
def test_chats_go_through_the_template_and_samples_repeat_by_their_seed(llama: Path, capsys: Capture) -> None:
    (found,) = data(capsys, llama, "--prompt", "a?", "--chat", "--system", "b", "--max-new-tokens", 6)
    words: Any = AutoTokenizer.from_pretrained(llama)
    prompt = "<system>b\n<user>a?\n<assistant>"
    assert prompt + found["text"] == text_of(llama, words(prompt)["input_ids"], 6)
    assert command.main([str(llama), "--prompt", "a?", "--chat", "--max-new-tokens", "1"]) == 0
    assert "a?" not in capsys.readouterr().out
    given = [llama, "--prompt", "a b c", "--temperature", 1.5, "--top-k", 200, "--top-p", 0.95, "--seed"]
    one, again, other = (data(capsys, *given, seed)[0]["text"] for seed in (1, 1, 2))
    assert one == again != other


def test_a_conversation_remembers_what_was_said(
    llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words: Any = AutoTokenizer.from_pretrained(llama)
    said = "<system>b\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("a?\n\n" + "d" * 99 + "\nb"))
    given = [str(llama), "--system", "b", "--max-new-tokens", "3", "--dtype", "float64"]
    assert chat.main(given) == 0
    found = capsys.readouterr()
    for question, answer in zip(("a?", "b"), found.out.removesuffix("\n").split("\n"), strict=True):
        said += f"<user>{question}\n<assistant>"
        assert said + answer == text_of(llama, words(said)["input_ids"], 3)
        said = f"{said}{answer}\n"
    assert "and the model 64 positions: shorten it" in found.err
    assert chat.main([str(with_text(save("gpt2", tmp_path / "small")))]) == 1
    assert "has no chat template" in capsys.readouterr().err


def test_what_is_wrong_is_said_before_the_weights_are_read(
    llama: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.store.weight_folders.loader.Loader.tensors", None)
    asked, small = ["--prompt", "The sun"], with_text(save("gpt2", tmp_path / "small"))
    cases: list[tuple[Path, list[str], str]] = [
        (llama, [], "there is no prompt"),
        (llama, [*asked, "--system", "b"], "--system is the first message of a chat: give --chat too"),
        (llama, [*asked, "--top-k", "3"], "--top-k is of sampling: give --temperature too"),
        (llama, ["--prompt", "a b c d e f g " * 40], "64 positions: shorten it"),
        (llama, ["--prompt", ""], "has no tokens"),
        (llama, [*asked, "--tp", "3"], "cannot split heads (4) over tp=3"),
        (llama, [*asked, "--pp", "4"], "one of the 3 layers"),
        (llama, ["--prompts", "nowhere"], "cannot read nowhere"),
        (save("gpt2", tmp_path / "gpt2"), asked, "has no tokenizer"),
        (small, asked, "another model's"),
        (tmp_path / "nowhere", asked, "is not a folder"),
        (small, [*asked, "--chat"], "has no chat template"),
    ]
    for folder, arguments, says in cases:
        assert command.main([str(folder), *arguments]) == 1, says
        assert says in capsys.readouterr().err
    # A tokenizer's config that says nonsense.
    config = json.loads((small / "tokenizer_config.json").read_text())
    for key, value in {"model_max_length": "\x1b[2J", "chat_template": 1}.items():
        (small / "tokenizer_config.json").write_text(json.dumps({**config, key: value}))
        assert command.main([str(small), *asked]) == 1
        shown = capsys.readouterr().err
        assert f"{key}=" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--temperature 0", "'0' is not a number above 0; leave it out for the most likely token"),
        ("--temperature hot", "'hot' is not a number above 0"),
        ("--top-p 1.5", "'1.5' is not a share"),
        ("--top-k 0", "'0' is not a whole number"),
    ],
)
def test_numbers_out_of_range(arguments: str, says: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        command.main(["folder", *arguments.split()])
    assert f"{arguments.partition(' ')[0]}: {says}" in capsys.readouterr().err


@pytest.mark.in_turn(12, 5)
@pytest.mark.slow
def test_the_command_starts_its_own_processes(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """And none of them imports from the folder that it is called in."""
    given = [str(llama), "--prompt", "The sun", "--prompt", "a", "--max-new-tokens", "6"]
    program = str(Path(sys.executable).parent / "megacore")
    launcher = [program, "generate", *given, "--dtype", "float64", "--json", "--tp", "2"]
    mark = set_traps(tmp_path)
    done = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not mark.exists(), mark.read_text()
    assert [json.loads(line) for line in done.stdout.splitlines()] == data(capsys, *given)


@pytest.mark.in_turn(8, 5)
def test_processes_of_torchrun_must_be_as_many_as_the_mesh_takes(
    llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process finds it, and the first one says it."""
    for name, value in {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    capsys.readouterr()
    for rank, says in (
        ("1", ""),
        ("0", "2 processes were started, and pp=1 x dp=1 x ep=1 x cp=1 x tp=4 takes 4: start 4\n"),
    ):
        monkeypatch.setenv("RANK", rank)
        assert command.main([str(llama), "--prompt", "a", "--tp", "4"]) == 1
        assert capsys.readouterr().err == says


def test_stops_are_the_generation_configs_then_the_models_then_the_tokenizers(llama: Path) -> None:
    def stops() -> frozenset[int]:
        return Texts.of(open_folder(llama)).stops()

    config = json.loads((llama / "config.json").read_text())
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stops() == {7}
    (llama / "generation_config.json").unlink()
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": [4, 5]}))
    assert stops() == {4, 5}
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert stops() == {0}
    (llama / "config.json").write_text(json.dumps(config))
    for wrong in (-1, 2**62, config["vocab_size"], True, "7", [7, [8]], {"7": 7}, 7.0):
        (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(StoreError, match=r"eos_token_id of generation_config\.json is .*, and must be a token id"):
            stops()
