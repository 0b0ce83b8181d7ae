"""Drafts by layers that predict further tokens: texts are those without, and drafts those of the training's formula."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import drawn
from pool import Pool
from safetensors.torch import save_file
from test_generate import with_text

import megacore
from megacore.inference import sampling
from megacore.inference.drafts import Drafter
from megacore.inference.generation import Ending, generate
from megacore.inference.model_loader import logits_of, model_from
from megacore.inference.sampling import Choice, Greedy, Sampling, draft, keep
from megacore.inference.steps import Growing
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch, Prediction
from megacore.models.registry import configure
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.tools import chat
from megacore.tools import generate as command

PROMPTS = [[3, 1, 4, 1, 5], [0], [2, 6, 5, 3, 5, 6, 4, 2, 4, 3, 2], [3, 1]]
VOCAB = 7  # so few that random drafts are right now and then
CASES = [
    ("glm4_moe", 1),
    ("glm4_moe", 3),
    ("deepseek_v3", 2),
    ("qwen3_next", 1),
    ("qwen3_5_text", 1),
    ("mimo_v2_flash", 2),
    ("deepseek_v32", 1),
]


def saved(path: Path, name: str, depth: int, seed: int = 0, vocab: int = VOCAB) -> Path:
    """A random model with so many layers that predict further tokens."""
    section = drawn(name, seed, layers=4, vocab=vocab, positions=32, num_nextn_predict_layers=depth)
    config, generator = configure(section), torch.Generator().manual_seed(seed)
    tensors = {
        each.name: torch.randn(each.shape, generator=generator) / 2 + ("norm" in each.name)
        for each in hugging_face(config.schema)
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    return path


def loaded(folder: Path, shape: MeshShape | None = None) -> Model:
    return model_from(open_folder(folder), Mesh.create(shape) if shape else Mesh.single(), torch.float64)


def texts(
    model: Model,
    drafts: int,
    choose: Choice = Greedy(),  # noqa: B008
    together: int = 3,
    prompts: Sequence[list[int]] = PROMPTS,
    stops: Sequence[int] = (),
    new: int = 12,
) -> tuple[list[list[int]], int, int]:
    """What this rank learns: the new tokens of each prompt, the forwards of them all, and the drafts."""
    found: list[list[int]] = [[] for _ in prompts]
    forwards = made = 0
    for step in generate(model, prompts, choose, Ending(frozenset(stops), new, 32), together, drafts):
        for token in step:
            found[token.prompt].append(token.token)
            forwards, made = forwards + (token.drafts is not None), made + (token.drafts or 0)
    return found, forwards, made


@pytest.mark.in_turn(7)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("name", "depth"), CASES)
def test_greedy_texts_are_those_without_drafts(name: str, depth: int, seed: int, tmp_path: Path) -> None:
    """Prompts of different lengths together, the texts of which end at a token, or where the positions do."""
    model, most = loaded(saved(tmp_path / "hf", name, depth, seed)), 1 + seed % 4
    wanted, steps, none = texts(model, 0)
    assert none == 0 and steps == sum(map(len, wanted)) == 4 * 12
    found, forwards, made = texts(model, most)
    assert found == wanted and 0 <= steps - forwards <= made <= most * forwards
    stops = [wanted[0][4], wanted[2][1]]
    ends = [next((at for at, token in enumerate(text, 1) if token in stops), 12) for text in wanted]
    assert texts(model, most, stops=stops)[0] == [text[:end] for text, end in zip(wanted, ends, strict=True)]


def on_a_mesh(folder: Path, shape: MeshShape | None) -> list[Any]:
    model = loaded(folder, shape)
    return [texts(model, 3, choose) for choose in (Greedy(), Sampling(1.3, top_k=5, top_p=0.9, seed=11))]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("name", "depth", "shape"),
    [
        ("glm4_moe", 3, MeshShape(tp=2, pp=2)),
        ("qwen3_5_text", 1, MeshShape(tp=2, pp=2)),
        ("mimo_v2_flash", 2, MeshShape(pp=4)),
        ("deepseek_v32", 1, MeshShape(tp=2, pp=2)),
        ("glm4_moe", 1, MeshShape(ep=2, tp=2)),
    ],
)
def test_every_layout_makes_the_same_drafts(
    name: str, depth: int, shape: MeshShape, tmp_path: Path, pool: Pool
) -> None:
    folder = saved(tmp_path / "hf", name, depth)
    wanted = on_a_mesh(folder, None)
    assert wanted[0][0] == texts(loaded(folder), 0)[0]
    assert all(result == wanted for result in pool.run(shape.world, on_a_mesh, folder, shape))


def by_the_formula(model: Model, ids: list[int], most: int) -> list[int]:
    """The drafts behind some tokens, each layer over all positions at once, as they are trained."""
    chunk, layers = model.chunks[0], [each for each in model.head.predictions if isinstance(each, Prediction)]

    def microbatch(tokens: list[int]) -> Microbatch:
        t = len(tokens)
        made, shape = torch.tensor(tokens), (t, model.config.boundary_width)
        return Microbatch(made, made, torch.arange(t), 1, shape, (t,), lengths=(t,), wanted=torch.arange(t))

    known, hidden = list(ids), model.hidden(microbatch(ids[:-1]))
    assert hidden is not None
    given, x = hidden, hidden
    for step in range(most):
        depth = min(step, len(layers) - 1)
        given = x if step == depth else torch.cat([given, x[-1:]])
        batch = microbatch(known[depth + 1 : depth + 1 + len(given)])
        x = layers[depth](given, batch, chunk.context(batch), chunk.run)
        known.append(int(model.logits_of(x[-1:]).argmax()))
    return known[len(ids) :]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("name", "depth"), CASES)
@torch.no_grad()
def test_drafts_are_those_of_the_formula(
    name: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of the drafts before were kept."""
    model = loaded(saved(tmp_path / "hf", name, depth, 4))
    seen, real = list[tuple[list[int], list[int]]](), Drafter.draft

    def watched(self: Drafter, sequences: Sequence[Growing]) -> list[list[int]]:
        made = real(self, sequences)
        seen.extend((list(each.ids), ids) for each, ids in zip(sequences, made, strict=True))
        return made

    monkeypatch.setattr(Drafter, "draft", watched)
    texts(model, 4)
    assert len(seen) > 20 and any(ids for _, ids in seen)
    for ids, made in seen:
        assert made == by_the_formula(model, ids, len(made))


