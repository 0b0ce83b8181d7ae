"""Fine-tuning on chats on the CPU, this project beside transformers' Trainer, TRL and PEFT, in one interleaved run.

    python benchmarks/finetune.py --model FOLDER [--rounds 3] [--json results.json]
    python benchmarks/finetune.py --setup                        # makes the environment of the peers, with pip

FOLDER is a Hugging Face folder with a chat template: ../shared/real_model.py makes one (SmolLM2-135M). The chats are
those of `launch/api_chats.py`, tokenized and masked once, for everyone; the loss counts what the assistant says.

Each run is one process with all cores: warm-up steps, then counted ones. A step is about 4,096 tokens, in two
microbatches: rows of 512 that chats share for those who pack, and for the others as many chats as fill such rows. Five
steps are counted: the Trainer that groups chats by length goes from long ones to short ones in five, and its steps
differ in tokens by as much as in time. All have gradient clipping at 1.0, fused AdamW, a constant learning rate and no
gradient checkpointing. What is compared is tokens of real text a second, padding left out. Runs take turns, and the
anchor runs again every few runs.

In bf16 and fp32 (`held` in the table): where nothing is said, weights, gradients and AdamW's state are in bf16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, results
from benchmarks.finetune_work import Work
from benchmarks.interleaved import Group, Job, Mode, Row
from benchmarks.results import Bar
from megacore.config import ChatConfig
from megacore.data.examples import ExampleFiles, Examples, Preparation
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.packing import Packed
from megacore.store.weight_folders.hugging_face import HuggingFace

ROOT = Path(__file__).resolve().parent.parent
FULL, ADAPTERS = Group("all weights", 1), Group("LoRA", 1)
MASTERS, AUTOCAST = "fp32 masters, moments and sums of gradients", "fp32 weights, gradients and moments; autocast"
WIDE = "adapters in fp32"

OURS, PEERS = "finetune_ours.py", "finetune_peers.py"
MODES = (
    Mode("megacore", FULL, "ours", OURS, "full"),
    Mode("megacore, masters", FULL, "ours", OURS, "full", MASTERS, ("--masters",)),
    Mode("Trainer, grouped by length", FULL, "trl", PEERS, "padded", "padded to the longest of a microbatch"),
    Mode("Trainer, flattened", FULL, "trl", PEERS, "flattened", "a microbatch's chats in one row, without padding"),
    Mode("Trainer, flattened, autocast", FULL, "trl", PEERS, "flattened", AUTOCAST, ("--autocast",)),
    Mode("TRL, packed", FULL, "trl", PEERS, "trl", "best-fit rows, the head on counted tokens alone"),
    Mode("TRL, wrapped", FULL, "trl", PEERS, "trl-wrapped", "chats are cut at rows, and see those before them"),
    Mode("megacore LoRA", ADAPTERS, "ours", OURS, "lora"),
    Mode("megacore LoRA, masters", ADAPTERS, "ours", OURS, "lora", "adapters in fp32 beside bf16", ("--masters",)),
    Mode("PEFT, Trainer, grouped by length", ADAPTERS, "trl", PEERS, "padded", WIDE, ("--lora",)),
    Mode("PEFT, Trainer, flattened", ADAPTERS, "trl", PEERS, "flattened", WIDE, ("--lora",)),
    Mode("PEFT, TRL, packed", ADAPTERS, "trl", PEERS, "trl", WIDE, ("--lora",)),
)
ANCHOR = "Trainer, grouped by length"
PLAIN = ("megacore", "megacore LoRA")
"""What the others are compared with in the table, one of each group."""


def peers(group: Group) -> tuple[str, ...]:
    return tuple(mode.name for mode in MODES if mode.group == group and not mode.ours)


BARS = (
    Bar(("megacore",), peers(FULL), 1.3),
    Bar(("megacore, masters",), ("Trainer, flattened, autocast",), 1.3),
    Bar(("megacore LoRA",), peers(ADAPTERS), 1.2),
    Bar(("megacore LoRA, masters",), peers(ADAPTERS), 1.2),
)


def prepare(model: Path, folder: Path, facts: int, length: int, rows: int, accumulation: int) -> tuple[Path, Examples]:
    """The file that the scripts read their work from, and what is in it."""
    chats = [sys.executable, str(ROOT / "launch" / "api_chats.py"), str(folder), "--facts", str(facts)]
    subprocess.run(chats, check=True, capture_output=True)
    work = Work(model.resolve(), folder / "train.jsonl", folder / "prepared.jsonl", length, rows, accumulation)
    source = HuggingFace.open(work.model)
    files = ModelFiles(source.companions(), source.raw, source.config.vocab_size)
    given = ExampleFiles(str(work.chats), [work.chats])
    examples = Preparation(given, folder / "examples", ChatConfig(), work.length, files).examples()
    with open(work.prepared, "w", encoding="utf-8") as file:
        for index in range(examples.count):
            tokens, counted = examples.example(index)
            made = {"input_ids": tokens.tolist(), "counted": counted.astype(int).tolist()}
            file.write(json.dumps(made) + "\n")
    work.write(folder / "work.json")
    return folder / "work.json", examples


def speeds(row: Row) -> list[float]:
    """Tokens of real text a second, of each run."""
    return [sum(tokens) / sum(seconds) for tokens, seconds in zip(row.tokens, row.runs, strict=True)]


def speed(row: Row) -> float:
    """The same over all counted steps."""
    return sum(map(sum, row.tokens)) / sum(row.steps)


def table(rows: Sequence[Row]) -> str:
    """Markdown; `ours x` is our plain row's speed of the group over a row's."""
    good = [row for row in rows if row.runs]
    ours = {row.mode.group: speed(row) for row in good if row.mode.name in PLAIN}
    numbers = ("tokens/s:", "of each run:", "ours x:", "GiB:", "loss, first .. last:")
    shown = []
    for group in (FULL, ADAPTERS):
        for row in sorted((row for row in good if row.mode.group == group), key=speed, reverse=True):
            cells = (
                group.name,
                row.mode.name,
                f"{speed(row):,.0f}",
                f"{min(speeds(row)):,.0f} .. {max(speeds(row)):,.0f}",
                f"{ours[group] / speed(row):.2f}" if group in ours else "",
                f"{row.gib:.2f}",
                f"{row.first_loss:.3f} .. {row.last_loss:.3f}",
                row.mode.differs,
            )
            shown.append(cells)
    return results.table(("", "mode", *numbers, "held in fp32, and what differs"), shown)


def main() -> None:
    parser = interleaved.parser(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--facts", type=int, default=400, help="how many facts the chats are about")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a microbatch")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches of a step")
    parser.set_defaults(steps=5)
    arguments = parser.parse_args()
    machine = interleaved.ready(arguments)
    if arguments.model is None:
        parser.error("--model names no folder; `python ../shared/real_model.py FOLDER` makes one")
    report = interleaved.heading(arguments)
    with tempfile.TemporaryDirectory() as folder:
        shape = (arguments.length, arguments.rows, arguments.accumulation)
        work, examples = prepare(arguments.model, Path(folder), arguments.facts, *shape)
        known, fill = examples.facts, Packed(examples, arguments.length, seed=0).fill
        print(
            f"{known.examples:,} chats of {min(examples.lengths)} to {max(examples.lengths)} tokens, "
            f"{known.tokens / known.examples:.0f} on average; the loss counts {known.counted / known.tokens:.0%} of "
            f"them; our rows are {fill:.1%} full"
        )
        modes = interleaved.available(MODES, machine, arguments)
        modes = [replace(mode, options=(*mode.options, "--work", str(work))) for mode in modes]
        job = Job(arguments.shape, "bf16", arguments.warm_up, arguments.steps)
        rows = interleaved.measure(machine, modes, job, arguments.rounds, ANCHOR, arguments.anchor_every)
    bars = results.judged(BARS, {row.mode.name: speed(row) for row in rows if row.runs})
    print(f"\n{table(rows)}\n\n{bars}\n\n{interleaved.anchor_line(rows, ANCHOR)}\n")
    report |= {
        "bars": bars.splitlines(),
        "modes": {row.mode.name: {**row.summary(), "tokens_per_second": row.runs and speed(row)} for row in rows},
    }
    results.write(report, arguments.json)


if __name__ == "__main__":
    main()
