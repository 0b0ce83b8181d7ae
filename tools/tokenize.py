"""`megacore tokenize`: text files to the token files that training reads."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from megacore.data import stage as stages
from megacore.data import text
from megacore.data.corpus import CORPUS, LISTED, Corpus, Tally
from megacore.data.encode import encode, with_progress
from megacore.data.grouping import grouped
from megacore.data.indexed import Extent
from megacore.data.samples import Purpose, shuffled
from megacore.data.stage import PART, Partition, Provenance, Stage, StageProgress, digests
from megacore.data.text import InputError
from megacore.data.tokenizer import FILES, fetch, load, train
from megacore.say import err, say
from megacore.store.io.strict_json import StoreError
from megacore.tools.options import command_parser, count

SAMPLE = 2**25  # bytes of text that a tokenizer is trained on


def sample(stage: Stage, text_key: str) -> Iterator[str]:
    """Yield the documents of about SAMPLE bytes to train a tokenizer on: of random pieces, the same in every run."""
    sizes = array("q", (piece.size for piece in stage.pieces()))
    left, chosen = SAMPLE, set[int]()
    for index in map(int, shuffled(len(sizes), 0, Purpose.TOKENIZER)):
        if left <= 0:
            break
        chosen.add(index)
        left -= sizes[index]
    for index, piece in enumerate(stage.pieces()):
        left = SAMPLE  # of a compressed piece, whose text may be many times that
        for part in text.blocks(piece) if index in chosen else ():
            yield from (found for found in text.documents(part, text_key) if isinstance(found, str))
            left -= part.work
            if left <= 0:
                break


@dataclass(frozen=True)
class Options:
    """`tokenizer`, a Hugging Face folder or name, or else `train_vocab`, the size of a vocabulary to train.

    shuffle: the seed of the order of the documents; None: that of the input.
    """

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
    resume: bool = False
    part: Partition | None = None
    shuffle: int | None = None

    @property
    def folder(self) -> Path:
        """The folder that the output goes to."""
        return self.out if self.part is None else self.out / self.part.folder(self.name)


@dataclass(frozen=True)
class Outcome:
    """tally: the counts of a corpus or a part of one; corpus: None for a part. seconds: the time of each phase."""

    tally: Tally
    corpus: Corpus | None
    seconds: dict[str, float]


def tokenize(options: Options) -> Outcome:
    """Write NAME.bin, NAME.idx, the tokenizer's files and corpus.json, or part.json.

    InputError says why not. On a failure there are none of them, and what is finished is kept for a resume.
    """
    out, name = options.folder, options.name
    _refuse(options)
    outputs = (f"{name}.idx", f"{name}.bin", CORPUS, PART, *FILES)
    seconds: dict[str, float] = {}
    with Stage.open(out, name, options.shuffle, options.resume, options.overwrite) as stage:
        kept = stage.progress
        existing = [file for file in outputs if (out / file).exists()]
        if existing and not options.overwrite and not (kept and kept.outputs):
            raise InputError(f"{out} has {', '.join(existing)}: choose another --out, or replace them with --overwrite")
        with _timed(seconds, "find"):
            total = stage.list_files(options.inputs, options.exclude)
        with _timed(seconds, "fetch tokenizer" if options.tokenizer else "train tokenizer"):
            made = _made(stage, options)
        if kept:
            stage.check(made)
        if not (kept and kept.outputs):
            with _timed(seconds, "encode"):
                progress = _encode_into(stage, options, made, total)
            with _timed(seconds, "finish"):
                stage.finish(progress, part=options.part is not None)
        with _timed(seconds, "publish"):
            done = stage.progress
            assert done is not None
            stage.publish(outputs)
    return Outcome(done.tally, None if options.part else done.tally.corpus(name, done.end), seconds)


def _refuse(options: Options) -> None:
    """Refuse, with an InputError, parts that would not be those of one corpus."""
    if options.part and options.train_vocab:
        raise InputError(
            "each --part would train a tokenizer of its own: train one first (--train-vocab without --part, on a "
            "sample of the text), then give its folder as --tokenizer to all parts"
        )
    if options.part and options.shuffle is not None:
        raise InputError("parts are shuffled when they are merged: give --shuffle to megacore merge-tokens")


def _made(stage: Stage, options: Options) -> dict[str, Any]:
    """Return all that the tokens depend on. The tokenizer's files are in the stage afterwards."""
    made: dict[str, Any] = {
        "--train-vocab": options.train_vocab,
        "--text-key": options.text_key,
        "--append-eod": options.append_eod,
        "--shuffle": options.shuffle,
        "--part": options.part and str(options.part),
        "the digest of the input's names and sizes": stage.digest(),
        "tokenizers of version": version("tokenizers"),
    }
    if options.tokenizer is not None:
        with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
            fetch(options.tokenizer, Path(folder))
            made |= {f"the digest of {name}": digest for name, digest in digests(Path(folder), FILES).items()}
            if stage.progress is None:
                for path in Path(folder).iterdir():
                    path.rename(stage.folder / path.name)
    elif options.train_vocab is not None and stage.progress is None:
        train(sample(stage, options.text_key), options.train_vocab, stage.folder)
    return made


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def _encode_into(stage: Stage, options: Options, made: Provenance, total: int) -> StageProgress:
    """Encode what is not finished yet, and keep what is as it goes."""
    tokenizer = load(stage.folder)
    if options.append_eod and tokenizer.end is None:
        raise InputError(
            f"{options.tokenizer} has no end-of-document token: name it as eos_token in its tokenizer_config.json, "
            "or pass --no-append-eod"
        )
    end = tokenizer.end if options.append_eod else None
    start, stop = (0, None) if options.part is None else options.part.share(total)
    size = (total if stop is None else min(stop, total)) - start
    progress = stage.progress or StageProgress(made, 0, 0, size, Extent(), Tally.zero(tokenizer.vocabulary), end)
    tally, pieces, finished = progress.tally, progress.pieces, progress.size
    parts = (part for piece in stage.pieces(start, stop) for part in text.blocks(piece))
    left = grouped(islice(parts, pieces, None), lambda part: part.work)
    encoder = partial(encode, stage.folder, options.text_key, end)
    with (
        stage.pair(tokenizer.vocabulary, progress.extent) as pair,
        closing(with_progress(encoder, left, options.workers, size, "tokenize", finished)) as results,
    ):
        for result in results:
            if result.faults and not options.skip_faults:
                raise InputError(f"{result.faults[0]} (leave out what cannot be read with --on-error skip)")
            pair.extend(result.tokens, result.lengths)
            tally.add(result.tally(tally))
            pieces += result.pieces
            finished += result.size
            if finished - progress.size >= stages.KEPT:
                progress = replace(progress, pieces=pieces, size=finished, extent=pair.sync())
                stage.keep(progress)
    return replace(progress, pieces=pieces, size=finished, extent=pair.extent)


