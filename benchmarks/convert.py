"""Converting, resharding and exporting a checkpoint, beside a copy of its bytes and what others need for it.

    python benchmarks/convert.py [--size 2] [--rounds 5] [--states cold ...] [--folder DIR] [--json results.json]
    python benchmarks/convert.py --experts 128 [--expert-mlp 768]  # Mixtral, each expert three tensors of its own
    python benchmarks/convert.py --setup                         # makes the environments of the peers, with pip

The checkpoint has the shape of TinyLlama 1.1B in bf16, with the layers that the size asks for, in five files. All runs
are processes of their own, start-up included, and take turns. Each of our commands has a copy (`cp -r`) of what it
reads beside it, in the same state. Cold: put out of the page cache before each of the two. Warm: read once before each,
and memory for what is written taken and given back, so that the machine has it ready. Chained: as the command before
has left it; the copies come after the chain, cold, for what we write goes around the cache. A copy is synced file by
file, for what we write is on the disk too; what the others write is not, and they run warm.

Memory is that of all processes of a run together, without the cache of files; it is measured again for a checkpoint of
twice the size. In the end the exported tensors are compared with the source's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import environments, results
from benchmarks.processes import Usage, run
from megacore.models.registry import configure
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.tensor_files.tensors import TensorWriter
from megacore.store.weight_folders.hugging_face import HuggingFace

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
FILES = 5
LITGPT = "tiny-llama-1.1b"
COLD, WARM, CHAINED = "cold", "warm", "chained"
COPY, CONVERT, RESHARD, EXPORT = "copy and sync beside", "convert to", "reshard to", "export"
DENSE_MESHES, EXPERT_MESHES = ("tp=2 x pp=2", "tp=4 x pp=1"), ("ep=2 x pp=2", "ep=2 x tp=2 x etp=2")
"""The meshes that are converted to and resharded to."""
TRANSFORMERS = "transformers: load and save"

# The bars.
SLOWER_THAN_COPY, FASTER_THAN_TRANSFORMERS, PEAK_BYTES, GROWTH = 1.3, 5.0, 300e6, 1.1

LOAD_AND_SAVE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2], max_shard_size="500MB")
"""
CONVERT_TO_LITGPT = """
import sys
from pathlib import Path
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
source, target = map(Path, sys.argv[1:3])
target.mkdir()
for path in source.iterdir():  # it writes beside what it reads
    (target / path.name).symlink_to(path)
convert_hf_checkpoint(target, model_name=sys.argv[3])
"""


# -- the checkpoint


def config(size: int, experts: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A config.json whose bf16 weights have at least ``size`` bytes; below 1 GiB it is an eighth as wide, for tests.

    Args:
        size: Bytes of the weights.
        experts: Mixtral's fields of its experts; None: a LLaMA.
    """
    narrower = 1 if size >= GIB else 8
    hidden, mlp, vocab = 2048 // narrower, 5632 // narrower, 32000 // narrower
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32 // narrower,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    if experts:
        raw |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, **experts}
    one, two = (sum(map(_bytes, _tensors({**raw, "num_hidden_layers": n}))) for n in (1, 2))
    return {**raw, "num_hidden_layers": max(2, 1 - (one - size) // (two - one))}


def make_checkpoint(folder: Path, size: int, experts: Mapping[str, int] | None = None) -> int:
    """Write a Hugging Face folder of random weights -> the number of tensors."""
    folder.mkdir(parents=True)
    raw = config(size, experts)
    tensors = _tensors(raw)
    total = sum(map(_bytes, tensors))
    files: list[list[Stored]] = [[] for _ in range(FILES)]
    before = 0
    for stored in tensors:
        files[before * FILES // total].append(stored)
        before += _bytes(stored)
    random = np.random.default_rng(0)
    names = [f"model-{i + 1:05d}-of-{FILES:05d}.safetensors" for i in range(FILES)]
    for name, held in zip(names, files, strict=True):
        declared = [(stored.name, "BF16", stored.shape) for stored in held]
        with TensorWriter.create(folder / name, declared, {"format": "pt"}) as writer:
            for stored in held:
                values = random.standard_normal(stored.shape, dtype=np.float32) * np.float32(0.02)
                bits = (values.view(np.uint32) >> 16).astype(np.uint16)
                writer.put(bits.reshape(-1).view(np.uint8), writer.offset(stored.name, 0))
    where = {stored.name: name for name, held in zip(names, files, strict=True) for stored in held}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(tensors)


def _tensors(raw: Mapping[str, Any]) -> list[Stored]:
    return list(hugging_face(configure({"family": raw["model_type"], **raw}).schema))


def _bytes(stored: Stored) -> int:
    return 2 * int(np.prod(stored.shape))


def read_once(folder: Path) -> None:
    """So that its files are in the cache."""
    buffer = bytearray(4 << 20)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def put_out(folder: Path) -> None:
    """So that its files are not in the cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())  # what is not on the disk yet stays
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(size: int) -> None:
    """Take so much memory and give it back, so that a virtual machine's host has it ready.

    On hosts that take back what is free, the first touch of a page costs more than all else that is measured here, and
    fell on whoever came first.
    """
    with mmap.mmap(-1, size) as memory:
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def differing(source: Path, export: Path) -> list[str]:
    """Names of the tensors that are not the same in both folders, bit for bit."""
    folders = [HuggingFace.open(path) for path in (source, export)]
    found = [{stored.name: stored for stored in folder.stored()} for folder in folders]
    common = found[0].keys() & found[1].keys()
    wrong = [name for name in common if not _same(*(f.read()(s[name]) for f, s in zip(folders, found, strict=True)))]
    return sorted(wrong) + sorted(found[0].keys() ^ found[1].keys())


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def _same(ours: tuple[str, np.ndarray], theirs: tuple[str, np.ndarray]) -> bool:
    return ours[0] == theirs[0] and np.array_equal(ours[1], theirs[1])


