"""Runs that others have published, and what the plan says of the same ones: tokens a second of a device. And layouts
that they have published, beside the one that the search finds: seconds of a step, both by the plan.

python benchmarks/published_runs.py
python benchmarks/published_runs.py --fit
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.devices import DEVICES, Device, attention_share
from megacore.models.config import flops_per_token
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import Precision, Recompute, ZeroShard
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.costs import ALL_REDUCE, ALL_TO_ALL
from megacore.planning.fit import fit
from megacore.planning.peak_memory import peaks
from megacore.planning.setting import ADAM_16, Setting, Widths
from megacore.planning.step_time import Cluster, estimate
from megacore.tools.tables import table


@dataclass(frozen=True)
class _Once(Cluster):
    """Devices whose exchanges send a token once to each group of ranks that has some of its experts."""

    experts: int = 1
    top_k: int = 1

    def sent(self, groups: int) -> float:
        """Return what is sent to so many groups of experts, over the rows by themselves; routes are even."""
        none = math.comb(self.experts - self.experts // groups, self.top_k) / math.comb(self.experts, self.top_k)
        return groups * (1 - none) / self.top_k

    def bandwidth(self, mesh: MeshShape, axis: str, kind: str = ALL_REDUCE, ranks: int | None = None) -> float:
        found = super().bandwidth(mesh, axis, kind, ranks)
        if kind != ALL_TO_ALL:
            return found
        places = mesh.ep * mesh.tp
        nodes = max(1, places // self.device.per_node)
        return min(self.device.link / self.sent(places), found / self.sent(nodes))


@dataclass(frozen=True)
class Published:
    """A run, and how fast it was.

    Args:
        name: The name of the run.
        source: The place where it was published.
        tokens: The tokens that each device has trained on in a second.
        model: The model as a recipe names it.
        mesh: Its layout.
        sequence_length, micro_size, microbatches: Tokens, sequences of a microbatch, and microbatches of each data
            parallel rank in a step.
        device: The device that it ran on.
        changed: The fields of that which are not the table's.
        tflops: The peak of its devices, where that is not the table's.
        precision: The precision of its products.
        shard, recompute, chunks: The keys of a recipe of these names.
        schedule: The schedule, where it is neither 1F1B nor interleaved.
        widths: The widths of the training state, where it is not ours.
        once: Whether a token goes once to each node, and once to each rank, that has several of its experts (DeepEP).
        repeated: The share of a block's products that its recomputation repeats beyond ours of the same name.
    """

    name: str
    source: str
    tokens: float
    model: Mapping[str, Any]
    mesh: MeshShape
    sequence_length: int
    micro_size: int = 1
    microbatches: int = 1
    device: str = "h100-80"
    changed: Mapping[str, Any] = field(default_factory=dict)
    tflops: float | None = None
    precision: Precision = "bf16"
    shard: ZeroShard = "parameters"
    recompute: Recompute = "none"
    chunks: int = 1
    schedule: str = ""
    repeated: float = 0.0
    widths: Widths | None = None
    once: bool = False

    def setting(self) -> Setting:
        model = configure(dict(self.model))
        return Setting(
            model,
            layout_of(model, self.mesh, self.chunks),
            self.widths or Widths.of(self.precision),
            self.sequence_length,
            self.micro_size,
            self.microbatches,
            self.schedule or ("interleaved" if self.chunks > 1 else "1f1b"),
            self.shard,
            recompute=self.recompute,
            fp8=self.precision == "fp8",
            context=ContextParallel(self.mesh.cp),
        )

    def cluster(self) -> Cluster:
        device: Device = replace(DEVICES[self.device], **self.changed)
        scale = 1.0 if self.tflops is None else self.tflops / device.tflops("bf16")
        tflops = device.tflops(self.precision) * scale
        if not self.once:
            return Cluster(device, tflops)
        routing = configure(dict(self.model)).anatomy.routing
        assert routing is not None
        return _Once(device, tflops, experts=routing.experts, top_k=routing.top_k)

    def planned(self) -> float:
        """Return the tokens per second of each device by the plan."""
        setting, cluster = self.setting(), self.cluster()
        seconds = estimate(setting, cluster).total
        if self.repeated:
            full = replace(setting, recompute="full")
            seconds += self.repeated * estimate(full, cluster).recompute
        return setting.global_tokens / seconds / self.mesh.world


def _of_tflops(tflops: float, preset: str, length: int) -> float:
    """Return the tokens per second of a device that does so many TFLOP/s of the model's operations, the attention's
    causal half."""
    return tflops * 1e12 / flops_per_token(configure({"preset": preset}), length)


# cuDNN's attention, which NVIDIA's engines call: 529 and 518 TFLOP/s where FlashAttention-2 has 333 and 318 (arXiv
# 2407.08608, figures 5 and 6). MosaicML's was the first FlashAttention in Triton (`submit_benchmarks.py`), than which
# the second one is 1.3 to 1.5 times as fast in the forward and twice in the backward (arXiv 2307.08691): on an A100,
# and on an H100 with the 335 TFLOP/s that this paper has.
_CUDNN = {"attention": attention_share(529 / 989.4, 518 / 989.4)}
_TRITON = {
    "H100": {"attention": attention_share(335 / 989.4 / 1.4, 335 / 989.4 / 2)},
    "A100": {"attention": attention_share(0.73 / 1.4, 0.63 / 2)},
}
# NVIDIA's launchers sum gradients in bf16 (`grad_sync_dtype`, `grad_reduce_in_fp32`). So must Qwen3's with FSDP: in
# fp32 the gradients of each microbatch and both gatherings would take its adapters 17.7 of 17.6 seconds at full speed.
_BF16_SUMS = replace(Widths.of("bf16"), gradient=2)

_MPT = (
    ("1B", 8, 45455, 2048, 24, 16, 2048, 14, 1),
    ("3B", 8, 20964, 2560, 32, 20, 4096, 5, 6),
    ("3B", 64, 22525, 2560, 32, 20, 2048, 6, 3),
    ("7B", 8, 10643, 4096, 32, 32, 2048, 6, 1),
    ("13B", 8, 4792, 5120, 40, 40, 2048, 2, 1),
    ("13B", 64, 4800, 5120, 40, 40, 2048, 2, 1),
    ("30B", 32, 2308, 7168, 48, 56, 2048, 14, 3, "full"),
    ("70B", 64, 1039, 8192, 80, 64, 2048, 8, 4, "full"),
)


# Chosen by hand before any was planned: of each size, device and kind of layout a few.
_MPT_HELD_OUT = (
    ("760m", 32, 67971, 1536, 24, 12, 2048, 24, 1),
    ("1B", 8, 52275, 2048, 24, 16, 512, 56, 4),
    ("1B", 8, 29157, 2048, 24, 16, 8192, 3, 4),
    ("3B", 16, 24142, 2560, 32, 20, 2048, 10, 3),
    ("3B", 8, 16578, 2560, 32, 20, 8192, 3, 6),
    ("7B", 8, 6935, 4096, 32, 32, 8192, 8, 2, "full"),
    ("7B", 8, 3318, 4096, 32, 32, 32768, 2, 2, "full"),
    ("13B", 8, 4717, 5120, 40, 40, 4096, 10, 3, "full"),
    ("13B", 8, 2985, 5120, 40, 40, 16384, 3, 3, "full"),
    ("30B", 8, 2002, 7168, 48, 56, 2048, 3, 21, "full"),
    ("30B", 8, 1384, 7168, 48, 56, 8192, 1, 21, "full"),
    ("70B", 32, 882, 8192, 80, 64, 2048, 2, 16, "full"),
    ("1B", 8, 20513, 2048, 24, 16, 2048, 14, 4, "none", "a100-80"),
    ("3B", 8, 9457, 2560, 32, 20, 4096, 5, 6, "none", "a100-80"),
    ("7B", 8, 4641, 4096, 32, 32, 2048, 6, 2, "none", "a100-80"),
    ("7B", 8, 2453, 4096, 32, 32, 16384, 4, 2, "full", "a100-80"),
    ("13B", 8, 1795, 5120, 40, 40, 8192, 5, 3, "full", "a100-80"),
    ("30B", 8, 916, 7168, 48, 56, 2048, 3, 21, "full", "a100-80"),
    ("70B", 64, 410, 8192, 80, 64, 2048, 8, 4, "full", "a100-80"),
    ("3B", 64, 9736, 2560, 32, 20, 2048, 6, 1, "none", "a100-40"),
    ("7B", 8, 2249, 4096, 32, 32, 16384, 1, 4, "full", "a100-40"),
    ("13B", 128, 1972, 5120, 40, 40, 2048, 16, 1, "full", "a100-40"),
    ("30B", 128, 865, 7168, 48, 56, 2048, 6, 1, "full", "a100-40"),
    ("70B", 128, 376, 8192, 80, 64, 2048, 4, 1, "full", "a100-40"),
)


def _gpt(hidden: int, layers: int, heads: int, length: int, vocabulary: int = 51200) -> Mapping[str, Any]:
    shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
    return {"family": "gpt2", "vocab_size": vocabulary, **shape}


def _mpt(
    size: str, gpus: int, tokens: int, hidden: int, layers: int, heads: int, length: int,
    micro_size: int, microbatches: int, recompute: Recompute = "none", device: str = "h100-80",
) -> Published:  # fmt: skip
    """Return a run of MosaicML's MPT, which has the shape of a gpt2."""
    return Published(
        f"MPT {size}, {gpus} {device.upper().removesuffix('-80')}, {length:,} tokens, FSDP",
        _FOUNDRY,
        tokens,
        _gpt(hidden, layers, heads, length, 50368),
        MeshShape(dp=gpus),
        length,
        micro_size,
        microbatches,
        device,
        _TRITON[DEVICES[device].peak],
        recompute=recompute,
        widths=ADAM_16,
    )


