"""Runs that balance experts: what their metrics say, and how their biases go on."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import LENGTH, LLAMA, RECIPE, Result, path_of, trainer, whole, write_recipe
from extended_family import extended
from pool import Pool

from megacore.data.batches import Batch
from megacore.inference.model_loader import model_from
from megacore.parallel.mesh import Mesh
from megacore.store.conversions.conversion import to_hugging_face
from megacore.store.conversions.formats import open_model
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training import metrics

EXPERTS, TOP_K, SEQUENCES = 8, 2, 8
MODEL = LLAMA | {
    "family": "extended",
    "num_hidden_layers": 3,
    "num_experts": EXPERTS,
    "routing": {"top_k": TOP_K, "score": "sigmoid", "normalised": True},
    "experts": [0, 1, 1],
    "correction": True,
}
RECIPE_CHANGES = {"model": MODEL}
BALANCED = ["experts.sequence_balance=0.1", "experts.z_loss=0.001", "experts.bias_rate=0.01"]
CORRECTIONS = [f"layers.{layer}.mlp.router.correction" for layer in (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    with extended():
        yield


def train(recipe: str, overrides: Sequence[str]) -> Result:
    with extended():
        return engine.train(recipe, [*overrides, "evaluate.every=2"])


def read_loads(out: Path) -> list[dict[str, Any]]:
    return metrics.read(out / metrics.EXPERTS)


def test_metrics_are_those_of_the_counts_of_each_layer(recipe: str, tmp_path: Path) -> None:
    found = train(recipe, [f"out={tmp_path}", "train.steps=3", *BALANCED]).records
    lines = read_loads(tmp_path)
    records = [record for record in found if "loss" in record]
    assert [line["step"] for line in lines] == [record["step"] for record in records] == [1, 2, 3]
    for line, record in zip(lines, records, strict=True):
        counts = np.array(line["counts"])
        assert line["layers"] == [1, 2] and (counts.sum(1) == SEQUENCES * LENGTH * TOP_K).all()
        shares = counts / counts.sum(1, keepdims=True)
        entropy = -(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))).sum(1) / np.log(EXPERTS)
        loads = {"load_max": shares.max(1) * EXPERTS, "load_idle": (counts == 0).mean(1), "load_entropy": entropy}
        for name, values in loads.items():
            assert record[name] == pytest.approx(values.mean(), rel=1e-12), name
            worst = values.min() if name == "load_entropy" else values.max()
            assert record[f"{name}_worst"] == pytest.approx(worst, rel=1e-12), name
        assert 0.9 < (record["balance"] or 0) < 4 and (record["router_z_loss"] or 0) > 0
        assert -0.03 - 1e-6 <= (record["bias_min"] or 0) < 0 < (record["bias_max"] or 0) <= 0.03 + 1e-6


def test_what_has_no_coefficient_is_no_metric(recipe: str, tmp_path: Path) -> None:
    (record,) = train(recipe, [f"out={tmp_path / 'off'}", "train.steps=1", "schedule.warmup_steps=0"]).records[:1]
    assert "load_max" in record and not {"balance", "router_z_loss"} & record.keys()
    dense = write_recipe(tmp_path)
    (record,) = train(dense, [f"out={tmp_path / 'dense'}", "train.steps=1", "schedule.warmup_steps=0"]).records[:1]
    assert not [name for name in record if name.startswith(("load_", "bias"))]
    assert not (tmp_path / "dense" / metrics.EXPERTS).exists()


@pytest.mark.in_turn(3)
def test_indexers_come_nearer_to_their_attention(tmp_path: Path) -> None:
    """Trained alone, of a model that looks more at some tokens than at others; frozen, nothing is told of them."""
    sizes = {"vocab_size": engine.VOCAB, "num_hidden_layers": 2, "index_topk": 4, "initializer_range": 0.2}
    recipe = write_recipe(tmp_path, RECIPE | {"model": {"preset": "deepseek_v32-tiny", **sizes}})
    given = ["schedule.warmup_steps=0", "optimizer.lr=1e-2", "train.steps=6"]
    alone = train(recipe, [f"out={tmp_path / 'alone'}", *given, "train.only=[attn.index]"])
    found = alone.values("index_divergence")
    assert len(found) == 6 and 0 < found[-1] < 0.9 * found[0]
    assert {*alone.values("grad_norm")} != {0.0}
    still = ["loss.indexer=0", "train.freeze=[attn.index]", "train.steps=1"]
    records = train(recipe, [f"out={tmp_path / 'still'}", *given, *still]).records
    assert not [record for record in records if "index_divergence" in record]


def test_blank_rows_are_no_sequences_of_a_balance(recipe: str, tmp_path: Path) -> None:
    found = {}
    for micro in (8, 5):  # and two rows that are blank
        given = [f"out={tmp_path / str(micro)}", "train.steps=2", "schedule.warmup_steps=0", *BALANCED]
        found[micro] = train(recipe, [*given, f"batch.micro_size={micro}"])
    for key in ("loss", "grad_norm", "balance", "router_z_loss", "validation_loss"):
        assert found[8].values(key)
        np.testing.assert_allclose(found[5].values(key), found[8].values(key), rtol=1e-9, err_msg=key)
    assert read_loads(tmp_path / "5") == read_loads(tmp_path / "8")


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_biases_go_on_with_the_run_in_fp32(pool: Pool, recipe: str, tmp_path: Path, precision: str) -> None:
    """Bit for bit on the same layout, and where rounding chooses no other expert, on another one."""
    one = [*BALANCED, f"train.precision={precision}", "train.steps=4", "checkpoint.every=2", "checkpoint.at_end=true"]
    there = ["mesh.ep=2", "mesh.tp=2", "zero.shard=parameters"]
    straight = pool.run(4, train, recipe, [f"out={tmp_path / 'straight'}", *one, *there])
    half = path_of(tmp_path / "straight", 2)
    saved = Checkpoint.open(half)
    dtypes = {stored.name: saved.dtype("weights", stored) for stored in saved.stored()}
    assert all((dtypes[name] == "F32") == (name in CORRECTIONS) for name in dtypes)
    assert not saved.index.frozen
    resumed = pool.run(4, train, recipe, [f"out={tmp_path / 'same'}", f"checkpoint.resume={half}", *one, *there])
    for name in CORRECTIONS:
        values = straight[0].weights[name]
        assert values.any() and all(np.array_equal(each.weights[name], values) for each in (*straight, *resumed))
    assert read_loads(tmp_path / "same") == read_loads(tmp_path / "straight")[2:]
    if precision == "fp64":
        more = [
            f"out={tmp_path / 'other'}",
            f"checkpoint.resume={half}",
            *one,
            "mesh.pp=2",
            "mesh.cp=2",
            "batch.micro_size=1",
        ]
        other = pool.run(4, train, recipe, more)
        np.testing.assert_allclose(other[0].values("loss"), straight[0].values("loss")[2:], rtol=1e-9)
        assert read_loads(tmp_path / "other") == read_loads(tmp_path / "same")
        weights = whole(path_of(tmp_path / "other", 4), "weights")
        assert all(np.array_equal(weights[name], straight[0].weights[name]) for name in CORRECTIONS)


@pytest.mark.in_turn(4, 2)
def test_biases_are_those_of_the_model_that_a_run_starts_from(recipe: str, tmp_path: Path, not_durable: None) -> None:
    """Whether all of it is trained or adapters are; and they stay where no rate moves them."""
    few = ["train.steps=2", "schedule.warmup_steps=0", "checkpoint.at_end=true"]
    base = train(recipe, [f"out={tmp_path / 'base'}", *few, *BALANCED])
    saved = path_of(tmp_path / "base", 2)
    to_hugging_face(Checkpoint.open(saved), 10**9, "BF16").write(tmp_path / "hf", 1)
    lora = ["lora.rank=2", "lora.targets=[q_proj]"]
    for number, (init, more) in enumerate(((saved, lora), (tmp_path / "hf", lora), (saved, []), (tmp_path / "hf", []))):
        found = train(recipe, [f"out={tmp_path / str(number)}", f"checkpoint.init={init}", *few, *more])
        for name in CORRECTIONS:
            assert np.array_equal(found.weights[name], base.weights[name]) and base.weights[name].any(), (init, more)
        holds = {stored.name for stored in Checkpoint.open(path_of(tmp_path / str(number), 2)).stored()}
        assert holds.isdisjoint(CORRECTIONS) == bool(more)
    model = model_from(open_model(path_of(tmp_path / "0", 2)), Mesh.single())
    assert all(np.array_equal(model.parameters[name].detach().numpy(), base.weights[name]) for name in CORRECTIONS)


@pytest.mark.in_turn(2, 0)
def test_of_steps_that_are_done_again_the_last_counts_stand(recipe: str, tmp_path: Path) -> None:
    one = [f"out={tmp_path}", "checkpoint.every=2", "train.steps=4"]
    train(recipe, one)
    path = tmp_path / metrics.EXPERTS
    whole = path.read_text()
    path.write_text(whole + '{"step": 9')
    shutil.rmtree(path_of(tmp_path, 4))
    train(recipe, [*one, "checkpoint.resume=auto"])
    assert path.read_text().startswith(whole) and len(path.read_text().splitlines()) == 7
    assert [line["step"] for line in metrics.read(path)] == [1, 2, 3, 4]


def test_padding_goes_with_the_microbatches_of_models_with_experts_alone(recipe: str, tmp_path: Path) -> None:
    tokens = np.zeros((1, LENGTH), np.int64)
    padding = np.arange(LENGTH)[None] >= 5
    batch = Batch(tokens, tokens, np.arange(LENGTH)[None], None, padding)
    (found,) = trainer(recipe, [f"out={tmp_path / 'a'}"]).upload([batch], 1)
    assert found.padding is not None and found.padding.tolist() == padding[0].tolist()
    (dense,) = trainer(write_recipe(tmp_path), [f"out={tmp_path / 'b'}"]).upload([batch], 1)
    assert dense.padding is None
