"""This project's training step on the work of the benchmarks: `python ours.py MODE`, under torchrun for two processes.

Parameters, gradients and AdamW's state are in the named dtype, as those of the peers; the trainer would keep fp32
masters and gradients under bf16 (`--masters`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks import steps
from benchmarks.workload import WORKLOADS, Workload
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.stages import layout_of
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.weights.layout import MeshShape
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep

SHARDS: dict[str, ZeroShard] = {"dp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
"""{mode: what data parallel ranks share out}, on as many ranks as there are."""
MODES = {"eager": {}, "compile": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}}
"""{mode: the layout} of the others."""


def microbatches(work: Workload, mesh: Mesh) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, on the tokens that the peers train on too."""
    positions = torch.arange(work.sequence).repeat(work.micro_batch)
    activation = len(positions) // mesh.shape.tp, work.config.boundary_width
    return [
        Microbatch(rows[:, :-1].flatten(), rows[:, 1:].flatten(), positions, work.micro_batch, activation)
        for rows in steps.tokens(work, mesh.data_rank, mesh.shape.data)
    ]


def train_step(work: Workload, mode: str, dtype: torch.dtype, masters: bool) -> TrainStep:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.create(MeshShape(**MODES.get(mode, {"dp": ranks})))
    model = Model.create(work.config, layout_of(work.config, mesh.shape), mesh, dtype)
    model.parameters.initialise(seed=0)
    if mode == "compile":
        model.compile()
    chunks = list(model.chunks)
    wide = torch.float32 if masters else dtype
    gradients = Gradients(model.parameters, chunks, wide, SHARDS.get(mode, "none"))
    optimizer = Optimizer(gradients, lr=steps.LR, master_weights=masters)
    return TrainStep(mesh, Pipeline(mesh, chunks, dtype), gradients, optimizer)


def main() -> None:
    parser = steps.parser(__doc__, (*MODES, *SHARDS))
    parser.add_argument("--masters", action="store_true", help="fp32 gradients and master weights under bf16")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = WORKLOADS[arguments.shape]
    with steps.process_group():
        step = train_step(work, arguments.mode, steps.DTYPES[arguments.dtype], arguments.masters)
        batch = microbatches(work, step.mesh)

        def take() -> float:
            return step(batch, steps.LR).loss.item()

        steps.count(take, arguments.warm_up, arguments.steps, steps.CLOCKS[arguments.clock])
        if arguments.profile:
            with torch.profiler.profile() as profile:
                take()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))


if __name__ == "__main__":
    main()
