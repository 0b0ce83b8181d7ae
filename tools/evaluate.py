"""`megacore evaluate`: loss and perplexity of a model on text, per token and per byte, computed by the parallel model.

Documents are read in windows of --sequence-length tokens. Each token of a document is predicted once, but for its
first; --stride gives the windows of long documents context from the one before. docs/generate.md says more.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.inference.documents import DocumentFiles, is_tokens
from megacore.inference.texts import Texts
from megacore.rank import Here
from megacore.say import err, say, say_data
from megacore.store.folder import WeightFolder
from megacore.store.strict_json import StoreError
from parallel.weights.schema import split_of
from tools import folders, processes

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.inference.evaluate import Measured, Windows

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
    parser.add_argument("--json", action="store_true", help="print data instead of words")
    processes.add_mesh(parser, data=True)
    return folders.program(lambda parsed: run(parsed, given), parser.parse_args(given))


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    here = Here.now()
    with processes.agreed(here):
        folder = processes.model(arguments)
        shape = processes.mesh_shape(folder.config, here, arguments)
        length, stride = _lengths(arguments, folder)
        files = DocumentFiles(
            arguments.data, folder.config.vocab_size, _texts(arguments, folder), arguments.text_key, arguments.count
        )
        if next(files.documents(), None) is None:
            raise StoreError("there are no documents in the data")
        kind = processes.device(arguments.device, here, shape.world)
    if shape.world > 1 and not here.launched:
        return processes.start("tools.main", ["evaluate", *given], shape.world)
    processes.tell(arguments, folder, here)
    from megacore.inference.evaluate import Windows, evaluate
    from megacore.inference.load import model_from

    windows, started = Windows(length, stride), time.perf_counter()
    with processes.agreed(here), processes.live(shape, here, kind) as mesh:
        dtype, split = processes.dtype(arguments.dtype), split_of(arguments.etp)
        model = model_from(folder, mesh, dtype, split=split, exchange=arguments.exchange)
        documents = files.documents()
        watched = folders.watched(documents, "evaluate", " documents") if here.rank == 0 else documents
        measured = evaluate(model, watched, windows, arguments.tokens)
        if not measured.tokens:
            raise StoreError("the data has no token to predict: no document has more than one")
    if here.rank == 0:
        data = _data(measured, windows)
        if arguments.json:
            say_data(data, indent=1)
        else:
            say(_text(data))
        err(f"{measured.tokens / (time.perf_counter() - started):,.0f} tokens per second")
    return 0


def _lengths(arguments: argparse.Namespace, folder: WeightFolder) -> tuple[int, int]:
    """Return the length and stride of the windows."""
    longest = folder.config.max_positions
    length = arguments.sequence_length or min(longest or LONGEST, LONGEST)
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


def _data(measured: Measured, windows: Windows) -> dict[str, Any]:
    loss, size = measured.loss / measured.tokens, measured.size
    per_byte = measured.loss / size if size else None
    return {
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
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
