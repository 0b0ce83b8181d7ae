"""A rank of the peers of `recovery.py`: `recovery_worker.py WAY TASK`, in an environment that has no Megacore.

`initial` writes the weights that everybody starts from. `torchrun` is a rank that torchrun starts again after a fault,
from its newest distributed checkpoint, on as many ranks as there are. `torchft` is a replica of torchft's, which takes
the state of a living one. Each appends {step, time, first, end} to a file of its own for each step that counts: the
samples [first, end) were its part of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

INITIAL, TOKENS, FINAL = "initial", "tokens.npy", "final.safetensors"
"""The folder of the first weights and the file of all samples, [samples, length + 1], beside the folders of runs; and
the last weights, in the folder of a run."""


@dataclass(frozen=True)
class RecoveryTask:
    """The training that all ways do.

    Args:
        out: The folder of the run.
        shared: The folder of the first weights and the samples.
        model: The fields of transformers' LlamaConfig.
        steps, batch: The number of steps, and of samples in each.
        every: Steps from one checkpoint to the next.
        nodes: The number of nodes, of one rank each.
        lr, betas, decay, clip: The options of AdamW, and the bound of the gradient norm.
    """

    out: Path
    shared: Path
    model: Mapping[str, Any]
    steps: int
    batch: int
    every: int
    nodes: int
    lr: float
    betas: tuple[float, float]
    decay: float
    clip: float

    @classmethod
    def of(cls, text: str) -> RecoveryTask:
        tree = json.loads(text)
        return cls(**tree | {key: Path(tree[key]) for key in ("out", "shared")})


class PlainTraining:
    """The model, its optimizer, its samples and its record: what is the same for both peers."""

    def __init__(self, task: RecoveryTask) -> None:
        torch.set_num_threads(1)
        self.task, self.node = task, int(os.environ["NODE"])
        self.records = (task.out / f"steps-{self.node}-{os.getpid()}.jsonl").open("a")
        self.tokens = np.load(task.shared / TOKENS, mmap_mode="r")
        self.model = LlamaForCausalLM(LlamaConfig(**task.model))
        self.model.load_state_dict(load_file(task.shared / INITIAL / "model.safetensors"))
        matrices = [each for each in self.model.parameters() if each.ndim > 1]
        others = [each for each in self.model.parameters() if each.ndim == 1]
        groups = [{"params": matrices, "weight_decay": task.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=task.betas, fused=True)

    def backward(self, model: Any, samples: range, counts: int) -> None:
        """Add the gradient of the losses of these samples, summed and divided by the number that counts, and clip."""
        tokens = torch.from_numpy(self.tokens[samples.start : samples.stop].astype(np.int64))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        (cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * len(samples) / counts).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)

    def record(self, step: int, samples: range) -> None:
        done = {"step": step, "time": time.time(), "first": samples.start, "end": samples.stop}
        print(json.dumps(done), file=self.records, flush=True)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def end(self) -> None:
        ours = self.task.out / f"{self.node}-{FINAL}"
        save_file({name: value.contiguous() for name, value in self.model.state_dict().items()}, ours)
        ours.rename(self.task.out / FINAL)


def initial(task: RecoveryTask) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**task.model)).save_pretrained(task.shared / INITIAL)


def torchrun(task: RecoveryTask) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    training = PlainTraining(task)
    step = resumed(training)
    model = DistributedDataParallel(training.model)
    while step < task.steps:
        first = step * task.batch
        samples = range(first + task.batch * rank // world, first + task.batch * (rank + 1) // world)
        training.optimizer.zero_grad()
        training.backward(model, samples, task.batch // world)  # DDP takes the mean over ranks
        training.optimizer.step()
        step += 1
        training.record(step, samples)
        if step % task.every == 0:
            dcp.save(training.state() | {"step": step}, checkpoint_id=task.out / f"step-{step:06d}")
    if rank == 0:
        training.end()
    dist.barrier()
    dist.destroy_process_group()


def resumed(training: PlainTraining) -> int:
    """Load the newest whole checkpoint -> its step; 0 where there is none."""
    whole = sorted(path.parent for path in training.task.out.glob("step-*/.metadata"))
    if not whole:
        return 0
    # A fresh optimizer has no state to load into.
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()
    state: dict[str, Any] = training.state() | {"step": 0}
    dcp.load(state, checkpoint_id=whole[-1])
    training.load(state)
    return int(state["step"])


def torchft(task: RecoveryTask) -> None:
    from torchft import DistributedDataParallel as FaultTolerant
    from torchft import Manager, Optimizer, ProcessGroupGloo

    training = PlainTraining(task)
    meet(task, training.node)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=training.load,
        state_dict=training.state,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{training.node}",
        timeout=timedelta(seconds=10),
        init_sync=False,  # all have the same weights
    )
    model, optimizer = FaultTolerant(manager, training.model), Optimizer(manager, training.optimizer)
    share = task.batch // task.nodes
    while (step := manager.current_step()) < task.steps and not (task.out / FINAL).exists():
        # The place of a sample is its step and its replica, as torchft's DistributedSampler has it; by the step that
        # counts, so that a step that does not count loses none.
        first = step * task.batch + training.node * share
        samples = range(first, first + share)
        optimizer.zero_grad()
        training.backward(model, samples, share)
        optimizer.step()
        if manager.current_step() == step + 1 and manager.is_participating():
            training.record(step + 1, samples)
    if manager.current_step() == task.steps:
        training.end()
    os._exit(0)  # its threads would wait for the replicas that have ended


def meet(task: RecoveryTask, node: int) -> None:
    """Wait until every replica has come once: none begins alone."""
    (task.out / f"came-{node}").touch()
    while len(list(task.out.glob("came-*"))) < task.nodes:
        time.sleep(0.01)


WAYS: Mapping[str, Callable[[RecoveryTask], None]] = {"initial": initial, "torchrun": torchrun, "torchft": torchft}

if __name__ == "__main__":
    WAYS[sys.argv[1]](RecoveryTask.of(sys.argv[2]))
