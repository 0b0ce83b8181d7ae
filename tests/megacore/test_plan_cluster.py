"""What the plan says of starting, saving, resuming and data, against what small runs do; and what it warns of."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from engine import RECIPE, counting_reads, of, trainer, write_recipe
from pool import Pool

from megacore import open_files
from megacore.control import Control
from megacore.data.batches import HELD, Batch, Batches, Prefetch
from megacore.data.corpora import Corpora
from megacore.data.indexed import IndexedWriter
from megacore.data.samples import BLOCKS
from megacore.devices import DEVICES
from megacore.models.registry import configure
from megacore.planning.overheads import Overheads, Storage
from megacore.planning.recipe_setting import setting_of
from megacore.planning.step_time import Cluster, estimate
from megacore.recipe import load
from megacore.store.tensor_files import shares
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools.main import main
from megacore.training.callbacks.checkpoints import Checkpoints

RECIPES = Path(__file__).parents[2] / "launch" / "recipes"
NODE = 2
STORAGE = Storage(1e9, 1e9)


def planned(recipe: str, overrides: list[str], world: int) -> Overheads:
    config = load(recipe, overrides)
    setting = setting_of(config, configure(config.model), world, "cpu")
    cluster = Cluster(replace(DEVICES["h100-80"], per_node=NODE), 1.0)
    return Overheads.of(config, setting, cluster, estimate(setting, cluster).total, STORAGE)


@dataclass(frozen=True)
class Seen:
    """What one rank of a run has done: groups that it made, files and bytes that it wrote, bytes that it read."""

    groups: list[int]
    files: int
    written: int
    read: int


def started_saved_and_resumed(recipe: str, overrides: list[str]) -> Seen:
    groups, new_group = [dist.get_world_size()], dist.new_group

    def counting_groups(ranks: list[int], **given: Any) -> Any:
        groups.append(len(ranks))
        return new_group(ranks, **given)

    with patch.object(shares, "SHARE_BYTES", 1), patch.object(shares, "SLICE", 100):
        trainer(recipe, [*overrides, "train.steps=3"], log=True).fit()
        with patch.object(dist, "new_group", counting_groups), counting_reads() as read:
            made = trainer(recipe, [*overrides, "train.steps=4", "checkpoint.resume=auto"])
            Control.create(made.mesh, NODE)
        written = of(made, Checkpoints)._saver.reserve().written
    sizes = [each.nbytes for file in written for each in file.host.values()]
    return Seen(groups, len(written), sum(sizes), sum(read))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.tp=2"],
        ["mesh.pp=2", "zero.shard=optimizer"],
        ["mesh.tp=2", "zero.compress=int8"],
        ["mesh.ep=2", "mesh.tp=2", "model.family=mixtral", "model.num_local_experts=4"],
    ],
    ids=" ".join,
)
def test_a_run_makes_writes_and_reads_what_the_plan_says(overrides: list[str], pool: Pool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE)
    overrides = [*overrides, "train.precision=bf16", "evaluate.every=0", "checkpoint.at_end=true"]
    seen = pool.run(4, started_saved_and_resumed, recipe, [*overrides, f"out={tmp_path / 'run'}"])
    with patch.object(shares, "SHARE_BYTES", 1), patch.object(shares, "SLICE", 100):
        plan = planned(recipe, overrides, 4)
    start, save, resume = plan.start, plan.save, plan.resume
    # The world has its group before any is made; a rank that is in none of several makes one of itself.
    assert {len(each.groups) - 1 for each in seen} == {start.calls}
    own = [[size for size in each.groups if size > 1] for each in seen]
    assert max(map(len, own)) == start.groups and max(map(max, own)) == start.largest
    assert max(sum(size - 1 for size in sizes) for sizes in own) == plan.connections.sockets
    assert (save.files, save.size) == (sum(each.files for each in seen), sum(each.written for each in seen))
    assert save.busiest == max(each.written for each in seen)
    assert save.writers == sum(each.files > 0 for each in seen) == 4
    assert save.busiest_node == max(seen[0].written + seen[1].written, seen[2].written + seen[3].written)
    assert plan.in_memory == 5 * save.busiest_node, "two of its own, two of its partner, and a copy"
    checkpoint = Checkpoint.open(tmp_path / "run/checkpoints/step-00000003")
    assert len(checkpoint.index.files) == save.files
    assert 0 <= sum(file.size for file in checkpoint.index.files.values()) - save.size < 4096 * save.files  # headers
    assert resume.read == resume.size == sum(each.read for each in seen)
    there = sum(file.size for name, file in checkpoint.index.files.items() if not name.startswith("weights/"))
    assert resume.read < there, "what ranks of ep or tp replicate is read once"
    assert resume.busiest == max(each.read for each in seen)
    assert save.seconds == max(save.size, save.busiest_node) / 1e9 and resume.seconds >= resume.read / 1e9


def test_no_residual_is_sent_at_a_resume(tmp_path: Path) -> None:
    """Each rank reads its own, in fp32 as the masters."""
    recipe, common = write_recipe(tmp_path), ["zero.shard=optimizer", "train.precision=bf16"]
    without, kept = (planned(recipe, [*common, f"zero.compress={how}"], 4).resume for how in ("none", "int8"))
    assert kept.received == without.received > 0
    assert kept.read - without.read == kept.size - without.size == 4 * without.size // 3
    assert kept.busiest - without.busiest == without.size // 3


def test_a_rank_holds_the_data_that_the_plan_says(tmp_path: Path) -> None:
    """More documents than are held apart one by one, so that more would take no more."""
    length = 256
    with IndexedWriter(tmp_path / "corpus", 61) as writer:
        for _ in range(2 * BLOCKS):
            writer.write(np.ones(length, np.uint16))
    recipe = write_recipe(tmp_path, RECIPE | {"data": {"validation_fraction": 0.3, "sequence_length": length}})
    overrides = ["batch.global_size=16", "batch.micro_size=2"]
    said, config = planned(recipe, overrides, 1).data, load(recipe, overrides)
    assert said is not None
    tracemalloc.start()
    corpora = Corpora.open(config, checked=True)
    batches, made = Batches(corpora.train, 16, 2, 0, 1), list[list[Batch]]()
    corpora.train.sample(0)
    order = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.8 * said.order < order < 1.2 * said.order
    enough = threading.Event()

    def counted() -> Iterator[list[Batch]]:
        for each in batches.steps():
            made.append(each)
            if len(made) == HELD:
                enough.set()
            yield each

    with Prefetch(counted()) as ahead:
        next(ahead)
        assert enough.wait(30)
        time.sleep(0.05)
        assert len(made) == HELD
    assert said.batches == sum(x.tokens.nbytes + x.labels.nbytes + x.positions.nbytes for step in made for x in step)


LARGE = [str(RECIPES / "llama-3.1-70b.yaml"), "model.preset=llama-3.1-405b", "pipeline.chunks=1"]
LARGE += ["pipeline.schedule=1f1b", "mesh.pp=16", "mesh.dp=128", "batch.global_size=2048", "memory.recompute=full"]


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *arguments, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


@pytest.mark.in_turn(4, 3)
def test_a_405b_on_16384_ranks_is_planned_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    assert main(["plan", *LARGE, "--json"]) == 0
    assert time.process_time() - begin < 10
    found = json.loads(capsys.readouterr().out)
    assert [each["ranks"] for each in found["memory"]] == [1024] * 16
    assert all(sum(each["terms"].values()) == each["peak"] for each in found["memory"])
    beside, total = found["beside"], 14 * found["parameters"]
    assert (beside["ranks"], beside["nodes"]) == (16384, 2048)
    assert total < beside["save"]["size"] < 1.01 * total and beside["save"]["files"] <= 4096
    assert beside["resume"]["read"] == beside["resume"]["size"]
    assert beside["start"]["calls"] <= 20 and beside["connections"]["sockets"] < 64
    assert beside["data"]["order"] < 20e6


@pytest.mark.in_turn(2, 1)
def test_what_a_cluster_would_suffer_from_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "llama-3.1-8b.yaml")
    text, found = plan_of(capsys, recipe, "--world", "8", "--gpu", "h200")
    assert found["warnings"] == [] and "Warning" not in text
    assert "Beside the steps, on 1 node, if" in text and "are read, 1.00 times what there is" in text
    text, found = plan_of(capsys, recipe, "checkpoint.every=1", "--storage", "1")
    assert len(found["warnings"]) == 1 and "Warning: a save takes 112 s, and the next is due after" in text
    _, found = plan_of(capsys, recipe, "--world", "8", "--gpu", "a100-40")
    assert found["warnings"][0].startswith("memory: ")
    larger = [str(RECIPES / "llama-3.1-70b.yaml"), "mesh.dp=32", "batch.global_size=2048"]
    with patch.object(shares, "SHARE_BYTES", 1 << 60), patch.object(open_files, "limits", lambda: (1024, 1500)):
        _, found = plan_of(capsys, *larger)
    few, files = found["warnings"]
    assert few.startswith("few write: 128 of 1,024 ranks, on 16 of 128 nodes; a save takes")
    assert files.startswith("a rank has up to 1,536 files open") and "allows 1,500" in files
