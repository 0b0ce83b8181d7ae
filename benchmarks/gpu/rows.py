"""What the sections of ``gpu_first.py`` have in common: the machine, the clock, and a row of what was found."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megacore.devices import CPU_TFLOPS, DEVICES, SMALL_CPU, Device
from megacore.hardware import claim
from megacore.parallel.enum_errors import Precision
from megacore.planning.step_time import Cluster


@dataclass(frozen=True)
class Row:
    """Something that was measured, and what was expected of it.

    Args:
        what: Of the thing.
        measured: The number; None where there is none.
        expected: The number that was predicted, by ``megacore plan``'s arithmetic where it has one; None for none.
        unit: Of both. Of ``relative error`` the expected number is a bound.
        good: Whether it is as it must be; None where nothing must.
        note: Anything else, such as why it was skipped.
    """

    what: str
    measured: float | None = None
    expected: float | None = None
    unit: str = ""
    good: bool | None = None
    note: str = ""


def skipped(what: str, why: object) -> Row:
    return Row(what, note=f"skipped: {_line(why)}")


def failed(what: str, error: BaseException) -> Row:
    return Row(what, good=False, note=f"{type(error).__name__}: {_line(error)}")


def _line(text: object) -> str:
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason was given"


def write(section: str, row: Row) -> str:
    return json.dumps({"section": section, **asdict(row)}) + "\n"


def read(file: Path) -> dict[str, list[Row]]:
    """{section: the rows that it has written, however it ended}."""
    found: dict[str, list[Row]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        fields = json.loads(line)
        found.setdefault(fields.pop("section"), []).append(Row(**fields))
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows under each other."""
    lines = []
    for row in rows:
        verdict = {True: "ok", False: "BAD", None: ""}[row.good]
        ratio = f"{row.measured / row.expected:8.2f}x" if row.measured is not None and row.expected else " " * 9
        numbers = f"{_number(row.measured)} {_number(row.expected)} {ratio}"
        lines.append(f"  {row.what:46} {numbers} {row.unit:16} {verdict:3} {row.note}".rstrip())
    return "\n".join([f"  {'':46} {'measured':>12} {'expected':>12}", *lines])


def _number(value: float | None) -> str:
    if value is None:
        return " " * 12
    return f"{value:12,.3f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:12.2e}"


@dataclass(frozen=True)
class Machine:
    """What is measured on, and how much of it.

    Args:
        device: Of this process.
        tiny: Whether everything is as small as it can be, to see that it runs.
        known: What its data sheet says.
        out: The folder of what is found.
    """

    device: torch.device
    tiny: bool
    known: Device
    out: Path

    @classmethod
    def of(cls, kind: str, tiny: bool, out: Path) -> Machine:
        device = claim(kind, 0)
        torch.set_num_threads(1)  # what a CPU computes here is tiny
        if device.type == "cpu":
            return cls(device, tiny, SMALL_CPU, out)
        name = torch.cuda.get_device_name(device)
        known = next((each for each in DEVICES.values() if re.search(rf"\b{each.peak}\b", name)), DEVICES["h100-80"])
        return cls(device, tiny, replace(known, per_node=1), out)

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiles(self) -> bool:
        """Whether compiling is worth its time: on a CPU it takes longer than all the rest of a tiny run."""
        return self.gpu or not self.tiny

    def cluster(self, precision: Precision) -> Cluster:
        """For the arithmetic of ``megacore plan``."""
        return Cluster(self.known, self.known.tflops(precision) if self.gpu else CPU_TFLOPS)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], times: int, warm_up: int = 2) -> float:
        """Of one call, after some that do not count; the device is waited for before and after all of them alone."""
        for _ in range(warm_up):
            call()
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.wait()
        return (time.perf_counter() - start) / times


def number(tensor: Tensor) -> float:
    """A scalar of the device; waits for it. What a benchmark reads, it reads here, and never within a step."""
    return float(tensor.item())
