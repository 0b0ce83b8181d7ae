"""A pretraining run as users start it: it saves on its way, and another one goes on from there to the same losses."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.rows import Machine, Row, skipped
from megacore.planning.peak_memory import memory
from megacore.planning.step_time import estimate

LARGE: Mapping[str, Any] = {
    "model": {
        "family": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    },
    "data": {"sequence_length": 2048},
    "batch": {"global_size": 16, "micro_size": 4},
}
TINY: Mapping[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "data": {"sequence_length": 32},
    "batch": {"global_size": 16, "micro_size": 8},
    "optimizer": {"lr": 1e-2},
}


def pretraining(machine: Machine) -> Iterator[Row]:
    try:
        from megacore import checkpoints
        from megacore.data.indexed import IndexedWriter
        from megacore.planning.recipe_setting import setting_of
        from megacore.rank import RankPlace
        from megacore.training import main, metrics
        from megacore.training.check import check
    except ImportError as error:
        yield skipped("pretraining", error)
        return
    steps = 12 if machine.tiny else 40
    base = TINY if machine.tiny else LARGE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with IndexedWriter(folder / "corpus", 512) as writer:
            rng = np.random.default_rng(0)
            for _ in range(200 if machine.tiny else 4000):
                writer.write(np.cumsum(rng.integers(1, 4, 600)) % 512)
        recipe = folder / "recipe.yaml"
        recipe.write_text(
            json.dumps(  # which is YAML
                {
                    **base,
                    "data": base["data"] | {"train": str(folder / "corpus"), "validation_fraction": 0.0},
                    "checkpoint": {"every": steps // 2, "keep": None},
                    "train": {"steps": steps, "device": machine.device.type},
                    "log": {"peak_tflops": machine.cluster("bf16").tflops},
                }
            )
        )

        def run(out: str, *overrides: str) -> tuple[list[dict[str, float | None]], float]:
            setup = check(str(recipe), [f"out={folder / out}", *overrides], 1, 1)
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                main.fit(setup, machine.device, RankPlace.of_environment())
            return metrics.read(folder / out / metrics.METRICS), time.perf_counter() - start

        whole, seconds = run("whole")
        half = checkpoints.complete(checkpoints.folder_of(folder / "whole"))[steps // 2]
        resumed, _ = run("resumed", f"checkpoint.resume={half}")
        setup = check(str(recipe), [], 1, 1)
        setting = setting_of(setup.config, setup.model, 1, "cuda" if machine.gpu else "cpu")
        expected = estimate(setting, machine.cluster("bf16"))
        later = [record["tokens_per_second"] or 0.0 for record in whole[steps // 4 : steps // 2]]
        yield Row("pretraining", float(np.median(later)), expected.tokens_per_second, "tokens/s")
        gib = whole[steps // 2 - 1]["peak_memory_gib"]
        yield Row("pretraining", gib, memory(setting)[0].peak / 2**30, "GiB")
        paper = steps * expected.total
        yield Row("pretraining, all of it", seconds, paper, "s", note="with its start and 2 checkpoints")
        first, last = (record["loss"] or 0.0 for record in (whole[0], whole[-1]))
        yield Row(
            "pretraining, loss at the end", last, first, "nats", last < first, "expected: below that of the start"
        )
        losses = [dict(metrics.curve(records, "loss")) for records in (whole, resumed)]
        apart = max(abs(losses[0][step] / losses[1][step] - 1) for step in losses[1])
        good = apart <= (0.0 if not machine.gpu else 1e-2) and len(losses[1]) == steps - steps // 2
        yield Row("resumed at half of it: losses apart", apart, 0.0, "relative error", good)