def _nemo(
    name: str, tokens: float, model: Mapping[str, Any], mesh: MeshShape, length: int, sequences: int,
    micro_size: int = 1, chunks: int = 1, precision: Precision = "fp8", recompute: Recompute = "none",
    schedule: str = "", shard: ZeroShard = "optimizer", source: str = "", widths: Widths = _BF16_SUMS,
    once: bool = False,
) -> Published:  # fmt: skip
    """Return a run of Megatron's on H100, of so many ``sequences`` a step."""
    split = " x ".join(f"{dim.upper()} {mesh[dim]}" for dim in ("tp", "cp", "ep", "pp", "dp") if mesh[dim] > 1)
    how = [f"{split} x {chunks} chunks" if chunks > 1 else split, precision, *([schedule] if schedule else [])]
    return Published(
        ", ".join([name, f"{mesh.world:,} H100", *how]),
        source or _NEMO, tokens, model, mesh, length, micro_size, sequences // micro_size // mesh.data,
        precision=precision, shard=shard, chunks=chunks, recompute=recompute, schedule=schedule, changed=_CUDNN,
        widths=widths, once=once,
    )  # fmt: skip


_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_ASYNC = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
_A100 = "pytorch/torchtitan, docs/performance.md of 2024 (Llama 3)"
_LLAMA = "Llama 3 (arXiv 2407.21783), table 4"
_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_NEMO = "NVIDIA/NeMo, docs/source/performance/performance_summary.md, 24.07"
_QWEN = "yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md"
_NVIDIA = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11"