# -- what is run


@dataclass(frozen=True)
class Program:
    """What it is, the folders that it reads and makes, the command that does it, and the state of what it reads."""

    name: str
    reads: Path
    makes: Path
    command: tuple[str, ...]
    state: str = WARM

    def prepare(self) -> None:
        shutil.rmtree(self.makes, ignore_errors=True)
        os.sync()  # what others have left to write
        if self.state == COLD:
            put_out(self.reads)
        elif self.state == WARM:
            read_once(self.reads)
            touch(_bytes_in(self.reads) * 3 // 2)


def ours(folder: Path, state: str = WARM, meshes: Sequence[str] = DENSE_MESHES) -> list[Program]:
    """From the checkpoint ``source`` in the folder, over both meshes; each reads what the one before has made."""
    source, made, resharded, exported = (folder / name for name in ("source", "made", "resharded", "exported"))
    one, other = ([word for size in mesh.split(" x ") for word in f"--{size}".split("=")] for mesh in meshes)
    convert, reshard = ((sys.executable, "-m", "megacore", tool) for tool in ("convert", "reshard"))
    # The first of a chain reads what lay there before.
    first = COLD if state == CHAINED else state
    named = [f"{name}, {state}" for name in (f"{CONVERT} {meshes[0]}", f"{RESHARD} {meshes[1]}", EXPORT)]
    return [
        Program(named[0], source, made, (*convert, str(source), str(made), *one), first),
        Program(named[1], made, resharded, (*reshard, str(made), str(resharded), *other), state),
        Program(named[2], resharded, exported, (*convert, str(resharded), str(exported), "--to", "hf"), state),
    ]


def copy(program: Program) -> Program:
    """A copy of what a program reads, in the same state; what has just been written around the cache is cold."""
    target = program.makes.with_name("copy")
    script = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
    command = ("bash", "-c", script, str(program.reads), str(target))
    return Program(f"{COPY} {program.name}", program.reads, target, command, WARM if program.state == WARM else COLD)


def in_turns(folder: Path, state: str, meshes: Sequence[str] = DENSE_MESHES) -> list[Program]:
    """Ours and their copies; of a chain the copies come after it, for they would warm what it reads."""
    programs = ours(folder, state, meshes)
    if state == CHAINED:
        return [*programs, *map(copy, programs)]
    return [step for program in programs for step in (copy(program), program)]


def peers(folder: Path, pythons: Mapping[str, Path]) -> Iterator[Program]:
    """Those that are installed; each that is not is named."""
    print("skipped: Megatron-Bridge: it imports transformer_engine, which is built for CUDA")
    source, target = folder / "source", folder / "peer"
    here = str(source), str(target)
    yield Program(TRANSFORMERS, source, target, (str(pythons["hf"]), "-c", LOAD_AND_SAVE, *here))
    if "litgpt" in pythons:
        command = (str(pythons["litgpt"]), "-c", CONVERT_TO_LITGPT, *here, LITGPT)
        yield Program("litgpt: convert", source, target, command)
    else:
        print("skipped: litgpt: no environment (--setup makes it, --python litgpt=PATH names it)")


# -- measuring


@dataclass
class Row:
    """The runs of one program."""

    name: str
    runs: list[Usage] = field(default_factory=list)
    failure: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(usage.seconds for usage in self.runs)

    @property
    def peak(self) -> int:
        return max(usage.peak for usage in self.runs)


def measure(programs: Sequence[Program], rounds: int) -> dict[str, Row]:
    """Rounds of all programs in turn; what the last round has written stays."""
    rows = {program.name: Row(program.name) for program in programs}
    for turn in range(rounds):
        for program in programs:
            row = rows[program.name]
            if row.failure:
                continue
            program.prepare()
            load = os.getloadavg()[0]
            try:
                usage = run(program.command, ROOT)
            except RuntimeError as error:
                row.failure = str(error)
                print(f"  round {turn + 1}: {program.name} failed: {row.failure}", flush=True)
                continue
            row.runs.append(usage)
            print(
                f"  round {turn + 1}: {program.name:58s} {usage.seconds:6.2f} s, user {usage.user:5.2f}, "
                f"system {usage.system:5.2f}, {usage.peak / 1e6:7.1f} MB   (load before: {load:.1f})",
                flush=True,
            )
    return rows


def of_copy(rows: Mapping[str, Row], name: str) -> float | None:
    """The time of a program over that of the copy of what it read, in the same state."""
    beside = rows.get(f"{COPY} {name}")
    return rows[name].seconds / beside.seconds if beside and beside.runs else None


def table(rows: Mapping[str, Row], doubled: Mapping[str, Row]) -> str:
    shown = []
    for row in rows.values():
        if not row.runs:
            continue
        seconds = [usage.seconds for usage in row.runs]
        cpu = statistics.median(usage.user + usage.system for usage in row.runs)
        ratio = f"{found:.2f}" if (found := of_copy(rows, row.name)) else ""
        twice = f"{doubled[row.name].peak / 1e6:,.0f}" if row.name in doubled and doubled[row.name].runs else ""
        spread, peak = f"{min(seconds):.2f} .. {max(seconds):.2f}", f"{row.peak / 1e6:,.0f}"
        shown.append((row.name, f"{row.seconds:.2f}", spread, ratio, f"{cpu:.1f}", peak, twice))
    head = ("", "s:", "min .. max:", "x copy:", "CPU s:", "peak MB:", "peak MB, twice the size:")
    return results.table(head, shown)


def judged(rows: Mapping[str, Row], doubled: Mapping[str, Row]) -> str:
    """One line for each bar."""
    lines = []

    def bar(what: str, met: bool) -> None:
        lines.append(f"- {'met' if met else 'MISSED'}: {what}")

    for name, row in rows.items():
        if not name.startswith((CONVERT, RESHARD, EXPORT)):
            continue
        if not row.runs:
            bar(f"{name} failed", False)
            continue
        if ratio := of_copy(rows, name):
            bar(f"{name} takes {ratio:.2f}x the time of the copy (bar: {SLOWER_THAN_COPY}x)", ratio <= SLOWER_THAN_COPY)
        if name.endswith(WARM) and TRANSFORMERS in rows and rows[TRANSFORMERS].runs:
            ratio = rows[TRANSFORMERS].seconds / row.seconds
            what = f"{name} is {ratio:.1f}x as fast as transformers (bar: {FASTER_THAN_TRANSFORMERS}x)"
            bar(what, ratio >= FASTER_THAN_TRANSFORMERS)
        bar(f"{name} peaks at {row.peak / 1e6:.0f} MB (bar: {PEAK_BYTES / 1e6:.0f} MB)", row.peak <= PEAK_BYTES)
        if name in doubled and doubled[name].runs:
            growth = doubled[name].peak / row.peak
            bar(f"{name} peaks at {growth:.2f}x of that for twice the size (bar: {GROWTH}x)", growth <= GROWTH)
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = results.parser(__doc__)
    parser.add_argument("--size", type=float, default=2.0, metavar="GIB", help="of the checkpoint (2)")
    parser.add_argument("--experts", type=int, metavar="N", help="of each layer, if it is to have some")
    parser.add_argument("--expert-mlp", type=int, default=768, metavar="N", help="hidden features of an expert (768)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all programs (5)")
    states = (COLD, WARM, CHAINED)
    parser.add_argument("--states", nargs="+", choices=states, default=states, help="of what is read (all)")
    parser.add_argument("--folder", type=Path, help="where there is room for eight times the size (/tmp)")
    parser.add_argument("--no-peers", action="store_true", help="only the copy and this project")
    parser.add_argument("--no-double", action="store_true", help="leave out the memory for twice the size")
    environments.add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every bar is met and the export is the source bit for bit."""
    arguments = parse(argv)
    pythons = environments.ready(arguments)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=arguments.folder) as scratch:
        once, twice = Path(scratch, "once"), Path(scratch, "twice")
        size, experts, meshes = int(arguments.size * GIB), None, DENSE_MESHES
        if arguments.experts:
            experts = {"num_local_experts": arguments.experts, "intermediate_size": arguments.expert_mlp}
            meshes = EXPERT_MESHES
        tensors = make_checkpoint(once / "source", size, experts)
        weights = _bytes_in(once / "source")
        print(f"{weights / GIB:.2f} GiB, {tensors:,} tensors in {FILES} files, {os.cpu_count()} cores", flush=True)
        turns = [step for state in arguments.states for step in in_turns(once, state, meshes)]
        rows = measure([*turns, *([] if arguments.no_peers else peers(once, pythons))], arguments.rounds)
        wrong = differing(once / "source", once / "exported")
        shutil.rmtree(once)
        doubled: dict[str, Row] = {}
        if not arguments.no_double:
            make_checkpoint(twice / "source", 2 * size, experts)
            doubled = measure(ours(twice, meshes=meshes), rounds=1)
    bars = judged(rows, doubled)
    print(f"\n{table(rows, doubled)}\n\n{bars}")
    print(f"- {'MISSED' if wrong else 'met'}: the export is the source, bit for bit {', '.join(wrong[:5])}")
    report = {name: [asdict(usage) for usage in row.runs] for name, row in rows.items()}
    results.write({"bytes": weights, "rows": report}, arguments.json)
    return int("MISSED" in bars or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
