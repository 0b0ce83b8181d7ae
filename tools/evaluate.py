"""`megacore evaluate`: loss and perplexity of a model on text, per token and per byte, computed by the parallel model.

Documents are read in windows of --sequence-length tokens. Each token of a document is predicted once, but for its
first; --stride gives the windows of long documents context from the one before. --by-position says what more context is
worth. docs/generate.md says more.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore import pictures
from megacore.inference.evaluation_data import DocumentFiles, is_tokens
from megacore.inference.texts import Texts
from megacore.say import err, say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders, processes
from megacore.tools.tables import table

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.inference.perplexity import EvaluationResult, Windows

LONGEST = 2048
"""Tokens of a window by default, for models that would take more."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    about, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="megacore evaluate", description=about, epilog=how)
    processes.add_model(parser)
    parser.add_argument(
        "--data",
        action="append",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .txt, .md, .py, .jsonl or .parquet file, a folder of them, or a token file without .bin; repeatable",
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the text in a row of .jsonl or .parquet")
    parser.add_argument(
        "--count", choices=("assistant", "last", "all"), default="assistant", help="what counts of chats (assistant)"
    )
    parser.add_argument(
        "--sequence-length", type=folders.count, metavar="N", help=f"of a window (the model's, up to {LONGEST})"
    )
    parser.add_argument(
        "--stride", type=folders.count, metavar="N", help="from window to window (their length: no overlap)"
    )
    parser.add_argument(
        "--tokens", type=folders.count, default=4096, metavar="N", help="computed at once, at least a window (4096)"
    )
    context = parser.add_argument_group("how the context is used")
    context.add_argument(
        "--by-position",
        type=folders.count,
        metavar="N",
        help="also the loss of each N successive positions of the documents",
    )
    context.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of --by-position")
    parser.add_argument("--json", action="store_true", help="print data instead of words")
    processes.add_mesh(parser, data=True)
    return folders.program(lambda parsed: run(parsed, given), parser.parse_args(given))


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    job, (lengths, files) = processes.ModelRun.check(arguments, partial(_prepare, arguments))
    if job.lacks_ranks:
        return processes.start("megacore.tools.main", ["evaluate", *given], job.shape.world)
    from megacore.inference.perplexity import Windows, evaluate

    windows, first = Windows(*lengths, arguments.by_position), job.here.rank == 0
    started = time.perf_counter()
    with job.model() as model:
        documents = files.documents()
        watched = folders.watched(documents, "evaluate", " documents") if first else documents
        measured = evaluate(model, watched, windows, arguments.tokens)
        if not measured.tokens:
            raise StoreError("the data has no token to predict: no document has more than one")
    if first:
        data = _data(measured, windows)
        if arguments.picture is not None:
            _draw(data, arguments.picture)
        if arguments.json:
            say_data(data, indent=1)
        else:
            say(_text(data))
        err(f"{measured.tokens / (time.perf_counter() - started):,.0f} tokens per second")
    return 0


def _prepare(arguments: argparse.Namespace, folder: WeightFolder) -> tuple[tuple[int, int], DocumentFiles]:
    """Return the length and stride of the windows, and the documents, of which there are some."""
    if arguments.picture and not arguments.by_position:
        raise StoreError("--picture is of --by-position: give that too, or leave it out")
    lengths = _lengths(arguments, folder)
    texts = _texts(arguments, folder)
    files = DocumentFiles(arguments.data, folder.config.vocab_size, texts, arguments.text_key, arguments.count)
    if next(files.documents(), None) is None:
        raise StoreError("there are no documents in the data")
    return lengths, files


def _lengths(arguments: argparse.Namespace, folder: WeightFolder) -> tuple[int, int]:
    """Return the length and stride of the windows."""
    longest = folder.config.max_positions
    usual = longest or LONGEST
    length = arguments.sequence_length or (usual if arguments.by_position else min(usual, LONGEST))
    stride = arguments.stride or length
    problems = []
    if longest is not None and length > longest:
        problems.append(f"--sequence-length {length}: the model has {longest} positions, choose up to those")
    if stride > length:
        problems.append(f"--stride {stride} would leave out tokens between windows of {length}: choose up to {length}")
    if problems:
        raise StoreError("\n".join(problems))
    return length, stride


def _texts(arguments: argparse.Namespace, folder: WeightFolder) -> Texts | None:
    """Return the tokenizer; None where it is not needed and not there."""
    try:
        return Texts.of(folder)
    except StoreError:
        if all(map(is_tokens, arguments.data)):
            return None
        raise


def _data(measured: EvaluationResult, windows: Windows) -> dict[str, Any]:
    loss, size = measured.loss / measured.tokens, measured.size
    per_byte = measured.loss / size if size else None
    data: dict[str, Any] = {
        "documents": measured.documents,
        "tokens": measured.tokens,
        "bytes": size,
        "sequence_length": windows.length,
        "stride": windows.stride,
        "loss": loss,
        "perplexity": _exp(loss),
        "loss_per_byte": per_byte,
        "perplexity_per_byte": None if per_byte is None else _exp(per_byte),
        "bits_per_byte": None if per_byte is None else per_byte / math.log(2),
    }
    if windows.bucket is not None:
        data["by_position"] = [
            {
                "from": number * windows.bucket,
                "to": (number + 1) * windows.bucket,
                "tokens": bucket.tokens,
                "loss": bucket.loss / bucket.tokens if bucket.tokens else None,
            }
            for number, bucket in enumerate(measured.buckets)
        ]
    return data


def _exp(loss: float) -> float | None:
    """Return exp(x); None where it is no number that JSON has."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


def _number(value: float | None) -> str:
    return "beyond bounds" if value is None else f"{value:.4f}"


def _text(data: dict[str, Any]) -> str:
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
        rows = [
            [f"{each['from']:,}", f"{each['tokens']:,}", "" if each["loss"] is None else f"{each['loss']:.4f}"]
            for each in buckets
        ]
        lines += ["", table(["from position", "tokens", "loss"], rows)]
    return "\n".join(lines)


def _draw(data: dict[str, Any], picture: Path) -> None:
    """Draw the loss by position in the document."""
    figure, axes = pictures.pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    buckets = [(each["to"], each["loss"]) for each in data["by_position"] if each["tokens"]]
    axes.plot(*zip(*buckets, strict=True), marker="o", markersize=3, linewidth=1)
    axes.set(xlabel="tokens before, up to", ylabel="loss in nats per token")
    axes.grid(alpha=0.3)
    pictures.save(figure, picture)


if __name__ == "__main__":
    sys.exit(main())