# torchtitan's H100 have memory of 2.4 TB/s and a limit of 500 W, and reach something between the SXM's and the NVL's
# peak, as its page says: here the NVL's. Its per-op checkpointing keeps every second product.
_SLOW: Mapping[str, Any] = {"changed": {"bandwidth": 2.4e12, "memory": 96e9}, "tflops": 835.5}
_8B, _70B, _405B = ({"preset": f"llama-3.1-{size}"} for size in ("8b", "70b", "405b"))
_PER_OP: Mapping[str, Any] = {"recompute": "selective", "repeated": 0.5, **_SLOW}

# Llama 3's first chunk has the embedding alone and its last one the head, so each other one has a layer. MosaicML's
# gradients are taken to be summed in bf16, as its FSDP does by default.
# fmt: off
PUBLISHED = (
    Published("8B, 8 H100, FSDP", _TITAN, 6667, _8B, MeshShape(dp=8), 8192, 2, **_PER_OP),
    Published("8B, 128 H100, FSDP", _TITAN, 6514, _8B, MeshShape(dp=128), 8192, 2, **_PER_OP),
    Published("8B, 8 H100, FSDP, fp8", _TITAN, 8532, _8B, MeshShape(dp=8), 8192, 2, precision="fp8", **_PER_OP),
    Published("8B, 128 H100, FSDP, fp8", _TITAN, 8380, _8B, MeshShape(dp=128), 8192, 2, precision="fp8", **_PER_OP),
    Published("8B, 64 H100, FSDP 8 x TP 8", _ASYNC, 4378, _8B, MeshShape(dp=8, tp=8), 8192, 12, **_PER_OP),
    Published(
        "70B, 256 H100, FSDP 32 x TP 8", _ASYNC, 597.3, _70B, MeshShape(dp=32, tp=8), 8192, 16, recompute="full",
        **_SLOW
    ),
    Published(
        "8B, 64 A100, FSDP", _A100, 2973, _8B, MeshShape(dp=64), 8192, device="a100-80", recompute="selective",
        repeated=0.5
    ),
    Published("70B, 64 A100, FSDP", _A100, 331, _70B, MeshShape(dp=64), 8192, device="a100-80", recompute="full"),
    Published(
        "405B, 8,192 H100, TP 8 x PP 16 x DP 64", _LLAMA, _of_tflops(430, "llama-3.1-405b", 8192), _405B,
        MeshShape(pp=16, dp=64, tp=8), 8192, microbatches=32, shard="optimizer", chunks=8
    ),
    Published(
        "405B, 16,384 H100, TP 8 x PP 16 x DP 128", _LLAMA, _of_tflops(400, "llama-3.1-405b", 8192), _405B,
        MeshShape(pp=16, dp=128, tp=8), 8192, microbatches=16, shard="optimizer", chunks=8
    ),
    *(_mpt(*row) for row in _MPT),
    Published(
        "8B, 8 H100, FSDP, fp8, NVIDIA", _NVIDIA, 14451, _8B, MeshShape(dp=8), 8192, 1, 16, changed=_CUDNN,
        precision="fp8", widths=_BF16_SUMS
    ),
    Published(
        "70B, 64 H100, TP 4 x PP 8 x DP 2, fp8", _NVIDIA, 1602, _70B, MeshShape(pp=8, dp=2, tp=4), 8192, 1, 64,
        changed=_CUDNN, precision="fp8", shard="optimizer", chunks=5, widths=_BF16_SUMS
    ),
)
_L27, _L213, _L270 = ({"preset": f"llama-2-{size}"} for size in ("7b", "13b", "70b"))
_175B, _235B = _gpt(12288, 96, 96, 2048), {"preset": "qwen3-235b-a22b"}
_STEP = 2048 * 4096 / 256
"""The tokens of each device in a step of Qwen3's 235B."""
_OF_QWEN: Mapping[str, Any] = {"precision": "bf16", "source": _QWEN, "widths": Widths.of("bf16"), "once": True}

