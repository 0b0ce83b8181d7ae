"""Pretrain what a recipe describes: ``python -m megacore.run.train RECIPE [overrides]`` is one rank of the run.

launch/pretrain.sh starts them, and so may torchrun. Everything that can be wrong with a run is found before a process
group starts, and said once, by the first rank of each node.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megacore import checkpoints, open_files
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import TokenError
from megacore.data.corpora import facts
from megacore.hardware import claim
from megacore.launcher import gpus
from megacore.rank import Here, join, leave
from megacore.recipe import ConfigError
from megacore.recovery.policy import Incident
from megacore.run import metrics
from megacore.run.build import trainer_of
from megacore.run.check import Setup, check, files_of
from megacore.run.export import export
from megacore.run.lock import RunLock
from megacore.run.resume import Damaged, Start, find, remarks
from megacore.run.save import SaveError
from megacore.run.trainer import Trainer
from megacore.run.trouble import GoBack, NonFinite
from megacore.say import err, say
from megacore.store.audit import DamageError
from megacore.store.publish import replace_file
from megacore.store.strict_json import StoreError
from megacore.store.tensors import os_errors
from models.config import ModelConfig, flops_per_token, parameters_in_words
from parallel import kernels
from parallel.mesh import Mesh


def run(setup: Setup, device: torch.device, node: int = 8) -> int:
    """Train one run on the processes that there are -> the last step that was done.

    Args:
        setup: The run.
        device: The device of this process.
        node: The number of successive ranks that share a machine.

    Raises:
        ConfigError: the ranks have found different checkpoints to start from, or different kernels.
        StoreError: another run holds the folder, or what the run is to start from is damaged.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    timeout = timedelta(minutes=setup.config.train.timeout)
    mesh = Mesh.create(setup.config.mesh.shape(world), device, timeout)
    control, out = Control.create(mesh, node), Path(setup.config.out)
    setup = _led(setup, control)
    with ExitStack() as stack:
        control.attempt(lambda: stack.enter_context(RunLock.take(out)) if mesh.rank == 0 else None)
        if mesh.rank == 0:
            say(_headline(setup.config, setup.model, mesh))
        setup, last = _trained(setup, mesh, control)
    if mesh.rank == 0:
        say(_report(setup.config, last))
    return last


def _trained(setup: Setup, mesh: Mesh, control: Control) -> tuple[Setup, int]:
    """Train -> where the run really started, and the last step that was done; it may go back on its way."""
    history = list[Incident]()
    while True:
        setup, trainer = _built(setup, mesh, control)
        chosen = kernels.chosen(mesh.device, setup.config.train.compile)
        if chosen and mesh.rank == 0:
            say(chosen)
        with ExitStack() as stack:
            log = control.attempt(partial(_log, setup, mesh))
            if log is not None:
                stack.enter_context(log)
            try:
                return setup, trainer.logging(log, history).run()
            except GoBack as back:  # on every rank
                history, start = back.history, control.attempt(partial(_before, setup, back, control))
        del trainer
        gc.collect()
        setup = replace(setup, start=start)


def _log(setup: Setup, mesh: Mesh) -> metrics.Log | None:
    return metrics.Log(setup.config, setup.start.progress.step) if mesh.rank == 0 else None


def _before(setup: Setup, back: GoBack, control: Control) -> Start:
    """Return the newest checkpoint before a bad step, or where there is none what the run started from, without the
    samples from there to the end of the step."""
    config, start = setup.config, setup.start
    saved = checkpoints.complete(checkpoints.folder_of(config.out))
    newest = control.tell(max((step for step in saved if step < back.step), default=0))
    if newest > start.progress.step:
        resume = str(checkpoints.path_of(checkpoints.folder_of(config.out), newest))
        start = find(replace(config, checkpoint=replace(config.checkpoint, resume=resume)))
    first = back.skipped.sample(start.progress.samples)
    return replace(start, progress=start.progress.without([*back.skipped, (first, back.stop)]))


def _built(setup: Setup, mesh: Mesh, control: Control) -> tuple[Setup, Trainer]:
    """Return the trainer of a run, and where it really starts.

    With ``checkpoint.resume=auto``, a checkpoint that turns out to be damaged while it is loaded is set aside, and the
    one before it is taken.

    Raises:
        StoreError: what the run is to start from is damaged, and there is nothing else.
    """
    control.attempt(lambda: _prepare(setup, mesh) if mesh.rank == 0 else None)
    try:
        return setup, trainer_of(setup, mesh, control)
    except DamageError as error:
        start = setup.start.adapters or setup.start.source
        if setup.config.checkpoint.resume != AUTO or start is None or error.path != start.path:
            raise
        damaged = Damaged(error.path, str(error))
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    before = control.attempt(lambda: find(setup.config, (damaged,), checked=mesh.rank > 0))
    return _built(_led(replace(setup, start=before), control), mesh, control)


