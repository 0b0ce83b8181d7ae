"""`megacore tokenize`: text files to the token files that training reads."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megacore.data import text
from megacore.data.corpus import CORPUS, Corpus, unigram_entropy
from megacore.data.encode import Task, encode_all, grouped
from megacore.data.indexed import IndexedWriter, publish
from megacore.data.samples import Purpose, shuffled
from megacore.data.text import Fault, InputError, Piece
from megacore.data.tokenizer import FILES, fetch, load, train
from megacore.say import err, say
from megacore.store.strict_json import StoreError

SAMPLE = 2**25  # bytes of text that a tokenizer is trained on


def sample(pieces: list[Piece], text_key: str) -> Iterator[str]:
    """Documents of about SAMPLE bytes to train a tokenizer on: of randomly chosen pieces, the same in every run."""
    left = SAMPLE
    for index in shuffled(len(pieces), 0, Purpose.TOKENIZER):
        if left > 0:
            yield from (found for found in text.documents(pieces[index], text_key) if isinstance(found, str))
            left -= pieces[index].size


@contextmanager
def staged(out: Path, name: str) -> Iterator[Path]:
    """A temporary folder in `out`; neither it nor an `out` that was made for it outlasts a failure."""
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}.partial-") as folder:
            yield Path(folder)
    finally:
        if new and not any(out.iterdir()):
            out.rmdir()


@dataclass(frozen=True)
class Options:
    """`tokenizer`, a Hugging Face folder or name, or else `train_vocab`, the size of a vocabulary to train."""

    inputs: tuple[Path, ...]
    out: Path
    tokenizer: str | None = None
    train_vocab: int | None = None
    workers: int = 1
    name: str = "corpus"
    text_key: str = "text"
    append_eod: bool = True
    skip_faults: bool = False
    overwrite: bool = False
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """seconds: of each phase; faults: the documents that were skipped."""

    corpus: Corpus
    faults: tuple[Fault, ...]
    seconds: dict[str, float]


def tokenize(options: Options) -> Outcome:
    """Writes NAME.bin, NAME.idx, the tokenizer's files and corpus.json; on a failure, nothing. InputError says why."""
    out, name = options.out, options.name
    outputs = (f"{name}.idx", f"{name}.bin", CORPUS, *FILES)
    existing = [file for file in outputs if (out / file).exists()]
    if existing and not options.overwrite:
        raise InputError(f"{out} has {', '.join(existing)}: choose another --out, or replace them with --overwrite")
    seconds: dict[str, float] = {}
    with _timed(seconds, "find"):
        pieces = [piece for file in text.find_files(options.inputs, options.exclude) for piece in text.cut(file)]
    with staged(out, name) as stage:
        if options.tokenizer is not None:
            with _timed(seconds, "fetch tokenizer"):
                fetch(options.tokenizer, stage)
        elif options.train_vocab is not None:
            with _timed(seconds, "train tokenizer"):
                train(sample(pieces, options.text_key), options.train_vocab, stage)
        with _timed(seconds, "encode"):
            corpus, faults = _encode_into(stage, pieces, options)
        with _timed(seconds, "publish"):
            corpus.write(stage)
            for file in existing:
                (out / file).unlink()
            for path in sorted(stage.iterdir(), key=lambda path: path.suffix == ".idx"):
                publish(path, out / path.name)
    return Outcome(corpus, faults, seconds)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def _encode_into(stage: Path, pieces: list[Piece], options: Options) -> tuple[Corpus, tuple[Fault, ...]]:
    tokenizer = load(stage)
    if options.append_eod and tokenizer.end is None:
        raise InputError(
            f"{options.tokenizer} has no end-of-document token: name it as eos_token in its tokenizer_config.json, "
            "or pass --no-append-eod"
        )
    end = tokenizer.end if options.append_eod else None
    counts = np.zeros(tokenizer.vocabulary, np.int64)
    documents = text_bytes = empty = 0
    faults: list[Fault] = []
    tasks = (Task(group, stage, options.text_key, end) for group in grouped(pieces, lambda piece: piece.size))
    bar = tqdm(
        total=sum(piece.size for piece in pieces),
        desc="tokenize",
        unit="B",
        unit_scale=True,
        mininterval=0.1 if sys.stderr.isatty() else 30,
    )
    with bar, IndexedWriter(stage / options.name, tokenizer.vocabulary) as writer:
        with closing(encode_all(tasks, options.workers)) as results:
            for result in results:
                faults += result.faults
                if faults and not options.skip_faults:
                    raise InputError(f"{faults[0]} (leave out what cannot be read with --on-error skip)")
                ends = np.cumsum(result.lengths)
                for begin, stop in zip(ends - result.lengths, ends, strict=True):
                    writer.write(result.tokens[begin:stop])
                counts += np.bincount(result.tokens, minlength=counts.size)
                documents += ends.size
                text_bytes += result.text_bytes
                empty += result.empty
                bar.update(result.size)
        if documents == 0:
            raise InputError(f"there is no text in the input: {empty} documents are empty and {len(faults)} unreadable")
    tokens = int(counts.sum())
    corpus = Corpus(
        name=options.name,
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / tokens,
        vocabulary=tokenizer.vocabulary,
        end_of_document=end,
        unigram_entropy=unigram_entropy(counts),
        empty=empty,
        skipped=len(faults),
    )
    return corpus, tuple(faults)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="INPUT", help=f"a file or folder of {' '.join(text.SUFFIXES)} files"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the token files go")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="FOLDER_OR_NAME", help="a Hugging Face tokenizer")
    tokenizer.add_argument("--train-vocab", type=int, metavar="N", help="train a byte-level BPE of this vocabulary")
    parser.add_argument("--name", default="corpus", help="of the pair NAME.bin, NAME.idx (%(default)s)")
    parser.add_argument(
        "--workers", type=_positive, default=os.cpu_count(), metavar="W", help="processes (%(default)s)"
    )
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="of the text in .jsonl and .parquet files (%(default)s)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document token",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about a document that cannot be read (%(default)s)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out the files and folders of this name in a folder, such as site-packages; may be repeated",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")


