"""The benchmark of needles: what transformers finds most likely, and the same on every layout."""

from pathlib import Path

import pytest
import torch
from families import loaded, random_model, small
from pool import Pool

from benchmarks.needles import Needles, found
from megacore.data import tokenizer
from megacore.inference.evaluation_data import DocumentFiles, Excerpt
from megacore.inference.model_loader import model_from
from megacore.inference.texts import Texts
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import Objective
from megacore.parallel.layers.scores import most_likely
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions.formats import open_folder

NEEDLES = Needles((160, 201), 3, 4, seed=5)
SENTENCE = "The quiet harbour has a sun, the magic number of a city is 12. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    random_model(small("llama", vocab_size=290, max_position_embeddings=256), 0).save_pretrained(made)
    tokenizer.train([SENTENCE], 290, made)
    (tmp_path / "text.txt").write_text(SENTENCE * 40)
    return made


def prompts(folder: Path) -> list[Excerpt]:
    texts = Texts.of(open_folder(folder))
    return NEEDLES.windows(texts, DocumentFiles([folder.parent / "text.txt"], 290, texts, "text", "all").documents())


def easy(windows: list[Excerpt], likely: list[torch.Tensor]) -> list[Excerpt]:
    """Half of the answers become what the model finds most likely, for a model of random weights finds nothing."""
    for number, (window, best) in enumerate(zip(windows, likely, strict=True)):
        if number % 3:
            at = window.labels != IGNORE
            window.labels[at] = best.numpy()[at]
            if number % 3 == 2 and number % 2:  # all but one token
                window.labels[-1] = (window.labels[-1] + 1) % 290
    return windows


def table(folder: Path, shape: MeshShape | None, windows: list[Excerpt]) -> list[list[float]]:
    model = model_from(open_folder(folder), Mesh.create(shape) if shape else Mesh.single(), torch.float64)
    return found(model, NEEDLES, windows)


@pytest.mark.in_turn(3, 0)
def test_needles_are_found_where_transformers_finds_them(folder: Path, pool: Pool) -> None:
    model = loaded(folder)
    windows = prompts(folder)
    with torch.no_grad():
        likely = [model(torch.from_numpy(window.tokens)[None]).logits[0].argmax(-1) for window in windows]
    windows = easy(windows, likely)
    hits = [bool((best.numpy() == x.labels)[x.labels != IGNORE].all()) for x, best in zip(windows, likely, strict=True)]
    wanted = [[sum(hits[at : at + 4]) / 4 for at in range(start, start + 12, 4)] for start in (0, 12)]
    assert 0 < sum(hits) < len(hits)
    assert table(folder, None, windows) == wanted
    for shape in (MeshShape(tp=2, pp=2), MeshShape(cp=2, dp=2)):
        for seen in pool.run(4, table, folder, shape, windows):
            assert seen == wanted


def test_equals_go_to_the_lower_id() -> None:
    objective = Objective(Mesh.single().tp, 5)
    logits = torch.tensor([[1.0, 3, 3, 0, 2, 9], [4, 4, 4, 4, 4, 9]])
    for label, wanted in ((0, [0, 1]), (1, [1, 0]), (2, [0, 0]), (4, [0, 0])):
        assert most_likely(objective, logits, torch.full((2,), label)).tolist() == wanted
