"""`megacore verify`: a checkpoint beside a Hugging Face folder, every tensor bit for bit and the logits of both models.

In one process, or under torchrun in the checkpoint's own layout: a multiple of pp x ep x tp processes, times --cp. It
exits with 1 if anything differs beyond the rounding of float32, of which the measure is how far transformers itself is
from float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megacore.data.text import InputError
from megacore.data.tokenizer import load
from megacore.inference.answers import Prompt, problems_of
from megacore.inference.placement import context_problems, live
from megacore.rank import RankPlace
from megacore.say import say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.folder import WeightFolder, with_projector
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import folders
from megacore.tools.options import command_parser, count
from megacore.tools.processes import add_context, agreed
from megacore.tools.tables import table

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.inference.verification import Pair, Report
    from megacore.parallel.weights.layout import MeshShape

TEXTS = (
    "The sun rose over the quiet harbour, and the first boats were already on their way out to sea.",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2\n\nprint(area(2.0))\n",
    "In 1928, 17 of the 250 samples weighed less than 0.35 kg; Zoë's naïve guess (£4.99) was nearly right!",
)
"""The prompts by default."""


def main(argv: Sequence[str]) -> int:
    parser = command_parser("verify", __doc__)
    parser.add_argument("checkpoint", type=Path, help="the checkpoint")
    parser.add_argument("folder", type=Path, help=f"what it came from, or became: {folders.HUGGING_FACE}")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to compare the logits of")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one on each line")
    parser.add_argument("--tokens", type=count, default=64, metavar="N", help="that are used of a prompt at most (64)")
    folders.add_jobs(parser)
    add_context(parser)
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    here = RankPlace.of_environment()
    with agreed(here):
        pair, prompts, shape = _prepare(arguments, here.rank, here.world)
    from megacore.inference.verification import verify

    with live(shape, here, "cpu") as mesh:
        report = verify(pair, prompts, mesh, folders.jobs(arguments), arguments.exchange)
    if here.rank == 0:
        if arguments.json:
            say_data(_data(pair, report), indent=1)
        else:
            say(_text(pair, report))
    return 0 if report.passes else 1


def _prepare(arguments: argparse.Namespace, rank: int, world: int) -> tuple[Pair, list[list[int]], MeshShape]:
    checkpoint, folder = (folders.opened(path, told=rank == 0) for path in (arguments.checkpoint, arguments.folder))
    if checkpoint.format != Checkpoint.format:
        raise StoreError(f"{arguments.checkpoint} is {checkpoint.kind}: give a checkpoint first, then the folder")
    if folder.format != HuggingFace.format:
        raise StoreError(f"{arguments.folder} is {folder.kind}: compare checkpoints with `megacore inspect --diff`")
    texts = folders.prompts(arguments)
    from megacore.inference.verification import Pair, mesh_shape

    mesh = mesh_shape(checkpoint, world, arguments.cp)
    if found := context_problems(checkpoint.config, mesh, arguments.exchange):
        raise StoreError("\n".join(found))
    theirs = with_projector(folder) if checkpoint.config.projector else folder
    return Pair(checkpoint, theirs), encode(folder, texts, arguments.tokens, mesh.tp * mesh.cp), mesh


# -- prompts


def encode(folder: WeightFolder, texts: Sequence[str], most: int, multiple: int) -> list[list[int]]:
    """Return the token ids of the texts; of :data:`TEXTS` if there are none, or random ids where there is no tokenizer.
    ``most``: longer prompts are cut; ``multiple``: prompts are repeated up to a multiple of it: ranks of tp and cp
    share their tokens evenly. Raises StoreError: the texts cannot be encoded."""
    path, config = folder.path, folder.config
    most = min(most, config.max_positions or most)
    longest = most // multiple * multiple
    if not longest:
        raise StoreError(f"cannot split prompts of {most} tokens over tp x cp={multiple}: choose more --tokens")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        if texts:
            raise StoreError(f"{path} has no tokenizer for the prompts: without them, random tokens are compared")
        generator = np.random.default_rng(0)
        # Of images and sounds are those that layers have no embeddings of, where they have some.
        tokens = min(config.vocab_size, config.sizes.get("input_vocab", config.vocab_size))
        return [generator.integers(tokens, size=longest).tolist() for _ in TEXTS]
    texts = texts or TEXTS
    try:
        cut = [ids.tolist()[:longest] for ids in load(path).encode(list(texts))]
    except (InputError, OSError, ValueError) as error:
        raise StoreError(f"{path}: the tokenizer cannot be used: {error}") from error
    given = map(Prompt, texts, cut)
    if problems := [problem for prompt in given for problem in problems_of(prompt, folder.path, folder.config)]:
        raise StoreError("\n".join(problems))
    return [[ids[i % len(ids)] for i in range(-(-len(ids) // multiple) * multiple)] for ids in cut]


# -- what is printed


def _data(pair: Pair, report: Report) -> dict[str, Any]:
    return {
        "checkpoint": str(pair.checkpoint.path),
        "folder": str(pair.folder.path),
        "passes": report.passes,
        "mesh": dict(report.mesh),
        "config": {name: list(both) for name, both in report.config.items()},
        "parameters": [asdict(group) for group in report.groups],
        "differing": list(report.differing),
        "prompts": [asdict(found) | {"passes": found.passes} for found in report.prompts],
    }


def _text(pair: Pair, report: Report) -> str:
    mesh = " x ".join(f"{dim}={size}" for dim, size in report.mesh.items())
    groups = [(g.name, g.pieces, g.elements, " and ".join(g.dtypes), g.differ) for g in report.groups]
    measured = dict.fromkeys(("largest logit", "difference", "transformers'", "bound"), ".3g")
    logits = [
        (
            *(number, found.tokens),
            *("not finite" if x is None else x for x in (found.largest, found.difference, found.theirs, found.bound)),
            found.agreement,
        )
        for number, found in enumerate(report.prompts, 1)
    ]
    lines = [
        f"{pair.checkpoint.path} on {mesh}, beside {pair.folder.path}",
        "",
        table({"parameter": "", "pieces": ",", "elements": ",", "dtype": "", "differ": ","}, groups),
        "",
        table({"prompt": "", "tokens": ",", **measured, "same top 1": ".1%"}, logits),
        "",
    ]
    for name, (ours, theirs) in report.config.items():
        lines.append(f"config: {name} is {ours!r} in the checkpoint and {theirs!r} in the folder")
    lines += report.differing
    failing = [number for number, found in enumerate(report.prompts, 1) if not found.passes]
    lines += [f"prompt {number}: the logits differ by more than rounding" for number in failing]
    return "\n".join([*lines, "The same model." if report.passes else "Not the same model."])
