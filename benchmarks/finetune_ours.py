"""This project's fine-tuning on the work of `finetune.py`: `python finetune_ours.py full | lora`, as a recipe does it.

Weights, gradients and AdamW's state are in bf16, those of adapters included; `--masters` keeps masters, moments and
sums of gradients in fp32, which is what a recipe has by default.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import steps
from benchmarks.finetune_work import LORA, LR, Work
from megacore.control import Control
from megacore.data.packing import Packed
from megacore.parallel.mesh import Mesh
from megacore.training import build
from megacore.training.callbacks.report import FinalReport
from megacore.training.check import check
from megacore.training.trainer import Callback, Trainer

MODES = ("full", "lora")


class Clock(Callback):
    """When each step has ended, and its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(record["loss"] or 0.0))


def recipe(work: Work, out: Path, total: int, lora: bool, masters: bool) -> dict[str, Any]:
    adapters = {"rank": LORA["r"], "alpha": LORA["lora_alpha"], "dropout": LORA["lora_dropout"]}
    return {
        "data": {"train": str(work.chats), "validation_fraction": 0.0, "sequence_length": work.length},
        "batch": {"global_size": work.rows * work.accumulation, "micro_size": work.rows},
        "optimizer": {"lr": LR, "weight_decay": 0.0, "master_weights": masters},
        "schedule": {"name": "constant"},
        "train": {"steps": total, "precision": "bf16", "device": "cpu"},
        "checkpoint": {"init": str(work.model), "at_end": False, "every": 0},
        "log": {"peak_tflops": 1.0},
        "out": str(out),
        **({"lora": adapters} if lora else {}),
    }


def main() -> None:
    parser = steps.parser(__doc__, MODES)
    parser.add_argument("--work", type=Path, required=True, help="what `finetune.py` has written")
    parser.add_argument("--masters", action="store_true", help="fp32 masters, moments and sums of gradients")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work, total = Work.read(arguments.work), arguments.warm_up + arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "recipe.json"  # JSON is YAML
        out = Path(folder) / "run"
        written.write_text(json.dumps(recipe(work, out, total, arguments.mode == "lora", arguments.masters)))
        setup, clock = check(str(written), [], 1, 1), Clock()
        mesh = Mesh.create(setup.config.mesh.shape(1))
        trainer = build.trainer_of(setup, mesh, Control.create(mesh), [clock])
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, FinalReport)]
        out.mkdir(exist_ok=True)
        began = time.perf_counter()
        trainer.fit()
        rows = setup.corpora.train
    assert isinstance(rows, Packed)
    # Of real text: what is left of a row counts for nothing.
    each = round(rows.fill * work.rows * work.accumulation * work.length)
    seconds = [after - before for before, after in zip([began, *clock.ends], clock.ends, strict=False)]
    steps.tell(seconds, (clock.losses[0], clock.losses[-1]), arguments.warm_up, [each] * total)


if __name__ == "__main__":
    main()
