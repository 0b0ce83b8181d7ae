"""Kernels chosen once, where layers are made: by the device, and by what is installed.

    on a GPU, eager      apex's norms where NVIDIA's apex is, else ours in Triton where triton is, else torch's
    on a GPU, compiled   torch's operators, which the compiler fuses with their neighbours
    on a CPU             those of ``cpu`` where they are faster, else torch's; products of bf16 by ``upcast`` where the
                         CPU has no instructions for them

The project ``apex`` on PyPI is a different one (a toolkit for the Pyramid web framework). What counts is the compiled
module that a kernel lives in, so that is what is probed; an impostor is recognised and named.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels import activation, bands, cpu, delta_rule, grouped, indexed, norm, rotation
from megacore.parallel.kernels import documents as within
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.narrow_adamw import NarrowAdamW
from megacore.parallel.kernels.scoring import PLAIN, Scoring
from megacore.parallel.kernels.spans import Spans
from megacore.parallel.kernels.upcast import cpu_has_bf16

_FLASH_3 = "flash_attn_interface"
_LINEAR = {False: "gated_delta_rule", True: "kda"}
"""{whether rows of a state fade each by itself: what flash-linear-attention calls the rule}."""
_COMPILED = {"FusedLayerNorm": "fused_layer_norm_cuda", "FusedRMSNorm": "fused_layer_norm_cuda"}


class ApexImpostor(UserWarning):
    """A package named ``apex`` is installed that is not NVIDIA's."""


@cache
def apex_has(kernel: str) -> bool:
    """Return whether NVIDIA's apex is installed with the compiled module that ``kernel`` needs.

    Nothing is imported to find out: what an impostor would do then is not known.
    """
    package = importlib.util.find_spec("apex")
    if package is None:
        return False
    if importlib.util.find_spec(_COMPILED[kernel]) is not None:
        return True
    if not any((Path(folder) / "normalization").is_dir() for folder in package.submodule_search_locations or ()):
        warnings.warn(
            f"the package 'apex' at {package.origin} is not NVIDIA apex (the one on PyPI is a Pyramid toolkit): "
            "uninstall it and build https://github.com/NVIDIA/apex from source, or ignore this: torch's kernels serve",
            ApexImpostor,
            stacklevel=2,
        )
    return False


def _use_apex(kernel: str, device: torch.device) -> bool:
    return device.type == "cuda" and apex_has(kernel)


def rms_norm(
    device: torch.device, offset: float = 0.0, rows: bool = False
) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return the kernel (x: [..., n], weight: [n], eps) -> [..., n]; all in fp32 (fp64 for fp64).

    Args:
        device: That of the tensors.
        offset: Added to the weight.
        rows: Whether weight is [heads, n] instead, a row for each of the heads of x: [..., heads, n].
    """
    plain = partial(norm.rms_norm, offset=offset)
    if rows:
        return plain
    if not offset and _use_apex("FusedRMSNorm", device):
        apply = importlib.import_module("apex.normalization.fused_layer_norm").fused_rms_norm_affine
        return _unless_compiled(lambda x, weight, eps: apply(x, weight, weight.shape, eps), plain)
    if fused := _fused("norm", device):
        return _unless_compiled(partial(fused.rms_norm, offset=offset), plain, fused.WIDEST)
    return _unless_compiled(partial(cpu.rms_norm, offset=offset), plain) if device.type == "cpu" else plain


def layer_norm(
    device: torch.device, offset: float = 0.0, bias: bool = True, rows: bool = False
) -> Callable[[Tensor, Tensor, Tensor | None, float], Tensor]:
    """Return the kernel (x: [..., n], weight: [n], bias: [n], eps) -> [..., n]; all in fp32 (fp64 for fp64).

    Args:
        device: That of the tensors.
        offset: Added to the weight.
        bias: Whether there is one; None is given in its place.
        rows: That of :func:`rms_norm`.
    """
    plain = partial(norm.layer_norm, offset=offset)
    if rows:
        return plain
    if bias and not offset and _use_apex("FusedLayerNorm", device):
        apply = importlib.import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
        return _unless_compiled(lambda x, weight, bias, eps: apply(x, weight, bias, weight.shape, eps), plain)
    if fused := _fused("norm", device):
        return _unless_compiled(partial(fused.layer_norm, offset=offset), plain, fused.WIDEST)
    return plain


def gated(name: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """gate_up: [..., 2 mlp] -> f(gate) * up: [..., mlp], with f of ``activation.FUNCTIONS``; only the input is kept for
    the backward."""
    plain = partial(activation.gated, name)
    if (fused := _fused("activation", device)) and name in fused.FUNCTIONS:
        return _unless_compiled(partial(fused.gated, name), plain)
    return plain


Split = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""(qkv: [t, (heads + 2 kv) * head], cos, sin: [t, turning/2], heads, kv) -> q [t, heads, head], k and v [t, kv, head].

The first ``turning`` dimensions of a head turn, the others pass.
"""