# -- sampled texts


def test_what_is_kept_has_just_the_probabilities_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts, by every combination of random numbers of a grid that the probabilities are multiples of."""
    p, q = [[1, 2, 1], [2, 0, 2]], [[2, 1, 1], [1, 2, 1], [0, 1, 3]]  # of the drafts and of the model, in fourths
    of_drafts, of_model = (torch.tensor(each).double().log() for each in (p, q))
    choose, found, grid = Sampling(), Counter[tuple[int, ...]](), [at / 4 + 1 / 8 for at in range(4)]
    for numbers in itertools.product(grid, repeat=4):
        drawn, kept = numbers[:2], numbers[2:]
        monkeypatch.setattr(sampling, "_number", lambda *words: drawn[words[2]])  # noqa: B023
        drafts, drawn_with = draft(choose, of_drafts, [(0, 0), (0, 1)])
        for last in grid:
            numbers_of = {"keep": kept}
            monkeypatch.setattr(
                sampling,
                "_number",
                lambda *words: numbers_of["keep"][words[2]] if words[-1] == "keep" else last,  # noqa: B023
            )
            found[tuple(keep(choose, of_model, drafts.tolist(), drawn_with, 0, 0))] += 1
    total, first, second = sum(found.values()), Counter[int](), Counter[tuple[int, int]]()
    for tokens, count in found.items():
        first[tokens[0]] += count
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += count
    assert [first[token] * 4 / total for token in range(3)] == q[0]
    for before in range(3):  # behind each first token that was kept
        of_it = [second[before, token] for token in range(3)]
        assert [count * 4 / sum(of_it) for count in of_it] == q[1]


def test_sampled_texts_have_the_probabilities_of_the_model(tmp_path: Path) -> None:
    """Those of all texts of three tokens, as often as they come of thousands."""
    model = loaded(saved(tmp_path / "hf", "glm4_moe", 1, 5, vocab=3))
    times, choose = 4000, Sampling(1.5, seed=1)
    found, forwards, made = texts(model, 2, choose, together=times, prompts=[[2, 0, 1]] * times, new=3)
    assert 0 < 3 * times - forwards < made
    seen = Counter(map(tuple, found))
    for text in itertools.product(range(3), repeat=3):
        rows = choose.distribution(logits_of(model, [2, 0, 1, *text]))[2:5]
        wanted = rows[range(3), list(text)].prod().item()
        assert abs(seen[text] / times - wanted) < 4 * (wanted * (1 - wanted) / times) ** 0.5


@pytest.mark.quick
def test_a_seed_gives_the_same_text_however_prompts_are_batched(tmp_path: Path) -> None:
    model, choose = loaded(saved(tmp_path / "hf", "glm4_moe", 1)), Sampling(2.0, seed=3)
    sampled = texts(model, 3, choose)
    assert sampled == texts(model, 3, choose, together=1)
    assert sampled[0] != texts(model, 3, Sampling(2.0, seed=4))[0]


# -- the commands


def test_the_command_says_what_drafts_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_text(saved(tmp_path / "hf", "glm4_moe", 1, vocab=290), "{{ messages[-1].content }}")
    given = [str(folder), "--prompt", "The sun", "--max-new-tokens", "9", "--dtype", "float64"]
    assert command.main(given) == 0
    plain = capsys.readouterr()
    assert command.main([*given, "--draft", "2"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out and "kept" not in plain.err
    assert "9 tokens in" in drafted.err and "a forward, " in drafted.err and " drafts kept (loaded in" in drafted.err
    said = megacore.generate(folder, ["The sun"], max_new_tokens=9, dtype="float64", draft=2)
    assert plain.out.startswith("The sun" + said[0])


@pytest.mark.parametrize(
    ("depth", "given", "said"),
    [
        (0, ["--draft", "2"], "--draft 2: {} has no layers that predict further tokens: leave it out"),
        (1, ["--draft", "2", "--cp", "2"], "--draft 2 with cp=2: drafts are made of whole sequences: choose cp=1"),
    ],
)
def test_refused(depth: int, given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_text(saved(tmp_path / "hf", "glm4_moe", depth, vocab=290))
    assert command.main([str(folder), "--prompt", "The sun", *given]) == 1
    assert said.format(folder) in capsys.readouterr().err
    if "--cp" not in given:
        assert chat.main([str(folder), *given]) == 1
        assert said.format(folder) in capsys.readouterr().err
    with pytest.raises(StoreError, match="draft=-1"):
        megacore.generate(folder, ["The sun"], draft=-1)
