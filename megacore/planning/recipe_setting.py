"""The way from a recipe to a setting; recipes need packages that a bare image with a GPU has not."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megacore.config import Config, ContextConfig, SyncConfig, ZeroConfig
from megacore.data.batches import filled_up
from megacore.models.config import ModelConfig
from megacore.models.stages import layout_of
from megacore.planning.pipeline_order import order_of
from megacore.planning.setting import Setting, Widths


def setting_of(config: Config, model: ModelConfig, world: int, device: Literal["cpu", "cuda"]) -> Setting:
    """Return the setting of a recipe on so many ranks; `megacore.checks.rules` has made sure that it fits them. Raises
    ConfigError: the order of its pipeline does not."""
    mesh, tuning, micro = config.mesh.shape(world), config.tuning, config.batch.micro_size
    computed = filled_up(config.batch.global_size, micro, mesh.data)
    return Setting(
        model=model,
        layout=layout_of(
            model,
            mesh,
            config.pipeline.chunks,
            config.pipeline.layers_per_stage,
            tuning,
            config.mesh.split,
            config.pipeline.placement,
        ),
        widths=Widths.of(
            config.train.precision,
            config.optimizer.master_weights,
            config.optimizer.moments,
            config.ema.decay is not None,
            config.sync.every is not None,
        ),
        sequence_length=config.data.sequence_length,
        micro_size=micro,
        microbatches=computed // (micro * mesh.data),
        blank=computed - config.batch.global_size,
        schedule=config.pipeline.schedule,
        order=order_of(config, world),
        group=config.pipeline.group,
        shard=config.zero.shard,
        replicas=config.zero.replicas * config.sync.replicas_of(mesh.dp),
        compress=config.zero.compress,
        fp8=config.train.precision == "fp8",
        recompute=config.memory.recompute,
        loss_chunk=config.memory.loss_chunk,
        offload_optimizer=config.memory.offload_optimizer,
        offload_parameters=config.memory.offload_parameters,
        offload_buffer=config.memory.offload_buffer << 20,
        offload_activations=config.memory.offload_activations,
        compress_activations=config.memory.compress_activations,
        device=device,
        tuning=tuning,
        context=config.context.over(mesh.cp, model.drops_attention),
        mlp_chunk=config.memory.mlp_chunk,
        compiled=config.train.compile,
        alone=config.sync.replicas_of(mesh.dp),
        round_steps=config.sync.every or 0,
        muon_steps=config.muon.steps if config.optimizer.name == "muon" else 0,
    )


def alone(config: Config) -> Config:
    """Return the recipe on one rank, which has the whole global batch: the search lays it out anew."""
    offload = config.memory.offload_activations not in (False, (False,) * config.mesh.pp)
    return replace(
        config,
        zero=ZeroConfig(compress=config.zero.compress),
        sync=SyncConfig(),
        context=ContextConfig(),
        mesh=replace(config.mesh, pp=1, dp=1, cp=1, ep=1, tp=1, etp=1),
        pipeline=replace(config.pipeline, schedule="1f1b", chunks=1, group=None, order=None, layers_per_stage=None),
        batch=replace(config.batch, micro_size=1),
        memory=replace(config.memory, recompute="none", offload_activations=offload),
    )