def split_and_rotate(device: torch.device) -> Split:
    """Return what turns queries and keys by their positions; the three are views of one new buffer."""
    if fused := _fused("rotation", device):
        return _unless_compiled(fused.split_and_apply, rotation.split_and_apply)
    return rotation.split_and_apply


def rotate(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the kernel (x: [t, heads, head], cos, sin: [t, turning/2]) -> x turned, a new tensor: queries or keys by
    themselves, such as come from a norm of their own."""
    if fused := _fused("rotation", device):
        return _unless_compiled(fused.apply, rotation.apply)
    return rotation.apply


def cross_entropy(device: torch.device) -> ModuleType | None:
    """Return the kernels of :class:`parallel.layers.loss.Objective`, :mod:`parallel.kernels.fused.cross_entropy`; None
    where it takes torch's operators."""
    return None if torch.compiler.is_compiling() else _fused("cross_entropy", device)


def cast_transpose(device: torch.device) -> ModuleType | None:
    """Return the kernels that make numbers of :mod:`parallel.layers.fp8`; None where it takes torch's operators."""
    return _fused("cast_transpose", device)


grouped_products = grouped.products
"""What multiplies the rows of experts with their weights: torch's kernel, or a loop."""


def _unless_compiled(
    kernel: Callable[..., Any], formula: Callable[..., Any], widest: int = sys.maxsize
) -> Callable[..., Any]:
    """Return the kernel, of rows that are not too wide; for the compiler torch's formula, which it fuses with
    others."""

    def chosen(x: Tensor, *others: Any) -> Any:
        plain = torch.compiler.is_compiling() or x.shape[-1] > widest
        return formula(x, *others) if plain else kernel(x, *others)

    return chosen


@cache
def has_triton() -> bool:
    """Return whether triton is installed, which torch's builds for CUDA bring along; nothing is imported to find
    out."""
    return importlib.util.find_spec("triton") is not None


@cache
def _triton_serves(device: torch.device) -> bool:
    """Return whether a GPU has Triton's kernels. A small one is tried: Triton compiles parts of itself where it runs,
    and some images have no C compiler."""
    if device.type != "cuda" or not has_triton():
        return False
    try:
        importlib.import_module("megacore.parallel.kernels.fused.launching").try_out(device)
    except Exception as error:  # of a compiler, a driver, a linker
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(f"triton is installed, but fails on {device} ({reason}): torch's operators serve", stacklevel=2)
        return False
    return True


def _fused(name: str, device: torch.device) -> ModuleType | None:
    """Our own kernels in Triton, for a GPU."""
    return importlib.import_module(f"megacore.parallel.kernels.fused.{name}") if _triton_serves(device) else None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """q: [b, heads, s, head], k: [b, kv, s, head], v: [b, kv, s, value] -> [b, heads, s, value]; softmax in fp32 (fp64
    for fp64)."""
    if narrow := q.shape[-1] - v.shape[-1]:
        return causal_attention(q, k, F.pad(v, (0, narrow)), scoring)[..., :-narrow]
    if scoring.chunk is not None:
        b, _, s, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        y = documents_attention(q, k, v, Documents.of((s,) * b, q.device), b, scoring)
        return y.unflatten(0, (b, s)).transpose(1, 2)
    if not scoring.plain:
        return (bands.by_formula if scoring.dropout else bands.attention)(q, k, v, scoring)
    if not scoring.dropout and q.device.type == "cpu" and bands.is_faster(q):
        return bands.causal_attention(q, k, v, scoring.scale)
    return within.scaled_dot_product(q, k, v, scoring)


def documents_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, sequences: int, scoring: Scoring = PLAIN
) -> Tensor:
    """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value] -> [t, heads, value]: causal, each document by itself.

    No document crosses the end of one of the ``sequences`` of equal length.
    """
    if narrow := q.shape[-1] - v.shape[-1]:
        return documents_attention(q, k, F.pad(v, (0, narrow)), documents, sequences, scoring)[..., :-narrow]
    if scoring.chunk is not None:
        documents, scoring = documents.in_chunks(scoring.chunk), replace(scoring, chunk=None)
    if not scoring.plain:
        return within.in_bands(q, k, v, documents, sequences, scoring)
    if not scoring.dropout and q.device.type == "cpu":
        return within.on_cpu(q, k, v, documents, scoring.scale)
    if not scoring.dropout and documents.varlen_takes(q):
        return within.with_varlen(q, k, v, documents, len(q) // sequences, scoring.scale)
    if torch.compiler.is_compiling():
        return within.masked(q, k, v, documents, sequences, scoring)
    return within.one_by_one(q, k, v, documents, scoring)


image_attention = within.both_ways
"""The same, but within an image both ways: by torch's operators, whose kernels without a mask are causal."""

choose_indexed, scores_of_chosen, divergence = indexed.choose, indexed.scores_of_chosen, indexed.divergence
indexed_attention, indexed_weights = indexed.attention, indexed.attention_weights
"""Attention to tokens that an indexer chooses: torch's operators everywhere. DeepGEMM's scores and FlashMLA's sparse
attention are not chosen."""


@cache
def has_flash_linear_attention(rule: str) -> bool:
    """Return whether flash-linear-attention is installed with a rule of this name; nothing is run to find out."""
    return importlib.util.find_spec("fla") is not None and importlib.util.find_spec(f"fla.ops.{rule}") is not None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | delta_rule.Enter | None, spans: Spans
) -> tuple[Tensor, Tensor]:
    """Do as :func:`parallel.kernels.delta_rule.delta_rule`: by flash-linear-attention for two bytes on a GPU, where it
    is installed and no state comes from other ranks, else by torch's operators."""
    rule, narrow = _LINEAR[g.dim() > beta.dim()], q.device.type == "cuda" and q.dtype.itemsize == 2
    if callable(initial) or not narrow or not has_flash_linear_attention(rule):
        return delta_rule.delta_rule(q, k, v, g, beta, initial, spans)
    apply = getattr(importlib.import_module(f"fla.ops.{rule}"), f"chunk_{rule}")
    each = v.shape[2]
    q, k = (x.repeat_interleave(each, 1)[None] for x in (q, k))
    v, g, beta = (x.flatten(1, 2)[None] for x in (v, g, beta))
    initial = None if initial is None else initial.flatten(1, 2)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": spans.starts}
    y, last = apply(q, k, v, g, beta, initial_state=initial, **named)
    return y[0].unflatten(1, (-1, each)), last.unflatten(1, (-1, each))


