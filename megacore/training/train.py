"""Pretrain what a recipe describes: ``python -m megacore.training.train RECIPE [overrides]`` is one rank of the run.

launch/pretrain.sh starts them, and so may torchrun. Everything that can be wrong with a run is found before a process
group starts, and said once, by the first rank of each node.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from megacore import checkpoints, exits, open_files
from megacore.config import Config
from megacore.data.batches import TokenError
from megacore.data.corpora import facts
from megacore.hardware import claim
from megacore.launcher import gpus
from megacore.rank import Here, die_with, join, leave, restarts
from megacore.recipe import ConfigError
from megacore.recovery import collectives, incidents
from megacore.recovery.channel import Agent, Dismissed, overrides_here
from megacore.recovery.phases import BEAT
from megacore.say import err, outlive, say
from megacore.store.audit import DamageError
from megacore.store.strict_json import StoreError
from megacore.training import metrics
from megacore.training.check import Setup, check, files_of
from megacore.training.copies import Copies
from megacore.training.export import export
from megacore.training.life import Life
from megacore.training.recover import Held
from megacore.training.resume import again
from megacore.training.save import SaveError
from megacore.training.trouble import NonFinite


def run(
    setup: Setup, device: torch.device, node: int = 8, agent: Agent | None = None, began: float | None = None
) -> int:
    """Train one run on the processes that there are -> the last step that was done.

    Args:
        setup: The run.
        device: The device of this process.
        node: The number of successive ranks that share a machine.
        agent: Replaces ranks that have died, so that this one goes on, in groups that it joins by itself; None where a
            fault ends the run, whose group is there.
        began: The time when the launch of the run began, in seconds since 1970; None for now.

    Raises:
        ConfigError: the ranks have found different checkpoints to start from, or different kernels.
        Dismissed: the run goes on without this process.
        StoreError: another run holds the folder, or what the run is to start from is damaged.
        StateLost: after a fault the ranks that are left do not have the whole state of the run.
    """
    with ExitStack() as stack:
        life = Life(setup, device, node, began, stack, Held(Copies(setup.config.recovery.overhead)))
        stack.enter_context(life.folder)
        while (last := life.outlived(agent)) is None:
            life.rejoin(agent)
        stack.close()
        if life.log is not None:
            try:
                say(_report(life.setup.config, last))
            except (OSError, StoreError, ValueError) as error:  # on a full disk, say; all steps are done
                err(f"Done after step {last}, and cannot report: {error}")
    return last


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        err("usage: megacore.training.train RECIPE [section.key=value ...]")
        return exits.MISUSED
    outlive()
    here, agent = Here.now(), Agent.here()
    if not here.launched and "ACCELERATE_USE_CPU" in os.environ:
        say(
            "accelerate launch starts one process on CPUs, whatever its --num_processes says: megacore train starts as "
            "many as the mesh needs, and so does accelerate launch --multi_gpu, which needs no GPU"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent, killed, would leave its ranks to train on
        die_with(os.getppid())
    try:
        overrides = again(arguments[0], arguments[1:]) if restarts() else arguments[1:]
        # One rank of each node reads the indexes of the data for all, and one of them all the files of a checkpoint.
        stands_by = agent is not None and agent.stands_by
        checked, led = stands_by or here.local_rank > 0, stands_by or here.rank > 0
        given = [*overrides, *overrides_here()]
        setup = check(arguments[0], given, here.world, here.local_world, checked, led, stands_by)
    except ConfigError as error:
        if here.local_rank == 0:  # of each node: a file may be missing on one
            err(error)
        return exits.MISUSED
    if agent is not None:
        if stands_by:
            importlib.import_module("torch._dynamo")  # in a second, as the first optimizer would
        try:
            agent.ready()
        except Dismissed:
            return exits.DONE
        here = Here.now()
    if BEAT in os.environ:
        collectives.answer(Path(os.environ[BEAT]))
    train = setup.config.train
    kind = train.device_type(gpus())
    device = claim(kind, here.local_rank)
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    said = open_files.allow(files_of(setup.config, here.world, here.local_world))
    if said is not None and here.local_rank == 0:
        say(said)
    status, last, damaged = exits.DONE, 0, None
    if agent is None:
        join(here, kind, timedelta(minutes=train.timeout))
    try:
        try:
            last = run(setup, device, here.local_world, agent, here.began)
        finally:
            here = Here.now()  # which the run may have changed
    except Dismissed:
        return exits.DONE
    except ConfigError as error:  # on every rank
        status = exits.MISUSED
        if here.rank == 0:
            err(error)
    except (NonFinite, SaveError, StoreError) as error:  # on every rank
        status = error.status if isinstance(error, NonFinite) else exits.FAILED
        damaged = error.path if isinstance(error, DamageError) else None
        if here.rank == 0:
            err(error)
    except TokenError as error:  # on this rank alone: the others wait for it, until the launcher ends them
        err(f"rank {here.rank}: {error}")
        os._exit(exits.FAILED)
    except KeyboardInterrupt:  # the second one: under the launcher it ends all ranks itself
        err("Interrupted again: ended at once, without a checkpoint.")
        os._exit(exits.of_signal(signal.SIGINT))
    # While the others wait, for the launcher ends one that is left over.
    if here.rank == 0 and damaged is not None and (other := checkpoints.instead_of(damaged)):
        err(other)
    leave(here)
    # After the group's end, so that no other rank waits for it: an export of many bytes may outlast their patience.
    if here.rank == 0 and status == exits.DONE and setup.config.checkpoint.export is not None:
        try:
            say(export(setup.config, last))
        except StoreError as error:
            status = exits.FAILED
            err(error)
    return status


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
    if goodput := [share for _, share in metrics.curve(records, "goodput")][-1:]:
        befell = incidents.summary(incidents.read(out))
        lines.append(f"  goodput          {goodput[0]:.1%} of the wall clock went into steps that count ({befell})")
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    paths = {"metrics": out / metrics.METRICS, "loss curve": out / metrics.PICTURE}
    if lines_of_experts := metrics.read(out / metrics.EXPERTS):
        metrics.draw_loads(lines_of_experts, out / metrics.PICTURE_OF_EXPERTS)
        paths["load of experts"] = out / metrics.PICTURE_OF_EXPERTS
    paths["resolved config"] = out / "config.yaml"
    if found := checkpoints.complete(checkpoints.folder_of(out, config.checkpoint.folder)):
        paths["checkpoint"] = found[max(found)]
    lines += [f"  {what:<16} {path}" for what, path in paths.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
