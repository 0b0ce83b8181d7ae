"""Triton's kernels that make fp8 numbers, as code for an H100; in a process of its own, without the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from pool import TIMEOUT_S, forkserver

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

NARROW = {"fp8e4nv": "e4m3x2", "fp8e5": "e5m2x2"}
"""{type: as the instruction that rounds to it is called}."""


def compiled(folder: str) -> dict[str, tuple[str, str]]:
    """{kernel: (PTX, what its machine code takes of registers and memory)}, of sizes that are multiples of 16."""
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import ASTSource

    from parallel.kernels.fused import cast_transpose as kernels

    cast = {"LARGEST": 9, "STRAIGHT": True, "TURNED": True, "TILE": kernels._TILE}
    cases = [("largest", kernels.fp8_largest, {"BLOCK": kernels._BLOCK, "BLOCKS": kernels._BLOCKS})]
    cases += [(name, kernels.fp8_cast, cast) for name in NARROW]
    dump, cubin, found = Path(compiler.__file__).parent / "bin" / "cuobjdump", Path(folder) / "kernel.cubin", {}
    for case, kernel, constants in cases:
        types = {"x": "*bf16", "bits": "*i32", "unit": "*i32", "values": f"*{case}", "turned": f"*{case}"}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        sixteen = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if name not in constants and name != "bits"
        }
        source = ASTSource(kernel, signature, constants, sixteen)
        made = build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
        cubin.write_bytes(made.asm["cubin"])
        uses = subprocess.run([dump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
        found[case] = made.asm["ptx"], uses
    return found


def _serve(answers: Connection, folder: str) -> None:
    answers.send(compiled(folder))


def test_it_is_good_code_for_an_h100(tmp_path: Path) -> None:
    """The hardware rounds to nearest, no register is spilled, and memory is read and written 16 bytes at a time."""
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"no answer in {TIMEOUT_S} s"
        found = ours.recv()
    finally:
        process.kill()
        process.join()
    for name, (ptx, uses) in found.items():
        assert re.search(r"STACK:0 .*LOCAL:0 ", uses), f"{name} spills: {uses}"
        assert "ld.global.v4" in ptx, name
    for name, instruction in NARROW.items():
        ptx = found[name][0]
        assert f"cvt.rn.satfinite.{instruction}.f32" in ptx
        assert len(re.findall(r"st\.global\.v4", ptx)) >= 2