def take_flash_attention(device: torch.device, dropout: bool) -> None:
    """Have torch use FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) in all of this process, where it is there.

    It has a package of its own, is for Hopper GPUs and knows no dropout. Else there is torch's FlashAttention-2: torch
    2.13 lets cuDNN's attention see no documents.

    Args:
        device: This process's.
        dropout: Whether some attention weights will be dropped.
    """
    if device.type != "cuda" or dropout or importlib.util.find_spec(_FLASH_3) is None:
        return
    if torch.cuda.get_device_capability(device)[0] == 9:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, RuntimeError) as error:
            warnings.warn(f"{_FLASH_3} is installed, but fails ({error}): FlashAttention-2 serves", stacklevel=2)


def chosen(device: torch.device, compiled: bool, dtype: torch.dtype) -> str:
    """Return what was chosen for a GPU, in a line; of a CPU nothing, but where products of ``dtype`` are upcast.

    Args:
        compiled: Whether blocks are compiled.
        dtype: That of weights and activations.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and not cpu_has_bf16():
        return "Kernels: products of bf16 are multiplied in fp32, as this CPU has no instructions for bf16"
    if device.type != "cuda":
        return ""
    attention = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() or "FA2"
    fused = "Triton" if _triton_serves(device) else "torch"
    norms = "apex" if apex_has("FusedRMSNorm") else fused
    others = f"norms by {norms}, the other fused ones by {fused}"
    if compiled:
        others = f"blocks by torch's compiler, loss by {fused}"
    return f"Kernels: attention by {attention}, {others}"


def adamw(
    groups: Iterable[dict[str, Any]],
    device: torch.device,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    moments: torch.dtype | None = None,
) -> torch.optim.AdamW:
    """AdamW over parameter groups, in one fused kernel for each dtype.

    Its moments are there from the start, as ``state[parameter]["exp_avg"]`` and ``["exp_avg_sq"]``. They have the dtype
    of the parameters, or that of ``moments``, for which no library has a kernel. It is never apex's: there the host
    says whether it steps, and so would wait for the norm.
    """
    groups = list(groups)
    if moments is not None and any(p.dtype != moments for group in groups for p in group["params"]):
        optimizer: torch.optim.AdamW = NarrowAdamW(groups, lr=lr, betas=betas, eps=eps)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dtype = moments or parameter.dtype
            state = {moment: torch.zeros_like(parameter, dtype=dtype) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = state | {"step": torch.zeros((), dtype=torch.float32, device=device)}
    return optimizer


def updates(optimizer: torch.optim.AdamW) -> int:
    """Return the steps that :func:`adamw`'s optimizer has taken, without those left out; reading it waits for the
    device."""
    return int(step_of(optimizer))


def step_of(optimizer: torch.optim.AdamW) -> Tensor:
    """Return the same number, a scalar on the device that nobody waits for."""
    return next(iter(optimizer.state.values()))["step"]


def set_updates(optimizer: torch.optim.AdamW, count: int) -> None:
    """Say how many steps were taken: what the correction of the moments' bias goes by."""
    for state in optimizer.state.values():
        state["step"].fill_(count)


def step_if(optimizer: torch.optim.AdamW, go: Tensor, divisor: Tensor | None = None) -> None:
    """Take the optimizer's step where ``go`` (a bool scalar on its device) is true; the host is not asked.

    The update divides gradients by ``divisor`` (an fp32 scalar; None for 1) where it reads them, and leaves them so.
    """
    optimizer.found_inf = (~go).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.step()
