"""Pretrain what a recipe describes: ``python -m torch.distributed.run ... -m megacore.pretrain RECIPE [overrides]``.

Everything that can be wrong with a run is found before a process group starts, and said once, by rank 0. With
``--check PROCESSES PROCESSES_HERE`` before the recipe it is only looked for, without starting anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megacore import metrics
from megacore.config import Config, ConfigError, load
from megacore.data.batches import TokenError
from megacore.data.corpora import Corpora, facts, vocabulary_problems
from megacore.hardware import peak_tflops
from megacore.optimizer import Optimizer
from megacore.problems import problems, surroundings
from megacore.step import TrainStep
from megacore.trainer import NonFinite, Trainer
from models.assemble import Model, layout_of
from models.config import ModelConfig, ModelConfigError, flops_per_token
from models.decoder import Losses
from models.registry import configure
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.sync import Gradients

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def check(
    recipe: str, overrides: Sequence[str], world_size: int, local_ranks: int
) -> tuple[Config, ModelConfig, Corpora]:
    """Read and check a run.

    Raises:
        ConfigError: all that is wrong.
    """
    config = load(recipe, overrides)
    model, found = None, list[str]()
    try:
        model = configure(config.model)
    except ModelConfigError as error:
        found += [f"model: {problem}" for problem in error.problems]
    gpus = torch.cuda.device_count()
    found += [*problems(config, world_size, model, gpus=gpus, local_ranks=local_ranks), *surroundings(config)]
    if model is not None:
        found += vocabulary_problems(config, model.vocab_size)
    if found or model is None:
        raise ConfigError(found)
    try:
        return config, model, Corpora.open(config)
    except ValueError as error:
        raise ConfigError([f"data: {error}"]) from error


def trainer_of(
    config: Config, model_config: ModelConfig, corpora: Corpora, mesh: Mesh, log: metrics.Log | None
) -> Trainer:
    """The live parts of a run on this rank, its model initialised."""
    dtype = DTYPES[config.train.precision]
    layout = layout_of(model_config, mesh.shape, config.pipeline.chunks, config.pipeline.layers_per_stage)
    losses = Losses(config.loss.label_smoothing, config.loss.z_loss)
    model = Model.create(model_config, layout, mesh, dtype, losses)
    model.parameters.initialise(config.train.seed)
    if config.train.compile:
        model.compile()
    section = config.optimizer
    wide = section.master_weights and dtype.itemsize < 4
    gradients = Gradients(model.parameters, model.chunks, torch.float32 if wide else dtype)
    optimizer = Optimizer(
        gradients,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        clip=section.clip,
        master_weights=section.master_weights,
    )
    pipeline = Pipeline(mesh, model.chunks, dtype, config.pipeline.schedule)
    held_out, rank, ranks = corpora.validation, mesh.data_rank, mesh.shape.data
    vocabulary = model_config.vocab_size
    return Trainer(
        config,
        mesh,
        model,
        TrainStep(mesh, pipeline, gradients, optimizer),
        corpora.batches(corpora.train, config, rank, ranks, vocabulary),
        corpora.batches(held_out, config, rank, ranks, vocabulary) if held_out else None,
        config.log.peak_tflops or peak_tflops(mesh.device, dtype),
        _control(mesh),
        log,
    )


def run(config: Config, model: ModelConfig, corpora: Corpora, device: torch.device) -> None:
    """One run on the processes that there are."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.create(config.mesh.shape(world), device)
    if mesh.rank != 0:
        trainer_of(config, model, corpora, mesh, None).run()
        return
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(config.to_yaml(), "utf-8")
    print(_headline(config, model, mesh), flush=True)
    with metrics.Log(config) as log:
        last = trainer_of(config, model, corpora, mesh, log).run()
    print(_report(config, last))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    only_check = arguments[:1] == ["--check"] and len(arguments) > 3
    if not arguments or (arguments[0].startswith("-") and not only_check):
        usage = "megacore.pretrain [--check PROCESSES PROCESSES_HERE] RECIPE [section.key=value ...]"
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    # torchrun says in the environment who this process is: the one place where it is read.
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if only_check:
        world, local_ranks, arguments = int(arguments[1]), int(arguments[2]), arguments[3:]
    try:
        config, model, corpora = check(arguments[0], arguments[1:], world, local_ranks)
    except ConfigError as error:
        if local_rank == 0:  # of each node: a file may be missing on one
            print(error, file=sys.stderr)
        return 2
    if only_check:
        return 0
    kind = config.train.device_type(torch.cuda.device_count())
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        # Without device_id, so that a group's communicator is made by its members when they first use it, rather than
        # split off the world's by everyone.
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    status = 0
    status = 0
    try:
        run(config, model, corpora, device)
    except NonFinite as error:  # on every rank
        status = 1
        if rank == 0:
            print(error, file=sys.stderr)
    except TokenError as error:  # on this rank alone: the others wait for it, until torchrun ends them
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if world > 1:
        # A gloo process that leaves while others still talk to it may abort them.
        dist.barrier()
        dist.destroy_process_group()
    return status


def _control(mesh: Mesh) -> dist.ProcessGroup | None:
    """All ranks, for host tensors: asking each other something must not wait for a device."""
    if mesh.shape.world == 1:
        return None
    if mesh.device.type == "cpu":
        return mesh.world.process_group
    return dist.new_group(backend="gloo")


def _headline(config: Config, model: ModelConfig, mesh: Mesh) -> str:
    sizes = " x ".join(f"{dim}={mesh.shape[dim]}" for dim in ("pp", "dp", "ep", "cp", "tp"))
    flops = flops_per_token(model, config.data.sequence_length)
    return (
        f"{model.family} of {model.schema.parameters:,} parameters, {flops / 1e6:,.1f} MFLOP per token, "
        f"on {mesh.shape.world} x {mesh.device.type} as {sizes}, {config.train.precision}"
    )


def _report(config: Config, last: int) -> str:
    """The end of a run in a few lines; draws the picture."""
    out = Path(config.out)
    records = metrics.read(out / metrics.METRICS)
    known = facts(config.data.train[0]) if len(config.data.train) == 1 else None
    entropy = known.unigram_entropy if known else None
    metrics.draw(records, out / metrics.PICTURE, entropy)
    losses = [loss for _, loss in metrics.curve(records, "loss")]
    held_out = [loss for _, loss in metrics.curve(records, "validation_loss")]
    lines = ["", f"Done after step {last} of {config.train.steps}." if last < config.train.steps else "Done."]
    if losses:
        recent = losses[-10:]
        lines.append(
            f"  training loss    {sum(recent) / len(recent):.4f} nats per token (the last {len(recent)} records)"
        )
    if held_out:
        lines.append(f"  validation loss  {held_out[-1]:.4f}")
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    names = {"metrics": metrics.METRICS, "loss curve": metrics.PICTURE, "resolved config": "config.yaml"}
    lines += [f"  {what:<16} {out / name}" for what, name in names.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
