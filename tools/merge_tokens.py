"""`megacore merge-tokens`: one token file of the parts that `megacore tokenize --part I/N` has written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacore.data.corpus import CORPUS, Corpus, Tally
from megacore.data.indexed import Extent, IndexedDataset
from megacore.data.stage import PART, Partition, Stage, StageProgress
from megacore.data.text import InputError
from megacore.data.tokenizer import FILES
from megacore.say import err, say
from megacore.store.tensor_files.companions import Companion, copy_companion
from megacore.tools.options import command_parser
from megacore.tools.tokenize import add_output, token_files


def find_parts(out: Path, name: str) -> dict[Path, StageProgress]:
    """Return {folder: what it holds} of all parts of a corpus, in order. InputError if they are not all there, or
    differ."""
    pattern = re.compile(re.escape(name) + r"\.part-([1-9][0-9]*)-of-([1-9][0-9]*)")
    names = (pattern.fullmatch(path.name) for path in out.iterdir()) if out.is_dir() else ()
    parts = sorted((int(found[2]), int(found[1])) for found in names if found)
    if not parts:
        raise InputError(f"{out} has no parts of {name}: make them by megacore tokenize --out {out} --part I/N")
    counts = sorted({count for count, _ in parts})
    if len(counts) > 1:
        raise InputError(f"{out} has parts of {' and of '.join(map(str, counts))}: remove those that do not belong")
    (count,) = counts
    # A name may say any number: one more than there are shows that some are missing.
    folders = [out / Partition(number, count).folder(name) for number in range(1, min(count, len(parts) + 1) + 1)]
    if missing := [folder.name for folder in folders if not (folder / PART).is_file()]:
        raise InputError(
            f"{out}: {count - len(folders) + len(missing)} of {count} parts are not finished, such as {missing[0]}: "
            "make them by megacore tokenize --part, with --resume where it was interrupted"
        )
    found = {folder: StageProgress.read(folder / PART) for folder in folders}
    first = _common(found[folders[0]])
    for folder, progress in found.items():
        own = _common(progress)
        for key in dict.fromkeys((*first, *own)):
            if first.get(key) != own.get(key):
                raise InputError(
                    f"{folders[0].name} has {key} {first.get(key)!r}, and {folder.name} {own.get(key)!r}: make one anew"
                )
    return found


def _common(part: StageProgress) -> dict[str, Any]:
    """Return all that the tokens of all parts depend on."""
    made = {key: value for key, value in part.made.items() if key != "--part"}
    return made | {"a vocabulary of": part.tally.counts.size, "the end of documents": part.end}


def merge(out: Path, name: str = "corpus", shuffle: int | None = None, overwrite: bool = False) -> Corpus:
    """Write NAME.bin, NAME.idx, the tokenizer's files and corpus.json beside the parts, which stay.

    InputError says why not; on a failure there are none of them.
    """
    parts = find_parts(out, name)
    first, *_ = parts.values()
    outputs = (f"{name}.idx", f"{name}.bin", CORPUS, *FILES)
    made = _common(first) | {"--shuffle": shuffle, "parts": len(parts)}
    with Stage.open(out, name, shuffle, resume=not overwrite, overwrite=overwrite) as stage:
        if stage.progress:  # interrupted while its outputs were moved
            stage.check(made)
        else:
            existing = [file for file in outputs if (out / file).exists()]
            if existing and not overwrite:
                raise InputError(f"{out} has {', '.join(existing)}: replace them with --overwrite")
            total, tally = sum(part.total for part in parts.values()), Tally.zero(first.tally.counts.size)
            with stage.pair(tally.counts.size) as pair:
                for folder, part in parts.items():
                    data = IndexedDataset(folder / name)
                    if (data.documents, data.start(data.documents)) != (part.tally.documents, part.tally.tokens):
                        raise InputError(f"{folder / name}.idx holds other documents than {PART} says: make it anew")
                    pair.join(data)
                    tally.add(part.tally)
            source = next(iter(parts))
            for file in FILES:
                if (source / file).is_file():
                    copy_companion(Companion(source / file, source), stage.folder / file)
            progress = StageProgress(made, 0, total, total, Extent(documents=tally.documents), tally, first.end)
            stage.finish(progress)
        stage.publish(outputs)
        assert stage.progress is not None
        return stage.progress.tally.corpus(name, stage.progress.end)


def main(argv: Sequence[str]) -> int:
    parser = command_parser("merge-tokens", __doc__)
    parser.add_argument("out", type=Path, metavar="DIR", help="the --out of the parts, where the token file goes")
    add_output(parser)
    args = parser.parse_args(argv)
    try:
        corpus = merge(args.out, args.name, args.shuffle, args.overwrite)
    except KeyboardInterrupt:
        err("megacore merge-tokens: interrupted")
        return 130
    except (ValueError, OSError) as error:
        err(f"megacore merge-tokens: {error}")
        return 1
    say(token_files(args.out / args.name, corpus))
    return 0
