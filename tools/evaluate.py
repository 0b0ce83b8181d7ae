"""`megacore evaluate`: loss and perplexity of a model on text, per token and per byte, by the parallel model; or what
it scores at tasks of lm-evaluation-harness.

Documents are read in windows of --sequence-length tokens. Each token of a document is predicted once, but for its
first; --stride gives the windows of long documents context from the one before. --by-position says what more context is
worth. Of rows with "chosen" and "rejected" it is how often the model prefers the former. docs/generate.md says more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from megacore import pictures
from megacore.inference.evaluation import EvaluationOptions, EvaluationSetup
from megacore.inference.evaluation_data import LONGEST
from megacore.inference.texts import Texts
from megacore.progress_bar import progress_bar
from megacore.say import err, say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders, processes
from megacore.tools.options import command_parser, count
from megacore.tools.tables import table


def main(argv: Sequence[str]) -> int:
    parser = command_parser("evaluate", __doc__)
    processes.add_model(parser)
    parser.add_argument(
        "--data",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="a .txt, .md, .py, .jsonl or .parquet file, a folder of them, a token file without .bin, or a data set of "
        "the hub, OWNER/NAME@REVISION; repeatable",
    )
    parser.add_argument(
        "--split", metavar="NAME", help="of folders and data sets (validation, valid, dev or test, the first there is)"
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the text in a row of .jsonl or .parquet")
    parser.add_argument(
        "--count", choices=("assistant", "last", "all"), default="assistant", help="what counts of chats (assistant)"
    )
    parser.add_argument(
        "--sequence-length", type=count, metavar="N", help=f"of a window (the model's, up to {LONGEST})"
    )
    parser.add_argument("--stride", type=count, metavar="N", help="from window to window (their length: no overlap)")
    parser.add_argument(
        "--tokens", type=count, default=4096, metavar="N", help="computed at once, at least a window (4096)"
    )
    context = parser.add_argument_group("how the context is used")
    context.add_argument(
        "--by-position", type=count, metavar="N", help="also the loss of each N successive positions of the documents"
    )
    context.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of --by-position")
    benchmarks = parser.add_argument_group("tasks", "They take the place of --data, and the extra lm-eval.")
    benchmarks.add_argument("--tasks", type=_names, metavar="NAME,...", help="of lm-evaluation-harness")
    benchmarks.add_argument("--tasks-folder", type=Path, metavar="FOLDER", help="of further tasks, as YAML")
    benchmarks.add_argument("--shots", type=count, metavar="N", help="examples before each question")
    benchmarks.add_argument("--limit", type=count, metavar="N", help="the most questions of each task")
    parser.add_argument("--json", action="store_true", help="print data instead of words")
    processes.add_mesh(parser, data=True)
    arguments = parser.parse_args(argv)
    if bool(arguments.data) == bool(arguments.tasks):
        parser.error("give either --data or --tasks")
    return folders.program(lambda parsed: (run_tasks if parsed.tasks else run)(parsed, argv), arguments)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run_tasks(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        from megacore.inference import harness
    except ImportError as error:
        raise StoreError(f"--tasks takes lm-evaluation-harness ({error}): pip install 'megacore[lm-eval]'") from error

    def prepare(folder: WeightFolder) -> tuple[Texts, Any]:
        if arguments.dp > 1:
            raise StoreError("--dp is of --data: all ranks are asked the same questions, leave it out")
        # Also brings data sets of the hub here, which the ranks then find.
        folder.check_predicts()
        return Texts.of(folder), harness.load(arguments.tasks, arguments.tasks_folder, arguments.shots)

    job, (texts, tasks) = processes.check(arguments, prepare)
    if job.lacks_ranks:
        return processes.start("megacore.tools.main", ["evaluate", *given], job.shape.world)
    with processes.loaded(job, arguments) as model:
        asked = harness.HarnessModel(model, texts, arguments.tokens)
        found = harness.measure(asked, tasks, arguments.limit)
    if job.here.rank == 0:
        if arguments.json:
            say_data({key: found[key] for key in ("results", "versions", "n-shot", "n-samples")}, indent=1)
        else:
            say(harness.table(found))
    return 0


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    job, setup = processes.check(arguments, partial(_prepare, arguments))
    if job.lacks_ranks:
        return processes.start("megacore.tools.main", ["evaluate", *given], job.shape.world)
    started, first = time.perf_counter(), job.here.rank == 0
    with processes.loaded(job, arguments) as model:
        data = setup.measure(model, _watched if first else iter)
    if first:
        if arguments.picture is not None:
            _draw(data, arguments.picture)
            folders.drawn(arguments.picture)
        if arguments.json:
            say_data(data, indent=1)
        else:
            say(_text(data))
        if "tokens" in data:
            err(f"{data['tokens'] / (time.perf_counter() - started):,.0f} tokens per second")
    return 0


def _prepare(arguments: argparse.Namespace, folder: WeightFolder) -> EvaluationSetup:
    if arguments.picture and not arguments.by_position:
        raise StoreError("--picture is of --by-position: give that too, or leave it out")
    how = EvaluationOptions(**{field.name: getattr(arguments, field.name) for field in fields(EvaluationOptions)})
    return EvaluationSetup.of(folder, arguments.data, how)


def _watched(documents: Iterable[Any]) -> Iterator[Any]:
    with progress_bar(None, "evaluate", "documents") as done:
        for document in documents:
            yield document
            done(1)


def _number(value: float | None) -> str:
    return "beyond bounds" if value is None else f"{value:.4f}"


def _of_pairs(data: dict[str, Any]) -> str:
    left_out = f", {data['too_long']:,} others are too long" if data["too_long"] else ""
    lines = [f"{data['pairs']:,} pairs{left_out}"]
    for name, key in (("", ""), (" per token", "_per_token")):
        if f"accuracy{key}" in data:
            lines.append(
                f"  what was chosen is ahead{name} in {data[f'accuracy{key}']:.1%}, by {data[f'margin{key}']:.4f}"
            )
    return "\n".join(lines)


def _text(data: dict[str, Any]) -> str:
    if "pairs" in data:
        return _of_pairs(data)
    lines = [
        f"{data['tokens']:,} tokens of {data['documents']:,} documents, in windows of {data['sequence_length']:,} "
        f"with a stride of {data['stride']:,}",
        f"  per token  loss {data['loss']:.4f}  perplexity {_number(data['perplexity'])}",
    ]
    if data["bytes"]:
        lines.append(
            f"  per byte   loss {data['loss_per_byte']:.4f}  perplexity {_number(data['perplexity_per_byte'])}"
            f"  bits {data['bits_per_byte']:.4f}  ({data['bytes']:,} bytes)"
        )
    if buckets := data.get("by_position"):
        rows = [(each["from"], each["tokens"], "" if each["loss"] is None else each["loss"]) for each in buckets]
        lines += ["", table({"from position": ",", "tokens": ",", "loss": ".4f"}, rows)]
    return "\n".join(lines)


def _draw(data: dict[str, Any], picture: Path) -> None:
    """Draw the loss by position in the document."""
    figure, axes = pictures.pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    buckets = [(each["to"], each["loss"]) for each in data["by_position"] if each["tokens"]]
    axes.plot(*zip(*buckets, strict=True), marker="o", markersize=3, linewidth=1)
    axes.set(xlabel="tokens before, up to", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    pictures.save(figure, picture)
