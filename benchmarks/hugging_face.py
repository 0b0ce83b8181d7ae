"""transformers' models under torch's own data parallelism, on the work of the benchmarks: MODE under torchrun, or
`alone` without.

Parameters, gradients and AdamW's state are in the named dtype; the loss is taken of logits in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import steps
from benchmarks.workload import WORKLOADS, Workload


def create(work: Workload, dtype: torch.dtype) -> nn.Module:
    """The model, drawn as transformers draws it, from one seed on all ranks."""
    torch.manual_seed(0)
    fields = work.config.to_hugging_face() | {"attn_implementation": "sdpa", "use_cache": False}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return model.to(dtype).train()


def data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fully_sharded(model: Any, keeps: bool) -> nn.Module:
    """By blocks. Between forward and backward the parameters of blocks are kept, or gathered again (the default)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # None lets the blocks go, and keeps what the root holds itself, which the backward needs first.
    reshards = False if keeps else None
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return model


MODES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": data_parallel,
    "fsdp2-keeps": partial(fully_sharded, keeps=True),
    "fsdp2": partial(fully_sharded, keeps=False),
}


def train_step(work: Workload, mode: str, dtype: torch.dtype) -> Callable[[], float]:
    """A function that takes one step and gives the mean loss of this rank's tokens."""
    model = MODES[mode](create(work, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=steps.LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    *others, last = steps.tokens(work, rank, ranks)

    def backward(rows: torch.Tensor) -> float:
        logits = model(input_ids=rows[:, :-1].contiguous()).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()) / (len(others) + 1)
        loss.backward()
        return loss.item()

    def step() -> float:
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            total = sum(backward(rows) for rows in others)
        total += backward(last)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def main() -> None:
    arguments = steps.parser(__doc__, MODES).parse_args()
    torch.set_num_threads(arguments.threads)
    with steps.process_group():
        step = train_step(WORKLOADS[arguments.shape], arguments.mode, steps.DTYPES[arguments.dtype])
        steps.count(step, arguments.warm_up, arguments.steps, steps.CLOCKS[arguments.clock])


if __name__ == "__main__":
    main()