HELD_OUT = (
    *(_mpt(*row) for row in _MPT_HELD_OUT),
    _nemo("GPT 5B", 22521, _gpt(4096, 24, 32, 2048), MeshShape(dp=64), 2048, 2048, 4),
    _nemo("GPT 20B", 5851, _gpt(6144, 44, 48, 2048), MeshShape(dp=32, tp=2), 2048, 256, 2),
    _nemo("GPT 175B", 726, _175B, MeshShape(pp=8, dp=4, tp=4), 2048, 256, 1, 6),
    _nemo("GPT 175B", 782, _175B, MeshShape(pp=8, dp=16, tp=4), 2048, 2048, 2, 6),
    _nemo("Llama 2 7B", 16847, _L27, MeshShape(dp=8), 4096, 128),
    _nemo("Llama 2 13B", 8646, _L213, MeshShape(pp=4, dp=4), 4096, 128, 1, 10),
    _nemo("Llama 2 70B", 1707, _L270, MeshShape(pp=4, dp=4, tp=4), 4096, 128, 1, 20),
    _nemo("Nemotron 340B", 322, {"preset": "nemotron-4-340b"}, MeshShape(pp=8, dp=2, tp=8), 4096, 32, 1, 12),
    _nemo("8B", 12036, _8B, MeshShape(dp=4, cp=2), 8192, 128),
    _nemo("70B", 1533, _70B, MeshShape(pp=4, dp=2, cp=2, tp=4), 8192, 128, 1, 5),
    _nemo("405B", 292, _405B, MeshShape(pp=8, dp=8, cp=2, tp=8), 8192, 512, 1, 8, source=_NVIDIA),
    _nemo("30B-A3B", 5275, {"preset": "qwen3-30b-a3b"}, MeshShape(pp=2, ep=8), 4096, 512, 2, 24, source=_NVIDIA),
    _nemo(
        "235B-A22B", _STEP / 19.7, _235B, MeshShape(pp=8, ep=16, tp=2), 4096, 2048, 1, 4, recompute="selective",
        **_OF_QWEN
    ),
    _nemo(
        "235B-A22B", _STEP / 17.6, _235B, MeshShape(pp=8, ep=16, tp=2), 4096, 2048, 1, 4, recompute="selective",
        schedule="overlapped", **_OF_QWEN
    ),
    _nemo(
        "235B-A22B", _STEP / 17.6, _235B, MeshShape(dp=32, ep=4, tp=2), 4096, 2048, 4, recompute="full",
        shard="parameters", **{**_OF_QWEN, "widths": _BF16_SUMS}
    ),
    _nemo(
        "235B-A22B", _STEP / 24.2, _235B, MeshShape(pp=32, ep=4, tp=2), 4096, 2048, 1, 3, recompute="selective",
        **{**_OF_QWEN, "once": False}
    ),
    _nemo("235B-A22B", _STEP / 29.0, _235B, MeshShape(pp=8, dp=4, ep=2, tp=4), 4096, 2048, 1, 4, **_OF_QWEN),
)
"""Runs that no number was fitted to; those of ``PUBLISHED`` all were used."""
# fmt: on


