"""The loss and perplexity of a model on text, and what it makes of pairs, as `megacore evaluate` and
:func:`megacore.evaluate` find them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megacore.data.chat import TrainOn
from megacore.inference.evaluation_data import LONGEST, Document, DocumentFiles, Windows, data_files, is_tokens
from megacore.inference.loaded_model import ModelSetup
from megacore.inference.texts import Texts
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.weights.layout import MeshShape
from megacore.store.io.errors import StoreError, below_1
from megacore.store.weight_folders.folder import WeightFolder

if TYPE_CHECKING:  # what is wrong with the data is said without waiting for torch
    import torch

    from megacore.inference.perplexity import EvaluationResult
    from megacore.models.assemble import Model
    from megacore.parallel.mesh import Mesh

Watched = Callable[[Iterable[Any]], Iterable[Any]]
"""Shows what goes by."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How data is read, by the arguments of :func:`evaluate`."""

    text_key: str = "text"
    count: TrainOn = "assistant"
    sequence_length: int | None = None
    stride: int | None = None
    tokens: int = 4096
    by_position: int | None = None
    split: str | None = None


@dataclass(frozen=True)
class EvaluationSetup:
    """An evaluation that has been checked: its documents, or pairs of them, and how they are cut into windows and
    microbatches."""

    files: DocumentFiles
    windows: Windows
    tokens: int
    pairs: bool

    @classmethod
    def of(cls, folder: WeightFolder, data: Sequence[Path], how: EvaluationOptions) -> EvaluationSetup:
        """Return what the arguments of :func:`evaluate` describe; it raises as that does."""
        sizes = ("sequence_length", "stride", "tokens", "by_position")
        problems = below_1(**{name: getattr(how, name) for name in sizes})
        if how.count not in get_args(TrainOn):
            problems.append(f"`count={how.count}`: choose from {', '.join(get_args(TrainOn))}")
        longest = folder.config.max_positions
        usual = longest or LONGEST
        length = how.sequence_length or (usual if how.by_position else min(usual, LONGEST))
        step = how.stride or length
        if longest is not None and length > longest:
            problems.append(f"`sequence_length={length}`: the model has {longest} positions, choose up to those")
        if step > length:
            problems.append(
                f"`stride={step}` would leave out tokens between windows of {length}: choose up to {length}"
            )
        if problems:
            raise StoreError("\n".join(problems))
        data = [file for each in data for file in data_files(each, how.split)]
        files = DocumentFiles(data, folder.config.vocab_size, _texts(folder, data), how.text_key, how.count)
        pairs = files.are_pairs
        if not pairs:
            folder.check_predicts()
        elif folder.config.labels > 1:
            raise StoreError(f"{folder.path} has {folder.config.labels} labels: pairs are told apart by one score")
        elif how.stride is not None or how.by_position is not None:
            raise StoreError("the data has pairs, which are read as wholes: leave out `stride` and `by_position`")
        if next(files.pairs() if pairs else files.documents(), None) is None:
            raise StoreError("there are no documents in the data")
        if pairs and how.sequence_length is None:
            length = longest or sys.maxsize
        return cls(files, Windows(length, step, how.by_position), how.tokens, pairs)

    def measure(self, model: Model, watched: Watched = iter) -> dict[str, Any]:
        """Return what ``megacore evaluate --json`` prints, the same on every rank of the model's mesh, which all call
        this; ``watched``: shows the documents, or pairs, go by. Raises StoreError: no document has a token to predict,
        or one cannot be read."""
        from megacore.inference import perplexity

        if self.pairs:
            return self._of_pairs(model, watched)
        measured = perplexity.evaluate(model, watched(self.files.documents()), self.windows, self.tokens)
        if not measured.tokens:
            raise StoreError("the data has no token to predict: no document has more than one")
        return self._data(measured)

    def _of_pairs(self, model: Model, watched: Watched) -> dict[str, Any]:
        from megacore.inference import perplexity

        seen, longest = 0, self.windows.length

        def fitting(pairs: Iterable[Sequence[Document]]) -> Iterator[Sequence[Document]]:
            nonlocal seen
            for pair in pairs:
                seen += 1
                if max(len(document.tokens) for document in pair) <= longest:
                    yield pair

        measured = perplexity.of_pairs(model, fitting(watched(self.files.pairs())), self.tokens)
        rewards, pairs = measured.rewards, len(measured.rewards)
        if not pairs:
            raise StoreError(f"no pair of the data has at most {longest:,} tokens in each document")
        data: dict[str, Any] = {"pairs": pairs, "too_long": seen - pairs}
        each = {"": rewards} if model.config.labels else {"": rewards, "_per_token": rewards / measured.counted}
        for name, values in each.items():
            margin = values[:, 0] - values[:, 1]
            data |= {f"accuracy{name}": float((margin > 0).mean()), f"margin{name}": float(margin.mean())}
        return data

    def _data(self, measured: EvaluationResult) -> dict[str, Any]:
        loss, size = measured.loss / measured.tokens, measured.size
        per_byte = measured.loss / size if size else None
        data: dict[str, Any] = {
            "documents": measured.documents,
            "tokens": measured.tokens,
            "bytes": size,
            "sequence_length": self.windows.length,
            "stride": self.windows.stride,
            "loss": loss,
            "perplexity": _exp(loss),
            "loss_per_byte": per_byte,
            "perplexity_per_byte": None if per_byte is None else _exp(per_byte),
            "bits_per_byte": None if per_byte is None else per_byte / math.log(2),
        }
        if (by := self.windows.bucket) is not None:
            data["by_position"] = [
                {"from": at * by, "to": (at + 1) * by, "tokens": tokens, "loss": loss / tokens if tokens else None}
                for at, (tokens, loss) in enumerate(measured.buckets)
            ]
        return data


