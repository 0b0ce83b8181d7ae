"""Training steps on one GPU, this project beside Hugging Face, eager and compiled, in one run.

    python benchmarks/gpu_step.py [--shapes 1b 8b] [--rounds 2] [--json results.json]
    python benchmarks/gpu_step.py --shapes tiny --device cpu --warm-up 1 --steps 1     # that it runs at all

bf16 parameters, gradients and AdamW state (fused) for everyone, clipping at 1.0, sequences of 4096 tokens, cross
entropy over the whole vocabulary. Each run is a process of its own, so that memory and compiled code are its own; modes
take turns. Steps are timed together between two synchronisations, never one by one: nothing waits inside of a step. The
8B shape keeps 8 of its 32 layers unless ``--all-layers`` is given: weights, gradients and state of all take 64 GB, and
activations without recomputation more than one GPU has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megacore.hardware import peak_memory_gib, peak_tflops
from megacore.optimizer import Optimizer
from megacore.step import TrainStep
from models.assemble import Model
from models.config import ModelConfig, flops_per_token
from models.decoder import Microbatch
from models.registry import configure
from models.stages import layout_of
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.sync import Gradients

MODES = ("megacore", "megacore compiled", "Hugging Face", "Hugging Face compiled")
LR = 3e-4


@dataclass(frozen=True)
class Shape:
    """A model and the sequences of a step, all in one microbatch."""

    model: Mapping[str, Any]
    sequence_length: int = 4096
    sequences: int = 1

    def config(self, all_layers: bool) -> ModelConfig:
        layers = {} if all_layers or "layers" not in self.model else {"num_hidden_layers": self.model["layers"]}
        return configure({key: value for key, value in self.model.items() if key != "layers"} | layers)


SHAPES: Mapping[str, Shape] = {
    "1b": Shape({"preset": "llama-3.2-1b"}, sequences=2),
    "8b": Shape({"preset": "llama-3.1-8b", "layers": 8}),
    "tiny": Shape({"preset": "llama-tiny"}, sequence_length=64, sequences=2),
}


@dataclass(frozen=True)
class Result:
    """Of one run; ``mfu`` is None where the device's peak is not known."""

    seconds_per_step: float
    tokens_per_second: float
    mfu: float | None
    peak_memory_gib: float
    first_loss: float
    last_loss: float


def tokens(config: ModelConfig, shape: Shape, device: torch.device) -> torch.Tensor:
    """[sequences, sequence length + 1], the same for everyone."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(config.vocab_size, (shape.sequences, shape.sequence_length + 1), generator=generator)
    return drawn.to(device)


def ours(config: ModelConfig, shape: Shape, device: torch.device, compiled: bool) -> Callable[[], torch.Tensor]:
    """A function that takes one step and gives its loss, on the device."""
    mesh = Mesh.single(device)
    model = Model.create(config, layout_of(config, mesh.shape), mesh, torch.bfloat16)
    model.parameters.initialise(seed=0)
    if compiled:
        model.compile()
    gradients = Gradients(model.parameters, model.chunks, torch.bfloat16)
    optimizer = Optimizer(gradients, lr=LR, master_weights=False)
    step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.bfloat16), gradients, optimizer)
    batch = tokens(config, shape, device)
    positions = torch.arange(shape.sequence_length, device=device).repeat(shape.sequences)
    activation = (len(positions), config.sizes["embed"])
    inputs, labels = batch[:, :-1].flatten(), batch[:, 1:].flatten()
    microbatch = Microbatch(inputs, labels, positions, shape.sequences, activation)
    return lambda: step([microbatch], LR).loss


def hugging_face(config: ModelConfig, shape: Shape, device: torch.device, compiled: bool) -> Callable[[], torch.Tensor]:
    """As :func:`ours`, of transformers' model with its own loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config.to_hugging_face()
    theirs = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with device:
        model: Any = AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch = tokens(config, shape, device)

    def step() -> torch.Tensor:
        logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(mode: str, name: str, device: torch.device, warm_up: int, steps: int, all_layers: bool) -> Result:
    """One run of one mode, in this process."""
    shape = SHAPES[name]
    config = shape.config(all_layers)
    build = ours if mode.startswith("megacore") else hugging_face
    step = build(config, shape, device, mode.endswith("compiled"))
    first = step().item()
    for _ in range(warm_up - 1):
        step()
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    _synchronise(device)
    seconds = (time.perf_counter() - start) / steps
    speed = shape.sequences * shape.sequence_length / seconds
    peak = peak_tflops(device, torch.bfloat16)
    mfu = speed * flops_per_token(config, shape.sequence_length) / 1e12 / peak if peak else None
    return Result(seconds, speed, mfu, peak_memory_gib(device), first, loss.item())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_a_process(mode: str, name: str, arguments: argparse.Namespace) -> Result | str:
    """The result of a run, or the last line of what went wrong (out of memory, say)."""
    command = [sys.executable, __file__, "--run", mode, "--shapes", name, "--device", arguments.device]
    command += ["--warm-up", str(arguments.warm_up), "--steps", str(arguments.steps)]
    command += ["--all-layers"] * arguments.all_layers
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return Result(**json.loads(lines[-1].removeprefix("RESULT ")))
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def table(name: str, results: Mapping[str, list[Result | str]]) -> str:
    """Medians of each mode, and its speed relative to Hugging Face eager."""
    good = {mode: [r for r in runs if isinstance(r, Result)] for mode, runs in results.items()}
    speeds = {mode: statistics.median(r.tokens_per_second for r in runs) for mode, runs in good.items() if runs}
    lines = [f"{name}: {'':24} tokens/s     MFU   peak GiB   against Hugging Face"]
    for mode, runs in results.items():
        if not good[mode]:
            lines.append(f"  {mode:28} did not run: {runs[-1]}")
            continue
        mfus = [r.mfu for r in good[mode] if r.mfu is not None]
        mfu = f"{statistics.median(mfus):6.1%}" if mfus else "     ?"
        memory = max(r.peak_memory_gib for r in good[mode])
        ratio = f"{speeds[mode] / speeds['Hugging Face']:.2f}" if "Hugging Face" in speeds else "?"
        lines.append(f"  {mode:28} {speeds[mode]:10,.0f}  {mfu}   {memory:8.1f}   {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--all-layers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU; --shapes tiny --device cpu shows that the benchmark runs\n")
    if arguments.run:
        (name,) = arguments.shapes
        device = torch.device(arguments.device)
        result = measure(arguments.run, name, device, arguments.warm_up, arguments.steps, arguments.all_layers)
        print("RESULT " + json.dumps(asdict(result)), flush=True)
        return
    device_name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    print(f"{device_name}, torch {torch.__version__}, bf16, {arguments.rounds} rounds of {arguments.steps} steps")
    everything = {}
    for name in arguments.shapes:
        results: dict[str, list[Result | str]] = {mode: [] for mode in MODES}
        for _ in range(arguments.rounds):
            for mode in MODES:
                results[mode].append(in_a_process(mode, name, arguments))
        print(table(name, results), flush=True)
        everything[name] = {m: [asdict(r) if isinstance(r, Result) else r for r in rs] for m, rs in results.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
