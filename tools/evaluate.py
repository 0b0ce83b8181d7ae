"""`megacore evaluate`: loss and perplexity of a model on text, per token and per byte, computed by the parallel model.

Documents are read in windows of --sequence-length tokens. Each token of a document is predicted once, but for its
first; --stride gives the windows of long documents context from the one before. --by-position says what more context is
worth, and --needle whether a fact in a long text is found. docs/generate.md says more.
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
from megacore.rank import RankPlace
from megacore.say import err, say, say_data
from megacore.store.folder import WeightFolder
from megacore.store.strict_json import StoreError
from parallel.weights.schema import split_of
from tools import folders, processes
from tools.tables import table

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.inference.evaluate import Excerpt, Measured, Windows

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
    context.add_argument(
        "--needle",
        type=folders.counts,
        metavar="N,N,...",
        help="instead of the loss: whether a fact in the text of the data is found, in prompts of so many tokens",
    )
    context.add_argument("--depths", type=folders.count, metavar="N", help="places of the fact, evenly spread (5)")
    context.add_argument("--needles", type=folders.count, metavar="N", help="of each length and depth (4)")
    context.add_argument("--seed", type=int, metavar="N", help="of the facts and where their texts begin (0)")
    context.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of --by-position or --needle")
    parser.add_argument("--json", action="store_true", help="print data instead of words")
    processes.add_mesh(parser, data=True)
    return folders.program(lambda parsed: run(parsed, given), parser.parse_args(given))


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    here = RankPlace.of_environment()
    with processes.agreed(here):
        folder = processes.model(arguments)
        shape = processes.mesh_shape(folder.config, here, arguments)
        _check(arguments, folder)
        length, stride = _lengths(arguments, folder)
        texts = _texts(arguments, folder)
        files = DocumentFiles(arguments.data, folder.config.vocab_size, texts, arguments.text_key, arguments.count)
        if next(files.documents(), None) is None:
            raise StoreError("there are no documents in the data")
        kind = processes.device(arguments.device, here, shape.world)
    if shape.world > 1 and not here.launched:
        return processes.start("tools.main", ["evaluate", *given], shape.world)
    processes.tell(arguments, folder, here)
    from megacore.inference.evaluate import Windows, evaluate
    from megacore.inference.load import model_from
    from megacore.inference.needles import Needles, found

    windows, started = Windows(length, stride, arguments.by_position), time.perf_counter()
    data: dict[str, Any]
    needles, prompts = None, list["Excerpt"]()
    with processes.agreed(here):
        if arguments.needle:
            assert texts is not None  # facts are texts, and without a tokenizer this has ended
            needles = Needles(arguments.needle, arguments.depths or 5, arguments.needles or 4, arguments.seed or 0)
            prompts = needles.windows(texts, files.documents())
    with processes.agreed(here), processes.live(shape, here, kind) as mesh:
        dtype, split = processes.dtype(arguments.dtype), split_of(arguments.etp)
        model = model_from(folder, mesh, dtype, split=split, exchange=arguments.exchange)
        if needles is not None:
            shares, read = found(model, needles, prompts), sum(len(prompt.tokens) for prompt in prompts)
            data = {"lengths": needles.lengths, "depths": needles.shares, "needles": needles.each, "found": shares}
        else:
            documents = files.documents()
            watched = folders.watched(documents, "evaluate", " documents") if here.rank == 0 else documents
            measured = evaluate(model, watched, windows, arguments.tokens)
            if not measured.tokens:
                raise StoreError("the data has no token to predict: no document has more than one")
            data, read = _data(measured, windows), measured.tokens
    if here.rank == 0:
        if arguments.picture is not None:
            _draw(data, arguments.picture)
        if arguments.json:
            say_data(data, indent=1)
        else:
            say(_text(data) if needles is None else _found_text(data))
        err(f"{read / (time.perf_counter() - started):,.0f} tokens per second")
    return 0


def _check(arguments: argparse.Namespace, folder: WeightFolder) -> None:
    """Refuse arguments that have no part in what is asked, and prompts that the model has no positions for."""
    problems, longest = [], folder.config.max_positions
    if arguments.needle and arguments.by_position:
        problems.append("--needle and --by-position are two questions: ask one after the other")
    if arguments.needle:
        problems += [
            f"--needle {length}: the model has {longest} positions: choose up to those, or extend it first "
            "(max_position_embeddings and the rope of its config.json)"
            for length in arguments.needle
            if longest is not None and length > longest
        ]
    else:
        names = [name for name in ("depths", "needles", "seed") if getattr(arguments, name) is not None]
        problems += [f"--{name} is of --needle: give its lengths too, or leave it out" for name in names]
    if arguments.picture and not (arguments.needle or arguments.by_position):
        problems.append("--picture is of --by-position or of --needle: give one of them, or leave it out")
    if problems:
        raise StoreError("\n".join(problems))


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
        if all(map(is_tokens, arguments.data)) and not arguments.needle:
            return None
        raise


def _data(measured: Measured, windows: Windows) -> dict[str, Any]:
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


def _found_text(data: dict[str, Any]) -> str:
    head = ["depth", *(f"{length:,}" for length in data["lengths"])]
    rows = [
        [f"{depth:.0%}", *(f"{column[row]:.0%}" for column in data["found"])]
        for row, depth in enumerate(data["depths"])
    ]
    return f"found of {data['needles']} needles, by depth and tokens of the prompt\n{table(head, rows)}"


def _draw(data: dict[str, Any], picture: Path) -> None:
    from megacore.inference import pictures

    if "found" in data:
        pictures.draw_needles(data["lengths"], data["depths"], data["found"], picture)
    else:
        pictures.draw_positions([(each["to"], each["loss"]) for each in data["by_position"] if each["tokens"]], picture)


if __name__ == "__main__":
    sys.exit(main())