@dataclass(frozen=True)
class PublishedLayout:
    """A layout in which others train a model.

    Args:
        preset: The model.
        mesh: Its layout, where experts are whole over ep x tp.
        sequences: The sequences of a step.
        chunks, shard: The keys of a recipe of these names.
    """

    source: str
    preset: str
    mesh: MeshShape
    sequences: int
    sequence_length: int = 8192
    chunks: int = 1
    shard: ZeroShard = "optimizer"

    def __str__(self) -> str:
        mesh = self.mesh
        spread = " ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS if mesh[dim] > 1)
        return f"{self.preset} on {mesh.world:,}: {spread} chunks={self.chunks}"

    @property
    def base(self) -> Setting:
        """The model and the batch on one device."""
        model = configure({"preset": self.preset})
        layout = layout_of(model, MeshShape())
        return Setting(model, layout, Widths.of("bf16"), self.sequence_length, 1, self.sequences)

    def seconds(self, cluster: Cluster) -> float | None:
        """Return the seconds of a step, with microbatches and recomputation as it is fastest; None: nothing fits."""
        base, mesh = self.base, self.mesh
        setting = replace(
            base,
            layout=layout_of(base.model, mesh, self.chunks),
            schedule="interleaved" if self.chunks > 1 else "1f1b",
            shard=self.shard,
            context=ContextParallel(mesh.cp, "ring", "auto") if mesh.cp > 1 else base.context,
        )
        found = []
        for micro, recompute in itertools.product((1, 2, 4, 8, 16), get_args(Recompute)):
            microbatches = self.sequences // (micro * mesh.data)
            made = replace(setting, micro_size=micro, microbatches=microbatches, recompute=recompute)
            if made.sequences == self.sequences and max(peaks(made)) <= cluster.room:
                found.append(estimate(made, cluster).total)
        return min(found, default=None)