def main(argv: Sequence[str]) -> int:
    parser = command_parser("tokenize", __doc__)
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help=f"a file or folder of {' '.join(text.SUFFIXES)} files, or a .json file",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the token files go")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer", metavar="FOLDER_OR_NAME", help="a Hugging Face tokenizer, OWNER/NAME@REVISION of the hub too"
    )
    tokenizer.add_argument("--train-vocab", type=int, metavar="N", help="train a byte-level BPE of this vocabulary")
    add_output(parser)
    parser.add_argument("--workers", type=count, default=os.cpu_count(), metavar="W", help="processes (%(default)s)")
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="of the text in rows of .jsonl, .json and .parquet files (%(default)s)",
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
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run has finished")
    parser.add_argument(
        "--part",
        type=Partition.parse,
        metavar="I/N",
        help="of the input, the I-th of N parts, for megacore merge-tokens; in DIR/NAME.part-I-of-N",
    )
    return run(parser.parse_args(argv))


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the token file in DIR."""
    parser.add_argument("--name", default="corpus", help="of the pair NAME.bin, NAME.idx (%(default)s)")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="the documents in an order that belongs to SEED, by a second pass"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")


def run(args: argparse.Namespace) -> int:
    given = vars(args) | {"inputs": tuple(args.inputs), "exclude": tuple(args.exclude)}
    options = Options(skip_faults=given.pop("on_error") == "skip", **given)
    # A SIGTERM unwinds like Ctrl-C, so that what is half written goes away.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = tokenize(options)
    except KeyboardInterrupt as error:
        return _fail("interrupted", error, 130)
    except BrokenProcessPool as error:
        return _fail("a worker was killed, likely for memory: use fewer --workers", error)
    except (InputError, StoreError, OSError) as error:
        return _fail(str(error), error)
    finally:
        signal.signal(signal.SIGTERM, before)
    say(summary(outcome, options))
    return 0


def _fail(reason: str, error: BaseException, status: int = 1) -> int:
    for line in (reason, *getattr(error, "__notes__", ())):
        err(f"megacore tokenize: {line}")
    return status


def summary(outcome: Outcome, options: Options) -> str:
    tally, corpus, train_vocab = outcome.tally, outcome.corpus, options.train_vocab
    fewer = f" (not {train_vocab:,}: the text has no more pairs to join)" if train_vocab else ""
    fewer = fewer if train_vocab != tally.counts.size else ""
    facts = [] if corpus is None else [f"{corpus.bytes_per_token:.3f} bytes per token"]
    entropy = [] if corpus is None else [f"unigram entropy {corpus.unigram_entropy:.4f} nats per token"]
    lines = [
        token_files(options.folder / options.name, tally),
        ", ".join([f"{tally.text_bytes:,} bytes of text", *facts]),
        ", ".join([f"vocabulary {tally.counts.size:,}{fewer}", *entropy]),
        f"{tally.empty:,} empty documents left out, {tally.skipped:,} skipped because they could not be read",
        *(f"  {fault}" for fault in tally.faults),
        *([f"  and {tally.skipped - LISTED:,} more"] if tally.skipped > LISTED else []),
        ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in outcome.seconds.items()),
    ]
    return "\n".join(lines)


def token_files(prefix: Path, counts: Tally | Corpus) -> str:
    """Return what a pair of token files holds, in words."""
    size = sum(Path(f"{prefix}{end}").stat().st_size for end in (".bin", ".idx"))
    return f"{prefix}.bin, .idx: {counts.tokens:,} tokens in {counts.documents:,} documents, {size:,} bytes"