def _led(setup: Setup, control: Control) -> Setup:
    """Return a run that starts where rank 0 has found that it can: it alone has looked at all files of checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(Path(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return replace(setup, start=control.attempt(start))


def _prepare(setup: Setup, mesh: Mesh) -> None:
    """Put the run's folder in order, and say what the run starts from."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    for each in start.damaged:
        say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.path}: {each.reason}")
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out))
        replace_file(out / "config.yaml", config.to_yaml().encode())
    say("\n".join([*remarks(start, config, setup.model, mesh.shape), *setup.corpora.remarks]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        err("usage: megacore.run.train RECIPE [section.key=value ...]")
        return 2
    here = Here.now()
    try:
        # One rank of each node reads the indexes of the data for all, and one of them all the files of a checkpoint.
        setup = check(arguments[0], arguments[1:], here.world, here.local_world, here.local_rank > 0, here.rank > 0)
    except ConfigError as error:
        if here.local_rank == 0:  # of each node: a file may be missing on one
            err(error)
        return 2
    train = setup.config.train
    kind = train.device_type(gpus())
    device = claim(kind, here.local_rank)
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    said = open_files.allow(files_of(setup.config, here.world, here.local_world))
    if said is not None and here.local_rank == 0:
        say(said)
    join(here, kind, timedelta(minutes=train.timeout))
    status, last, damaged = 0, 0, None
    try:
        last = run(setup, device, here.local_world)
    except ConfigError as error:  # on every rank
        status = 2
        if here.rank == 0:
            err(error)
    except (NonFinite, SaveError, StoreError) as error:  # on every rank
        status = error.status if isinstance(error, NonFinite) else 1
        damaged = error.path if isinstance(error, DamageError) else None
        if here.rank == 0:
            err(error)
    except TokenError as error:  # on this rank alone: the others wait for it, until the launcher ends them
        err(f"rank {here.rank}: {error}")
        os._exit(1)
    except KeyboardInterrupt:  # the second one: under the launcher it ends all ranks itself
        err("Interrupted again: ended at once, without a checkpoint.")
        os._exit(128 + signal.SIGINT)
    if here.rank == 0 and damaged is not None:  # while the others wait, for the launcher ends one that is left over
        err(checkpoints.instead_of(damaged))
    leave(here)
    # After the group's end, so that no other rank waits for it: an export of many bytes may outlast their patience.
    if here.rank == 0 and status == 0 and setup.config.checkpoint.export is not None:
        try:
            say(export(setup.config, last))
        except StoreError as error:
            status = 1
            err(error)
    return status


def _headline(config: Config, model: ModelConfig, mesh: Mesh) -> str:
    sizes = " x ".join(f"{dim}={mesh.shape[dim]}" for dim in mesh.shape.DIMS)
    context = config.context.over(mesh.shape.cp, model.drops_attention)
    if context.size > 1:
        inner = f", heads over {context.heads}" if 1 < context.heads < context.size else ""
        sizes += f" (context by {context.exchange}{inner}, balance {context.balance})"
    flops = flops_per_token(model, config.data.sequence_length, config.tuning)
    return (
        f"{model.family} of {parameters_in_words(model, config.tuning)}, {flops / 1e6:,.1f} MFLOP per token, "
        f"on {mesh.shape.world} x {mesh.device.type} as {sizes}, {config.train.precision}"
    )


def _report(config: Config, last: int) -> str:
    """Return the end of a run in a few lines and draw the pictures."""
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
    if skipped := [count for _, count in metrics.curve(records, "skipped_steps")][-1:]:
        lines += [f"  skipped steps    {skipped[0]:,} of {last:,}, which changed nothing"] if skipped[0] else []
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    paths = {"metrics": out / metrics.METRICS, "loss curve": out / metrics.PICTURE}
    if (out / metrics.EXPERTS).exists() and (lines_of_experts := metrics.read(out / metrics.EXPERTS)):
        metrics.draw_loads(lines_of_experts, out / metrics.PICTURE_OF_EXPERTS)
        paths["load of experts"] = out / metrics.PICTURE_OF_EXPERTS
    paths["resolved config"] = out / "config.yaml"
    if found := checkpoints.complete(checkpoints.folder_of(out)):
        paths["checkpoint"] = found[max(found)]
    lines += [f"  {what:<16} {path}" for what, path in paths.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
