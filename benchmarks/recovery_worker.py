"""A rank of the peers of `recovery_peers.py`: by torchrun with distributed checkpoints, or as a replica of torchft.

Run in the peers' environment, which has no Megacore. Appends {step, time, samples} to a file for each step that counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def sample(number: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.cumsum(torch.randint(1, 4, (length + 1,), generator=generator), 0) % vocabulary


class Work:
    """The model, its optimizer and its data, the same for both peers."""

    def __init__(self, task: dict[str, Any], name: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.task, self.name, self.out = task, name, Path(task["out"])
        self.out.mkdir(exist_ok=True)
        self.records = (self.out / f"steps-{name}.jsonl").open("a")
        self.model = LlamaForCausalLM(LlamaConfig(**task["model"]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task["lr"], fused=True)

    def loss(self, model: Any, numbers: range) -> torch.Tensor:
        """Return the sum over these samples of their mean loss per token."""
        length, vocabulary = self.task["length"], self.task["model"]["vocab_size"]
        tokens = torch.stack([sample(number, length, vocabulary) for number in numbers])
        logits = model(input_ids=tokens[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * len(numbers)

    def record(self, step: int, samples: int, world: int) -> None:
        print(json.dumps({"step": step, "time": time.time(), "samples": samples, "world": world}), file=self.records)
        self.records.flush()

    def end(self) -> None:
        ours = self.out / f"final-{self.name}"
        save_file({name: value.contiguous() for name, value in self.model.state_dict().items()}, ours)
        ours.rename(self.out / "final.safetensors")


def by_torchrun(task: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    work = Work(task, f"{rank}")
    model = DistributedDataParallel(work.model)
    step = _resume(work)
    while step < task["steps"]:
        first = step * task["batch"]
        ends = [first + task["batch"] * each // world for each in (rank, rank + 1)]
        work.optimizer.zero_grad()
        # DDP takes the mean over ranks.
        (work.loss(model, range(*ends)) * world / task["batch"]).backward()
        torch.nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
        work.optimizer.step()
        step += 1
        if rank == 0:
            work.record(step, task["batch"], world)
        if step % task["every"] == 0:
            state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=work.out / f"step-{step:06d}")
    if rank == 0:
        work.end()
    dist.barrier()
    dist.destroy_process_group()


def _resume(work: Work) -> int:
    whole = sorted(path.parent for path in work.out.glob("step-*/.metadata"))
    if not whole:
        return 0
    # The optimizer has no state to load into before its first step.
    for parameter in work.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    work.optimizer.step()
    state: dict[str, Any] = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=whole[-1])
    work.model.load_state_dict(state["model"])
    work.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def by_torchft(task: dict[str, Any]) -> None:
    from torchft import DistributedDataParallel as FaultTolerant
    from torchft import Manager, Optimizer, ProcessGroupGloo

    replica = int(os.environ["REPLICA"])
    work = Work(task, f"{replica}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        work.model.load_state_dict(state["model"])
        work.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()},
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=10),
    )
    model, optimizer = FaultTolerant(manager, work.model), Optimizer(manager, work.optimizer)
    share = task["batch"] // task["nodes"]
    for numbers in _shard(replica, task["nodes"], share, manager.current_step):
        if manager.current_step() >= task["steps"]:
            break
        optimizer.zero_grad()
        (work.loss(model, numbers) / share).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            work.record(manager.current_step(), share * manager.num_participants(), manager.num_participants())
    work.end()
    os._exit(0)  # its threads wait for the replicas that have ended


def _shard(replica: int, replicas: int, share: int, step: Any) -> Iterator[range]:
    """Yield the samples of a replica, as torchft's sampler shares them out: drawn once, and lost if its step is.

    A replica that comes back goes on where the others are.
    """
    drawn = step()
    while True:
        drawn = max(drawn, step())
        first = (drawn * replicas + replica) * share
        yield range(first, first + share)
        drawn += 1


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    {"torchrun": by_torchrun, "torchft": by_torchft}[sys.argv[1]](given)
