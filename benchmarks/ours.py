"""This project's training step on the work of `train_step.py`: `python ours.py MODE`, under torchrun for two processes.

Prints one line, `RESULT {json}`, as the scripts of the peers do. Parameters, gradients and AdamW's state are in the
named dtype, as theirs; the trainer would keep fp32 masters and gradients under bf16 (`--masters`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks import workload
from megacore.optimizer import Optimizer
from megacore.step import TrainStep
from models.assemble import Model
from models.decoder import Microbatch
from models.stages import layout_of
from parallel.layout import MeshShape
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.zero import Shard, sharing

SHARDS: dict[str, Shard] = {"dp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
MODES = {"eager": {}, "compile": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, **{mode: {"dp": 2} for mode in SHARDS}}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def microbatches(mesh: Mesh) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, on the tokens that the peers train on too."""
    generator = torch.Generator().manual_seed(7)
    shape = workload.GLOBAL_BATCH, workload.SEQUENCE + 1
    tokens = torch.randint(workload.CONFIG.vocab_size, shape, generator=generator)
    own = tokens.chunk(mesh.shape.data)[mesh.data_rank]
    positions = torch.arange(workload.SEQUENCE).repeat(workload.MICRO_BATCH)
    return [
        Microbatch(
            rows[:, :-1].flatten(),
            rows[:, 1:].flatten(),
            positions,
            workload.MICRO_BATCH,
            (len(positions) // mesh.shape.tp, workload.CONFIG.sizes["embed"]),
        )
        for rows in own.split(workload.MICRO_BATCH)
    ]


def train_step(mode: str, dtype: torch.dtype, masters: bool) -> tuple[TrainStep, list[Microbatch]]:
    mesh = Mesh.create(MeshShape(**MODES[mode]))
    model = Model.create(workload.CONFIG, layout_of(workload.CONFIG, mesh.shape), mesh, dtype)
    model.parameters.initialise(seed=0)
    if mode == "compile":
        model.compile()
    chunks = list(model.chunks)
    wide = torch.float32 if masters else dtype
    gradients = sharing(model.parameters, chunks, wide, SHARDS.get(mode, "none"))
    optimizer = Optimizer(gradients, lr=3e-4, master_weights=masters)
    return TrainStep(mesh, Pipeline(mesh, chunks, dtype), gradients, optimizer), microbatches(mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--masters", action="store_true", help="fp32 gradients and master weights under bf16")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    step, batch = train_step(arguments.mode, DTYPES[arguments.dtype], arguments.masters)
    losses, seconds = [], []
    for _ in range(arguments.warm_up + arguments.steps):
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        losses.append(step(batch, 3e-4).loss.item())
        seconds.append(time.perf_counter() - start)
    if arguments.profile:
        with torch.profiler.profile() as profile:
            step(batch, 3e-4).loss.item()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))
    if step.mesh.rank == 0:
        result = {
            "steps": [round(s, 4) for s in seconds[arguments.warm_up :]],
            "warm": [round(s, 2) for s in seconds[: arguments.warm_up]],
            "loss0": round(losses[0], 4),
            "lossN": round(losses[-1], 4),
            "rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        }
        print("RESULT " + json.dumps(result), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