def _texts(folder: WeightFolder, data: Sequence[Path]) -> Texts | None:
    """Return the tokenizer; None where it is not needed and not there."""
    try:
        return Texts.of(folder)
    except StoreError:
        if all(map(is_tokens, data)):
            return None
        raise


def _exp(loss: float) -> float | None:
    """Return exp(x); None where it is no number that JSON has."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else None


def evaluate(
    folder: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    text_key: str = "text",
    count: TrainOn = "assistant",
    sequence_length: int | None = None,
    stride: int | None = None,
    tokens: int = 4096,
    by_position: int | None = None,
    split: str | None = None,
    base: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    mesh: MeshShape | Mesh | None = None,
    etp: int = 1,
    exchange: ContextExchange = "auto",
) -> dict[str, Any]:
    """Load a model and return its loss and perplexity on text: what ``megacore evaluate --json`` prints. Of rows that
    have what was ``chosen`` and ``rejected`` it is how often, and by how much, the former's score or log-probability is
    higher; a reward model takes no others.

    Documents are read in windows. Each token of a document is predicted once, but for its first. Losses are in nats,
    per token and per byte of the text (None where the bytes are not known, as of chats); ``bits_per_byte`` is in bits.

    Args:
        folder, base, dtype, device, mesh, etp, exchange: Those of :func:`megacore.load_model`; ranks of dp share out
            the windows.
        data: Text files, .jsonl, .parquet, folders of them, token files without their suffix, or data sets of the hub
            (``OWNER/NAME@REVISION``); one or several.
        text_key: The key of the text in a row of .jsonl or .parquet.
        count: The part of a chat that counts: what the "assistant" says, its "last" message, or "all".
        sequence_length: Tokens of a window; None for the model's positions, up to 2048.
        stride: Tokens from a window to the next; None for their length: no overlap.
        tokens: Tokens that are computed at once, at least a window.
        by_position: Also the loss of so many successive positions of the documents each, under ``by_position``.
        split: The split of folders and data sets; None for all of a folder, and of a data set the first of
            "validation", "valid", "dev" and "test" that is there.

    Raises:
        StoreError: as :func:`megacore.load_model`, or something is wrong with the data or the numbers, before the
            weights are read; on every rank.
    """
    setup = ModelSetup.check(folder, base=base, dtype=dtype, device=device, mesh=mesh, etp=etp, exchange=exchange)
    paths = [Path(each) for each in ([data] if isinstance(data, str | Path) else data)]
    how = EvaluationOptions(text_key, count, sequence_length, stride, tokens, by_position, split)
    asked = EvaluationSetup.of(setup.folder, paths, how)
    with setup.load() as loaded:
        return asked.measure(loaded.model)
