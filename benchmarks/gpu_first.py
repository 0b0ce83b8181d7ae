"""The first minutes with a GPU: whether our numbers are right there, and how fast they come, beside what was expected.

    python benchmarks/gpu_first.py --call 1                      # of five, at most ten minutes each
    python benchmarks/gpu_first.py --sections ceilings waits     # some sections
    python benchmarks/gpu_first.py --list                        # all of them, and their limits
    python benchmarks/gpu_first.py --show FOLDER ...             # the table of what was found
    python benchmarks/gpu_first.py --tiny --device cpu           # that everything runs

Each section is a process of its own with a limit, and writes what it finds to ``rows.jsonl`` in the folder of --out as
it finds it: what one cannot do, the others still do. It needs this repository, torch, numpy and einops; sections that
need more (pydantic for a pretraining run, transformers and litgpt as peers) say that they were skipped.
Expected numbers are from data sheets and ``megacore plan``'s arithmetic; a table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu.calibration import calibration
from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.correctness import correctness, repeats, sanitizer, waits
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.pretraining import pretraining
from benchmarks.gpu.profile import profile
from benchmarks.gpu.rows import Machine, Row, failed, read, table, write
from benchmarks.gpu.speed import speed

CALL_S = 600
"""Of a call, at most."""
ROWS, LOG = "rows.jsonl", "log.txt"
"""Files of what was found, and of all that was printed."""


@dataclass(frozen=True)
class Section:
    """Some rows.

    Args:
        call: In which call it runs.
        limit: Seconds that its process has.
        rows: Finds them.
    """

    call: int
    limit: int
    rows: Callable[[Machine], Iterator[Row]]


def _speed(call: int, shape: str, limits: Mapping[str, int]) -> dict[str, Section]:
    return {
        f"{shape}: {mode}": Section(call, limit, partial(speed, name=shape, mode=mode))
        for mode, limit in limits.items()
    }


OURS = {
    "ours": 35,
    "ours, compiled": 60,
    "ours, compiled, masters": 55,
    "ours, compiled, fp8": 75,
    "ours, selective": 30,
    "ours, activations on host": 40,
}
FURTHER = {"ours, loss chunks": 30, "ours, full": 30}
PEERS = {
    "like torchtitan, compiled": 65,
    "Hugging Face": 40,
    "Hugging Face, compiled": 80,
    "litgpt": 30,
    "litgpt, compiled": 50,
}
SECTIONS: Mapping[str, Section] = {
    "correctness": Section(1, 150, correctness),
    "waits": Section(1, 90, waits),
    "repeats": Section(1, 60, repeats),
    "kernels": Section(1, 60, kernels),
    "sanitizer": Section(1, 90, sanitizer),
    "calibration": Section(2, 120, calibration),
    "ceilings": Section(2, 60, ceilings),
    "profile 1b": Section(2, 50, partial(profile, name="1b")),
    "profile 8b": Section(2, 50, partial(profile, name="8b")),
    "pretraining": Section(2, 300, pretraining),
    **_speed(3, "1b", OURS),
    **_speed(3, "8b", OURS),
    # With more minutes: beside the peers.
    **_speed(4, "1b", PEERS | FURTHER),
    **_speed(5, "8b", PEERS | FURTHER),
}


def run(name: str, machine: Machine, out: Path) -> None:
    """A section in this process; it may be killed at any time."""
    with (out / ROWS).open("a") as file:
        try:
            for row in SECTIONS[name].rows(machine):
                file.write(write(name, row))
                file.flush()
        except Exception as error:
            file.write(write(name, failed(name, error)))
            raise


def in_a_process(name: str, limit: float, arguments: argparse.Namespace) -> None:
    """A section in a process of its own; there is a row that says so where that does not end well."""
    out: Path = arguments.out
    forget(out, name)
    command = [sys.executable, __file__, "--run", name, "--device", arguments.device, "--out", str(out)]
    command += ["--tiny"] * arguments.tiny
    start = time.monotonic()
    with (out / LOG).open("a") as log:
        log.write(f"-- {name}\n")
        log.flush()
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(limit)
            wrong = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            wrong = f"it took longer than {limit} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            process.wait()
    rows = read(out / ROWS).get(name, [])
    if wrong and not any(row.good is False for row in rows):
        with (out / ROWS).open("a") as file:
            file.write(write(name, Row(name, good=False, note=f"{wrong}: see {LOG}")))
    print(f"{name}: {time.monotonic() - start:.0f} of {limit} s", flush=True)


def forget(out: Path, name: str) -> None:
    """What a section has found before."""
    others = [write(section, row) for section, rows in read(out / ROWS).items() if section != name for row in rows]
    (out / ROWS).write_text("".join(others))


def show(folders: Sequence[Path]) -> str:
    """The table of what was found, and what of it is bad."""
    rows = [row for folder in folders for found in read(folder / ROWS).values() for row in found]
    bad = [row for row in rows if row.good is False]
    return f"{table(rows)}\n\n{len(bad)} of {len(rows)} rows are bad" + (f":\n{table(bad)}" if bad else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--call", type=int, choices=range(1, 6), help="the sections of one call")
    chosen.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="SECTION")
    chosen.add_argument("--list", action="store_true")
    chosen.add_argument("--show", nargs="+", type=Path, metavar="FOLDER", help="what was found, as a table")
    chosen.add_argument("--run", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="everything as small as it can be")
    parser.add_argument("--out", type=Path, default=Path("gpu_first"), help="a folder (%(default)s)")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"call {each.call}, {each.limit:4} s: {name}" for name, each in SECTIONS.items()))
        return
    if arguments.show:
        print(show(arguments.show))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "there is no GPU; --tiny --device cpu shows that everything runs\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.run:
        run(arguments.run, Machine.of(arguments.device, arguments.tiny, arguments.out), arguments.out)
        return
    names = arguments.sections or [name for name, each in SECTIONS.items() if arguments.call in (None, each.call)]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    print(f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    for name in names:
        in_a_process(name, SECTIONS[name].limit, arguments)
    print(show([arguments.out]))


if __name__ == "__main__":
    main()