def _positive(value: str) -> int:
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return number


def run(args: argparse.Namespace) -> int:
    options = Options(
        inputs=tuple(args.inputs),
        out=args.out,
        tokenizer=args.tokenizer,
        train_vocab=args.train_vocab,
        workers=args.workers,
        name=args.name,
        text_key=args.text_key,
        append_eod=args.append_eod,
        skip_faults=args.on_error == "skip",
        overwrite=args.overwrite,
        exclude=tuple(args.exclude),
    )
    # A SIGTERM unwinds like Ctrl-C, so that what is half written goes away.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = tokenize(options)
    except KeyboardInterrupt:
        err("megacore tokenize: interrupted")
        return 130
    except BrokenProcessPool:
        err("megacore tokenize: a worker was killed, likely for memory: use fewer --workers")
        return 1
    except (InputError, StoreError, OSError) as error:
        err(f"megacore tokenize: {error}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    say(summary(outcome, options.out, options.train_vocab))
    return 0


def summary(outcome: Outcome, out: Path, train_vocab: int | None = None) -> str:
    corpus, faults = outcome.corpus, outcome.faults
    fewer = f" (not {train_vocab:,}: the text has no more pairs to join)" if train_vocab else ""
    fewer = fewer if train_vocab != corpus.vocabulary else ""
    lines = [
        f"{out / corpus.name}.bin, .idx: {corpus.tokens:,} tokens in {corpus.documents:,} documents",
        f"{corpus.text_bytes:,} bytes of text, {corpus.bytes_per_token:.3f} bytes per token",
        f"vocabulary {corpus.vocabulary:,}{fewer}, unigram entropy {corpus.unigram_entropy:.4f} nats per token",
        f"{corpus.empty:,} empty documents left out, {corpus.skipped:,} skipped because they could not be read",
        *(f"  {fault}" for fault in faults[:5]),
        *([f"  and {len(faults) - 5:,} more"] if len(faults) > 5 else []),
        ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in outcome.seconds.items()),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore tokenize", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
