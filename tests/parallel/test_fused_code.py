"""Triton's kernels as code for an H100: each is compiled as it is launched at shapes of an 8B model and of others."""

import multiprocessing
import os
import re
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import TIMEOUT_S
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

BF16 = torch.bfloat16
NAMES = {BF16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
NAMES |= {torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8"}
NARROW = {9: "e4m3x2", 16: "e5m2x2"}
"""{power of two above the largest number of fp8: the instruction that rounds to that fp8}."""


@dataclass(frozen=True)
class Sizes:
    """What kernels are launched for. The vocabulary is that of ``ranks``."""

    tokens: int
    widths: tuple[int, ...]
    mlp: int
    heads: int
    kv: int
    head: int
    vocab: int
    ranks: int = 1


LARGE = Sizes(8192, (128, 4096, 8192), 14336, 32, 8, 128, 128256)
# Triton makes a constant of a 1, and then other code.
SMALL = Sizes(1, (1, 7), 1, 1, 1, 2, 9, 3)


def launched(sizes: Sizes) -> list[Any]:
    """What is launched, (kernel, programs, arguments) and constants; nothing runs."""
    from megacore.parallel.kernels.fused import activation, cast_transpose, cross_entropy, launching, norm, rotation

    seen: list[Any] = []
    tokens, vocab = sizes.tokens, sizes.vocab

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=BF16, device="meta", requires_grad=True)

    def run(made: Tensor | tuple[Tensor, ...]) -> None:
        outputs = made if isinstance(made, tuple) else (made,)
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])

    with patch.object(launching, "launch", lambda *arguments, **constants: seen.append((arguments, constants))):
        for width in sizes.widths:
            run(norm.rms_norm(empty(tokens, width), empty(width), 1e-5))
            run(norm.layer_norm(empty(tokens, width), empty(width), empty(width), 1e-5))
        width = sizes.widths[-1]
        run(norm.rms_norm(empty(tokens, width), empty(width), 1e-5, 1.0))
        run(norm.layer_norm(empty(tokens, width), empty(width), None, 1e-5, 1.0))
        for name in activation.FUNCTIONS:
            run(activation.gated(name, empty(tokens, 2 * sizes.mlp)))
        for exponent, narrow in zip(NARROW, (torch.float8_e4m3fn, torch.float8_e5m2), strict=True):
            x = empty(tokens, sizes.widths[-1]).detach()
            cast_transpose.cast(x, cast_transpose.largest([x])[0], narrow, exponent, True, True)
        cast_transpose.turn(x.to(torch.float8_e4m3fn))
        stacked, largest = empty(3, *x.shape[1:], 48).detach(), torch.empty(3, device="meta")
        cast_transpose.cast(stacked, largest, torch.float8_e4m3fn, 9, True, True, width=max(stacked.shape[1:]))
        part, each = x.flatten(), x.numel() // 2
        cast_transpose.cast_slice(part, each // 2, each, largest, 9, part.to(torch.float8_e4m3fn))
        cast_transpose.units(largest, 9, 48)
        cast_transpose.cast_rows(x, None, torch.float8_e4m3fn, 9)
        table, heads = empty(tokens, sizes.head // 2).detach(), (sizes.heads, sizes.kv)
        run(rotation.split_and_apply(empty(tokens, (heads[0] + 2 * heads[1]) * sizes.head), table, table, *heads))
        run(rotation.apply(empty(tokens, sizes.heads, 3 * sizes.head), table, table))  # a third turns
        logits = empty(tokens, columns := vocab // sizes.ranks).detach()
        labels = torch.empty(tokens, dtype=torch.int64, device="meta")
        for extras, bend in (((0.0, 0.0), (1.0, None)), ((0.1, 1e-4), (1 / 16, 30.0))):
            found = cross_entropy.statistics(logits, labels, 0, columns, extras[0] > 0, *bend)
            everything = found.expand(sizes.ranks, *found.shape)
            loss, log_sum = cross_entropy.finish(everything, labels, columns, vocab, *extras)
            cross_entropy.gradient_(logits, labels, log_sum, loss, 0, columns, vocab, *extras, *bend)
    return seen


def compiled(folder: str, sizes: Sizes) -> dict[str, tuple[str, str]]:
    """{kernel and its constants: (PTX, what its machine code takes of registers and memory)}."""
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import ASTSource

    found = {}
    dump = Path(compiler.__file__).parent / "bin" / "cuobjdump"
    for (kernel, _, *arguments), constants in launched(sizes):
        signature: dict[str, str] = {}
        fixed: dict[str, Any] = {}
        hints: dict[tuple[int], list[list[Any]]] = {}
        options: dict[str, Any] = {}
        for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
            if isinstance(value, Tensor):
                signature[name], hints[(place,)] = NAMES[value.dtype], [["tt.divisibility", 16]]
            elif value is None or value == 1:
                signature[name], fixed[name] = "constexpr", value
            else:
                signature[name] = "i32"
                hints |= {(place,): [["tt.divisibility", 16]]} if value % 16 == 0 else {}
        for name, value in constants.items():
            if name in kernel.arg_names:
                signature[name], fixed[name] = "constexpr", value
            else:
                options[name] = value
        made = build(ASTSource(kernel, signature, fixed, hints), target=GPUTarget("cuda", 90, 32), options=options)
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        uses = subprocess.run([dump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
        found[f"{kernel.fn.__name__} {constants}"] = made.asm["ptx"], uses
    return found


def _serve(answers: Connection, folder: str) -> None:
    answers.send([compiled(folder, sizes) for sizes in (LARGE, SMALL)])


@pytest.mark.in_turn(6, 1)
def test_each_is_good_code_for_an_h100(tmp_path: Path) -> None:
    """No register is spilled, large tensors are read and written 16 bytes at a time, the hardware rounds to fp8, and
    nothing is added up in the order in which programs happen to run."""
    context = multiprocessing.get_context("spawn")  # what is forked has triton's interpreter, by torch's compiler
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"no answer in {TIMEOUT_S} s"
        large, small = ours.recv()
    finally:
        process.kill()
        process.join()
    for found in (large, small):
        assert len({name.partition(" ")[0] for name in found}) == 15
        for name, (ptx, uses) in found.items():
            # Of sides that are no multiples of 16 there is no product in fp8: that they are cast will do.
            odd = found is small and name.startswith("fp8_cast")
            assert odd or re.search(r"STACK:0 .*LOCAL:0 ", uses), f"{name} spills: {uses}"
            # A maximum is the same in whatever order it is taken.
            assert name.startswith("fp8_largest") or not re.search(r"\b(atom|red)\.", ptx), name
    for name, (ptx, _) in large.items():
        assert ".v4" in ptx or name.startswith(("norm_sum", "cross_entropy_finish")), f"{name} moves few bytes"
    casts = {name: ptx for name, (ptx, _) in large.items() if name.startswith("fp8_cast")}
    assert len(casts) == len(NARROW) + 2
    for name, ptx in casts.items():
        instruction = next(each for exponent, each in NARROW.items() if f"'LARGEST': {exponent}," in name)
        assert f"cvt.rn.satfinite.{instruction}.f32" in ptx
        # Of rows with scales of their own, and of slices, neighbours are a thread's; no transposed copy is made.
        stores = len(re.findall(r"st\.global\.v[24]", ptx))
        assert "ld.global.v4" in ptx and stores >= (1 if name.startswith(("fp8_cast_rows", "fp8_cast_slice")) else 2)