H100 = Cluster(DEVICES["h100-80"], DEVICES["h100-80"].tflops("bf16"))
_ZOO = "yanring/Megatron-MoE-ModelZoo, runtime_configs/benchmarking/runtime.conf, on more GPUs"
_SEEK = "DeepSeek-V3 (arXiv 2412.19437), section 3.2, with 1F1B for its DualPipe"
_NEXT = "yanring/Megatron-MoE-ModelZoo, best_practice/DeepSeekV3, Et|(tt|)*30mL"
_MOE: Mapping[str, Any] = {"sequence_length": 4096}
PUBLISHED_LAYOUTS = (
    PublishedLayout(_TITAN, "llama-3.1-8b", MeshShape(dp=8), 128, shard="parameters"),
    PublishedLayout(_NVIDIA, "llama-3.1-70b", MeshShape(pp=8, dp=2, tp=4), 128, chunks=5),
    PublishedLayout(_ASYNC, "llama-3.1-70b", MeshShape(dp=32, tp=8), 512, shard="parameters"),
    PublishedLayout(_NVIDIA, "llama-3.1-405b", MeshShape(pp=8, dp=8, cp=2, tp=8), 2048, chunks=8),
    PublishedLayout(_LLAMA, "llama-3.1-405b", MeshShape(pp=16, dp=128, tp=8), 2048, chunks=8),
    PublishedLayout(_ZOO, "mixtral-8x22b", MeshShape(pp=8, ep=4, tp=2), 256, **_MOE),
    PublishedLayout(_SEEK, "deepseek-v3", MeshShape(pp=16, dp=2, ep=64), 15360, **_MOE),
    PublishedLayout(_NEXT, "deepseek-v3", MeshShape(pp=16, dp=2, ep=64), 15360, chunks=2, **_MOE),
)


def show_layouts() -> None:
    rows = []
    for each in PUBLISHED_LAYOUTS:
        start = time.process_time()
        found = fit(each.base, each.mesh.world, H100)[0]
        took, theirs = time.process_time() - start, each.seconds(H100)
        seconds = "does not fit" if theirs is None else f"{theirs:.2f}"
        ours = " ".join(f"{key.split('.')[1]}={value}" for key, value in found.overrides.items() if value != 1)
        rows.append((str(each), seconds, f"{found.time.total:.2f}", ours, f"{took:.0f}"))
    print(table(("published", "s", "found, s", "what", "search, s"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="the layouts, beside those that are found")
    if parser.parse_args().fit:
        show_layouts()
        return
    runs = *PUBLISHED, *HELD_OUT
    sources, planned = list(dict.fromkeys(run.source for run in runs)), [run.planned() for run in runs]
    errors = [tokens / run.tokens - 1 for run, tokens in zip(runs, planned, strict=True)]
    rows = [
        (
            run.name, f"{run.tokens:,.0f}", f"{tokens:,.0f}", f"{error:+.1%}", f"[{sources.index(run.source) + 1}]",
            "fitted" if run in PUBLISHED else "held out",
        )
        for run, tokens, error in zip(runs, planned, errors, strict=True)
    ]  # fmt: skip
    print(table(("run", "published", "planned", "error", "source", "numbers"), rows))
    for what, own in (("fitted", errors[: len(PUBLISHED)]), ("held out", errors[len(PUBLISHED) :])):
        sizes = sorted(map(abs, own))
        above = sum(size > 0.2 for size in sizes)
        print(f"  {what}: median {median(sizes):.1%}, at most {sizes[-1]:.1%}, above 20%: {above} of {len(sizes)}")
    print("\n".join(f"  [{number}] {source}" for number, source in enumerate(sources, 1)))


if __name__ == "__main__":
    main()
