"""What the plan says of a context that is split over cp: scores, keys that travel, and what hides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.checks.rules import problems
from megacore.data.indexed import IndexedWriter
from megacore.devices import DEVICES
from megacore.models.config import looks
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.costs import KeyExchange
from megacore.planning.efficiency import LINKS, ring_s
from megacore.planning.fit import CHUNK, fit
from megacore.planning.packed_documents import drawn
from megacore.planning.peak_memory import memory
from megacore.planning.recipe_setting import setting_of
from megacore.planning.setting import WHOLE, Packing, Setting, Widths
from megacore.planning.step_time import MARGIN, Cluster, estimate
from megacore.recipe import load
from megacore.tools.main import main
from megacore.tools.plan import overrides

RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"
H100 = Cluster(DEVICES["h100-80"], 989.4)
KV_BYTES = 2 * 8 * 128 * 2
"""Keys and values of a token in a layer of the 8B, in bf16."""


def of_8b(mesh: MeshShape, context: ContextParallel, length: int, **others: Any) -> Setting:
    model = configure({"preset": "llama-3.1-8b", "max_position_embeddings": 1 << 23})
    return Setting(model, layout_of(model, mesh), Widths.of("bf16"), length, 1, 1, context=context, **others)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1000, None), (None, 1000)])
def test_parts_share_out_all_scores_and_take_what_others_give(
    exchange: Any, window: int | None, chunk: int | None
) -> None:
    documents = (5000, 96, 1, 3095)
    work = Packing(8192, 1, ContextParallel(8, exchange, "documents", 2), documents).exchange(window, chunk)
    assert work.pairs.sum() == sum(looks(length, window, chunk) for length in documents)
    assert work.taken.sum() == work.given.sum() > 0
    split = ContextParallel(8, exchange, "documents", 2).split(documents, 8192).in_chunks(chunk)
    for part in range(4):
        assert work.pairs[part].sum() == split.pairs(part, window)
        for distance in (1, 2, 3):
            assert work.given[part, distance - 1] == split.hop((part + distance) % 4, part, window).tokens


def test_a_document_that_is_one_row_gives_its_parts_equal_work() -> None:
    work = Packing(4096, 1, ContextParallel(4, "ring", "rows")).exchange(None)
    assert np.array_equal(work.pairs.sum(1), [looks(4096, None) // 4] * 4)
    # The first part has the last tokens too, and takes all; the last one gives all.
    assert work.taken.sum(1).max() == work.given.sum(1).max() == 3 * 1024
    assert (work.most, work.held, work.rectangle) == (1024, 2 * 1024, (512, 1024))
    assert Packing(4096, 1, ContextParallel(4, "gather", "rows")).exchange(None).held == 2 * 3 * 1024


def shown(setting: Setting) -> float:
    """The share of a step that the messages of cp show."""
    time = estimate(setting, H100)
    return time.context / time.total


def test_in_a_node_the_messages_of_a_long_context_hide() -> None:
    """An 8B at 128k tokens on cp=8."""
    contexts = ContextParallel(8), ContextParallel(8, "gather"), ContextParallel(8, "heads", "auto", 8)
    for context in contexts:
        setting = of_8b(MeshShape(cp=8), context, 131072, recompute="full", shard="optimizer")
        assert shown(setting) <= 0.03, context


@pytest.mark.in_turn(3, 1)
def test_between_nodes_those_of_a_short_one_do_not_and_another_mesh_is_faster() -> None:
    """The 8B at 32k on cp=32, of which heads within the nodes leave a twentieth to show."""
    alone = of_8b(MeshShape(cp=32), ContextParallel(32), 32768, shard="optimizer")
    inside = of_8b(MeshShape(cp=32), ContextParallel(32, heads=8), 32768, shard="optimizer")
    assert shown(alone) > 0.4 > 0.1 > shown(inside)
    best = fit(replace(of_8b(MeshShape(), WHOLE, 32768), microbatches=1), 32, H100)[0]
    assert 1 < best.setting.layout.mesh.cp < 32
    assert best.time.total < estimate(alone, H100).total / 2
    assert shown(best.setting) < 0.1


def test_what_goes_back_is_sent_beside_the_turn_behind() -> None:
    """As long as products hide what a hop brings, what shows is what never hides, and the last gradients."""
    setting = of_8b(MeshShape(cp=4), ContextParallel(4), 65536)
    work = setting.packing.exchange(None)
    there, back = (KeyExchange(None, KV_BYTES, size, 10**9) for size in (0, KV_BYTES))
    hop = 16384 * KV_BYTES / (450e9 * LINKS) + ring_s(1, 0)
    mesh = setting.layout.mesh
    assert H100.exposed(mesh, work, there) == pytest.approx(3 * 0.1 * hop)
    # The first part takes all of each, and gives them back: twice beside a turn, once behind the last one.
    assert H100.exposed(mesh, work, back) == pytest.approx(5 * 0.1 * hop + hop)
    # Where products hide nothing, all of it shows.
    slow = KeyExchange(None, KV_BYTES, KV_BYTES, 0)
    assert H100.exposed(mesh, work, slow) == pytest.approx(6 * hop)


@pytest.mark.in_turn(3, 1)
def test_the_search_takes_cp_where_a_sequence_is_too_long_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    best = fit(replace(of_8b(MeshShape(), WHOLE, 131072), microbatches=8), 8, H100)[0]
    overrides = best.overrides
    assert overrides["mesh.cp"] == 2 and overrides["context.exchange"] == "ring" and overrides["context.heads"] == 1
    config = load(RECIPES / "llama-3.1-8b.yaml", [
        "data.train=[corpus]", "data.sequence_length=131072", "batch.global_size=8",
        *(f"{key}={value}" for key, value in overrides.items()),
    ])  # fmt: skip
    assert problems(config, 8, configure(config.model), gpus=8, local_ranks=8) == []
    again = setting_of(config, configure(config.model), 8, "cuda")
    assert again.context == best.setting.context and again.layout.mesh == best.setting.layout.mesh


@pytest.mark.in_turn(3, 1)
def test_short_sequences_are_not_split() -> None:
    best = fit(replace(of_8b(MeshShape(), WHOLE, 8192), microbatches=128, compiled=True), 8, H100)[0]
    assert best.overrides["mesh.cp"] == 1
    assert not any(key.startswith("context") or key == "memory.mlp_chunk" for key in best.overrides)
    # Pasted behind a recipe that has cp, they leave nothing of its context.
    recipe, given = RECIPES / "llama-3.1-8b.yaml", ["data.train=[corpus]", "mesh.cp=2", "context.exchange=gather"]
    pasted = [f"{key}={value}" for key, value in overrides(best, load(recipe, given)).items()]
    config = load(recipe, [*given, "data.sequence_length=8192", "batch.global_size=128", *pasted])
    assert problems(config, 8, configure(config.model), gpus=8, local_ranks=8) == []


def test_the_feed_forward_goes_in_chunks_where_nothing_fits_otherwise() -> None:
    """A 1B at 256k tokens on one GPU; in fp8, where each chunk would have a scale of its own, nothing fits."""
    model = configure({"preset": "llama-3.2-1b"})
    base = Setting(model, layout_of(model, MeshShape()), Widths.of("bf16"), 1 << 18, 1, 1, loss_chunk=2048)
    (best,) = fit(base, 1, H100)
    assert best.overrides["memory.mlp_chunk"] == CHUNK and best.overrides["memory.recompute"] == "full"
    (without,) = memory(_whole := replace(best.setting, mlp_chunk=None))
    assert best.fullest.peak <= (1 - MARGIN) * H100.device.memory < without.peak
    assert fit(base, 1, replace(H100, tflops=H100.device.tflops("fp8"))) == ()


def test_the_documents_of_a_corpus_are_those_that_training_packs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 300).astype(int) + 1
    with IndexedWriter(tmp_path / "corpus", 61) as writer:
        for length in lengths:
            writer.write(np.zeros(length, np.uint16))
    recipe = [
        str(RECIPES / "quickstart.yaml"), "--gpu", "cpu", "--world", "4", "mesh.dp=null", "mesh.tp=1", "mesh.pp=1",
        "mesh.cp=4", "data.sequence_length=1024", "batch.micro_size=2", "model.max_position_embeddings=1024",
    ]  # fmt: skip
    assert main(["plan", *recipe, "--documents", str(tmp_path / "corpus"), "--json"]) == 0
    found = {each["which"]: each for each in json.loads(capsys.readouterr().out)["documents"]}
    seen = drawn(str(tmp_path / "corpus"), 1024, 2, 0)
    assert {*found} == {"median", "most scores", "most keys"}
    assert all(sum(documents) == 2048 for documents in seen)
    by_scores = sorted(Packing(1024, 2, ContextParallel(4), documents).exchange(None).busiest for documents in seen)
    assert found["most scores"]["scores"] == by_scores[-1] >= found["median"]["scores"] == by_scores[len(seen) // 2]
    assert main(["plan", *recipe, "--documents", str(tmp_path / "none")]) == 2
    assert f"--documents {tmp_path / 'none'}: " in capsys.readouterr().err


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("ranks", "tokens", "context"),
    [(8, 1 << 22, ContextParallel(8, "ring", "auto", 8)), (1, 500_000, WHOLE)],
    ids=["4M on eight", "500k on one"],
)
def test_an_8b_fits_long_contexts_on_few_gpus(ranks: int, tokens: int, context: ContextParallel) -> None:
    """With 2 TB of host memory a node; others have 3.7M on eight and 500k on one (arXiv 2506.13996)."""
    setting = of_8b(
        MeshShape(cp=ranks), context, tokens, recompute="full", mlp_chunk=4096, loss_chunk=4096, shard="parameters",
        offload_activations=True, offload_optimizer="host", offload_parameters=True,
    )  # fmt: skip
    (found,) = memory(setting)
    assert found.peak <= 0.9 * H100.device.memory
    assert ranks * found.host <= 2e12
    (without,) = memory(_whole := replace(setting, mlp_chunk=None))
    assert without.peak > H100.device.memory
