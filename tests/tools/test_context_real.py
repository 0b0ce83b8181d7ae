"""A real model is taken to twice its positions: launch/recipes/long.yaml, on sources of Python's standard library.

pip install gguf accelerate && python ../shared/real_model.py FOLDER       # SmolLM2-135M, of 8,192 positions
MEGACORE_REAL_MODEL=FOLDER python -m pytest tests/tools/test_context_real.py       # half an hour on a quiet core

Losses by position are those of transformers on a document that is held out, http/cookiejar.py. In nats a token of the
first 8,192, of these from 4,096 on, and of the second 8,192: the untouched model 2.068, 2.004, 4.047; after the two
steps below 2.080, 2.015, 1.564; with the rope of the recipe and no step 2.101 and 1.591 (halves, in bf16). Needles at
the end of 6k and of 12k tokens are found, those at the beginning are not.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.data.indexed import IndexedDataset, IndexedWriter
from megacore.data.samples import split_runs
from megacore.inference.model_loader import model_from
from megacore.models.decoder import Microbatch
from megacore.parallel.mesh import Mesh
from megacore.store.conversions.formats import open_folder
from megacore.tools import tokenize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHORT, LONG = 8192, 16384
FRACTION = 0.15
"""Of the documents that is held out."""
HELD = 2
"""Of the documents held out, http/cookiejar.py; those before it are tables of characters."""
TRAINED, STEPS = 12288, 2
"""Tokens of a sample, and the steps, of one each."""
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.fixture(scope="module")
def corpus(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with their tests, tokenized: some 150 documents are long enough."""
    made = tmp_path_factory.mktemp("data")
    options = ["--name", "stdlib", "--tokenizer", str(real), "--exclude", "site-packages", "--on-error", "skip"]
    assert tokenize.main([sysconfig.get_path("stdlib"), "--out", str(made), *options]) == 0
    return made / "stdlib"


def held_out(corpus: Path) -> torch.Tensor:
    """The first LONG + 1 tokens of the document HELD, which a run with seed 0 does not train on."""
    dataset = IndexedDataset(corpus)
    _, runs = split_runs(dataset.documents, FRACTION, 0)
    documents = runs.of_least(dataset, LONG + 1, "what is held out").bounds.tolist()
    chosen = [document for first, stop in documents for document in range(first, stop)][HELD]
    return torch.from_numpy(dataset.document(chosen)[: LONG + 1].astype(np.int64))


def stretched(real: Path, folder: Path) -> Path:
    """The model with the rope of the recipe in its config.json, written by hand."""
    shutil.copytree(real, folder)
    raw = json.loads((real / "config.json").read_text())
    rope = YARN | {"rope_theta": raw["rope_parameters"]["rope_theta"], "original_max_position_embeddings": SHORT}
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": LONG, "rope_parameters": rope}))
    return folder


@dataclass(frozen=True)
class Read:
    """What transformers makes of a document in fp32: [LONG] losses, and the logits of every 64th position."""

    losses: torch.Tensor
    logits: torch.Tensor

    def loss(self, first: int, stop: int) -> float:
        return float(self.losses[first:stop].mean())


def read(folder: Path, tokens: torch.Tensor) -> Read:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    with torch.no_grad():
        hidden = model.model(tokens[None, :-1], use_cache=False).last_hidden_state[0]
        for begin in range(0, LONG, 1024):  # all logits at once would be 3 GB
            labels = tokens[begin + 1 : begin + 1025]
            losses.append(
                torch.nn.functional.cross_entropy(model.lm_head(hidden[begin : begin + 1024]), labels, reduction="none")
            )
        return Read(torch.cat(losses), model.lm_head(hidden[63::64]))


def ours(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The same logits by the parallel model."""
    model = model_from(open_folder(folder), Mesh.single(), torch.float32)
    activation, wanted = (LONG, model.config.sizes["embed"]), torch.arange(63, LONG, 64)
    with torch.no_grad():
        logits = model.logits(Microbatch(tokens[:-1], tokens[1:], torch.arange(LONG), 1, activation, wanted=wanted))
    assert logits is not None
    return logits


def megacore(tool: str, *arguments: str) -> str:
    return python("megacore.tools.main", tool, *arguments)


def python(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"NPROC_PER_NODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_one_document_has_one_loss_over_cp_and_by_transformers(real: Path, corpus: Path, tmp_path: Path) -> None:
    folder, document = stretched(real, tmp_path / "stretched"), held_out(corpus)
    with IndexedWriter(tmp_path / "one", 49152) as writer:
        writer.write(document.numpy())
    want = read(folder, document).loss(0, LONG)
    sizes = ["--sequence-length", str(LONG), "--tokens", str(LONG), "--dtype", "float32", "--json"]
    for cp in (1, 2):
        given = ["evaluate", str(folder), "--data", str(tmp_path / "one"), *sizes, "--cp", str(cp)]
        measured = json.loads(megacore(*given))
        assert measured["tokens"] == LONG and measured["loss"] == pytest.approx(want, rel=1e-5), f"cp={cp}"


def test_the_second_half_is_read_as_the_first_one_is(real: Path, corpus: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    data = [f"data.train=[{{path: {corpus}, least: {LONG}}}]", f"data.validation_fraction={FRACTION}"]
    sizes = [f"data.sequence_length={TRAINED}", f"train.steps={STEPS}", "train.precision=fp32", "batch.global_size=1"]
    short = ["mesh.cp=1", "schedule.warmup_steps=1", "evaluate.every=0", "checkpoint.every=0"]
    ends = [f"checkpoint.init={real}", f"checkpoint.export={export}", f"out={tmp_path / 'run'}"]
    megacore("finetune", "launch/recipes/long.yaml", *data, *sizes, *short, *ends)

    document = held_out(corpus)
    before, after = read(real, document), read(export, document)
    assert after.loss(SHORT, LONG) < before.loss(SHORT, LONG), "the untouched model does not know these positions"
    assert after.loss(SHORT, LONG) <= after.loss(SHORT // 2, SHORT)
    assert after.loss(0, SHORT) <= before.loss(0, SHORT) + 0.02, "what it knew it knows"
    torch.testing.assert_close(ours(export, document), after.logits, rtol=1e-5, atol=1e-4)

    asked = ["--lengths", "6144,12288", "--depths", "2", "--needles", "1", "--dtype", "float32", "--json"]
    sources = [f"{sysconfig.get_path('stdlib')}/{name}" for name in ("zipfile.py", "http/cookiejar.py")]
    texts = [each for source in sources for each in ("--data", source)]
    found = json.loads(python("benchmarks.needles", str(export), *texts, *asked))["found"]
    assert sum(found[1]) >= sum(found[0]) > 0
