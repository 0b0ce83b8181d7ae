"""A model's own tokenizer and chat template, through transformers: examples to tokens and a mask of what counts."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data import pretrained
from megacore.data.chat import BadExample, Message, Passage, Span, Template, TrainOn, of_pair, passages
from megacore.data.grouping import grouped
from megacore.data.guard import Guard, GuardError
from megacore.data.images import open_image
from megacore.data.text import Fault, InputError, Record
from megacore.data.tokenizer import files_for_transformers, import_transformers
from megacore.parallel.rank_sets import runs
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.companions import Companion

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ModelFiles:
    """The files that travel with a model's weights, {name: file}, its Hugging Face config, and the number of its
    tokens. no_images: why chats with images are not read; empty where they are."""

    files: Mapping[str, Companion]
    config: Mapping[str, Any]
    vocabulary: int
    no_images: str = "has images, and the model reads text alone: leave them out, or start from a model that also sees"

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Make a temporary folder that transformers loads the tokenizer from, and nothing else. InputError if there is
        none among the files."""
        if not any(name.startswith(("tokenizer", "vocab", "tekken")) for name in self.files):
            raise InputError(
                "examples and streams need the model's tokenizer, and none is there: start from a folder that has it "
                "(checkpoint.init), name one by data.tokenizer, or put its files beside the data"
            )
        with files_for_transformers(self.files, self.config) as folder:
            yield folder


Tokens = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""ids [n], and whether the loss counts the prediction of each [n]."""
ImageTokens = Sequence[tuple[str, Sequence[tuple[int, int]], Sequence[int]]]
"""(file, the runs [first, stop) of the tokens that stand for it, its (height, width) in tokens, empty where positions
do not go by it) of each image of a text, in their order."""


class ModelTokenizer:
    """The tokenizer in a folder. InputError if it cannot be loaded, or does not say where its tokens are."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Any = pretrained.tokenizer(folder)
        except StoreError as error:
            raise InputError(f"the model's tokenizer cannot be loaded: {error}") from error
        self._folder = folder
        if not self._tokenizer.is_fast:
            raise InputError(
                "the model's tokenizer does not say where in a text its tokens are: save it as tokenizer.json"
            )
        self.end: int | None = self._tokenizer.eos_token_id
        self._stops = tuple(token for token in self._tokenizer.convert_ids_to_tokens(_stops(folder)) if token)

    @cached_property
    def template(self) -> Template:
        """The chat template. InputError if there is none."""
        tokenizer = self._tokenizer
        return self._template(tokenizer, tokenizer.chat_template, partial(tokenizer.get_chat_template, None))

    def _template(self, tokenizer: Any, templates: Any, chosen: Callable[[list[Any] | None], str]) -> Template:
        if not templates:
            raise InputError(
                "the data has chats, and the model's tokenizer no chat template: set chat.template to a file of one, "
                "or start from a model that was made for chats"
            )
        named = templates.values() if isinstance(templates, dict) else [templates]
        marks = all(_MARK.search(each) for each in named)

        def render(messages: Sequence[Message], tools: list[Any] | None, prompt: bool) -> tuple[str, list[Span]]:
            from transformers.utils.chat_template_utils import render_jinja_template

            try:
                jinja: Any = render_jinja_template  # what it takes and gives is typed as less than it is
                texts, spans = jinja(
                    conversations=[list(messages)],
                    tools=tools,
                    chat_template=chosen(tools),
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **tokenizer.special_tokens_map,
                )
            except Exception as error:  # a template is a program
                raise BadExample(f"the chat template fails: {str(error) or type(error).__name__}") from error
            return texts[0], spans[0] if spans else []

        special = tuple(tokenizer.get_added_vocab())
        made = Template(render, marks, special, tokenizer.eos_token or "", self._stops)
        if pretrained.wants_parts(lambda messages: render(messages, None, False)[0]):
            return replace(made, render=lambda messages, *rest: render(pretrained.in_parts(messages), *rest))
        return made

    def encode(self, passages: Sequence[Passage]) -> list[Tokens]:
        """Return the tokens of each passage. A bare text begins and ends as the tokenizer would have it. A text is
        encoded as a whole. A token counts where it holds a character that does; the first, which nothing predicts,
        never."""
        found: list[Tokens | None] = [None] * len(passages)
        for templated in (True, False):
            chosen = [index for index, each in enumerate(passages) if each.templated == templated]
            for group in grouped(chosen, lambda index: len(passages[index].text)):
                encoded = self._tokenizer(
                    [passages[index].text for index in group],
                    add_special_tokens=not templated,
                    return_offsets_mapping=True,
                    return_attention_mask=False,
                    truncation=False,
                    verbose=False,
                )
                for index, ids, offsets in zip(group, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                    found[index] = self._counted(passages[index], ids, np.array(offsets, np.int64).reshape(-1, 2))
        return [each for each in found if each is not None]

    def _counted(self, passage: Passage, ids: list[int], offsets: npt.NDArray[np.int64]) -> Tokens:
        counted = counts(offsets, passage.spans)
        if passage.ends and self.end is not None:
            whole = bool(ids) and ids[-1] == self.end
            counted = np.append(counted[:-1] if whole else counted, True)
            if not whole:
                ids.append(self.end)
        counted[:1] = False
        return np.array(ids, np.int64), counted

    def rows(self, rows: Sequence[Mapping[str, Any]], train_on: TrainOn | None) -> list[list[Tokens] | str]:
        """Return the tokens of the examples that each row makes, or why there are none; where ``train_on`` is None, of
        what was chosen and of what was rejected.

        These two begin with the prompt. What counts begins where the tokens of the first of them differ from those of
        the prompt alone: an answer's first characters may be one token with the prompt's last.

        InputError if it takes a chat template, and there is none.
        """
        made: list[list[Passage] | str] = []
        for row in rows:
            try:
                made.append(
                    of_pair(row, lambda: self.template)
                    if train_on is None
                    else passages(row, lambda: self.template, train_on)
                )
            except BadExample as error:
                made.append(str(error))
        encoded = iter(self.encode([each for found in made if isinstance(found, list) for each in found]))
        tokens = [[next(encoded) for _ in found] if isinstance(found, list) else found for found in made]
        if train_on is not None:
            return tokens
        return [found if isinstance(found, str) else _behind(*(ids for ids, _ in found)) for found in tokens]

    # -- chats that have images

    @cached_property
    def _processor(self) -> Any:
        try:
            return pretrained.processor(self._folder)
        except StoreError as error:
            raise InputError(f"the model's processor of images cannot be loaded: {error}") from error

    @cached_property
    def _processor_template(self) -> Template:
        """The processor's chat template, or the tokenizer's where it has none of its own."""
        template = self._processor.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        template = template or self._tokenizer.chat_template
        return self._template(self._processor.tokenizer, template, lambda _: template)

    def with_images(
        self, row: Mapping[str, Any], train_on: TrainOn, folder: Path
    ) -> list[tuple[Tokens, ImageTokens]] | str:
        """Return the tokens of the examples that a chat in parts makes, with their images, or why there are none, as
        transformers' processor makes them. ``folder``: the one that files are named from. InputError as above."""
        try:
            found = passages(row, lambda: self._processor_template, train_on, folder)
            return [self._encode_with_images(each) for each in found]
        except BadExample as error:
            return str(error)

    def _encode_with_images(self, passage: Passage) -> tuple[Tokens, ImageTokens]:
        processor, images = self._processor, passage.images
        pictures, begin = [open_image(each) for each in images], processor.tokenizer.bos_token
        try:
            made = processor(
                text=passage.text,
                images=[pictures] if pictures else None,
                add_special_tokens=begin is None or not passage.text.startswith(begin),
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
        except Exception as error:  # of files of strangers
            raise BadExample(f"the model's processor fails: {str(error) or type(error).__name__}") from error
        ids, offsets = (np.asarray(made[key]).astype(np.int64) for key in ("input_ids", "offset_mapping"))
        places = [(each["span"], each["new_span"]) for each in made.get("text_replacement_offsets", [[]])[0]]
        ends, gained = [end for (_, end), _ in places], [0, *(new - old for (_, old), (_, new) in places)]
        spans = [tuple(char + gained[bisect_right(ends, char)] for char in span) for span in passage.spans]
        tokens, counted = self._counted(replace(passage, spans=spans), ids[0].tolist(), offsets[0])
        start, stop = offsets[0].T
        marks, found = np.isin(tokens[: start.size], processor.image_token_ids), list[npt.NDArray[np.int64]]()
        for _, (first, last) in places:
            own = (start < last) & (stop > first)
            found.append(np.flatnonzero(own & marks))
            counted[: start.size][own] = False
        if len(found) != len(images) or sum(map(len, found)) != marks.sum():
            raise BadExample(
                f"has {len(images)} images, and its text {len(found)} places of one and {marks.sum()} tokens of "
                f"{processor.image_token!r}, {sum(map(len, found))} of them there: write no such token as text"
            )
        grids = np.asarray(made.get("image_grid_thw", np.zeros((len(images), 0), np.int64)))
        sizes = grids[:, 1:] // getattr(processor.image_processor, "merge_size", 1)
        if grids.size and [*sizes.prod(1)] != [*map(len, found)]:
            raise BadExample(
                f"has images of {sizes.tolist()} tokens in height and width, and its text {[*map(len, found)]} of "
                "them: the processor is another model's"
            )
        of_each = [[(first, last + 1) for first, last in runs(own)] for own in found]
        shown = zip(images, of_each, sizes.tolist(), strict=True)
        return (tokens, counted), [(str(each.path), own, size) for each, own, size in shown]


def _behind(prompt: npt.NDArray[np.int64], *texts: npt.NDArray[np.int64]) -> list[Tokens]:
    """Return texts that begin with a prompt; what is behind it counts, but for a first token."""
    sizes = [min(len(prompt), len(text)) for text in texts]
    alike = [prompt[:size] == text[:size] for size, text in zip(sizes, texts, strict=True)]
    begin = max(1, min(size if same.all() else int(same.argmin()) for size, same in zip(sizes, alike, strict=True)))
    return [(text, np.arange(len(text)) >= begin) for text in texts]


def _stops(folder: Path) -> list[int]:
    """Return the tokens at which generating ends, as the configs in a folder have them."""
    said = [read_json(folder / name) for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    found = [each["eos_token_id"] for each in said if isinstance(each, dict) and each.get("eos_token_id") is not None]
    ids = found[0] if found else []
    return [each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int]


class GuardedTokenizer:
    """The tokenizer in a folder, held by another process (`megacore.data.guard`). InputError as of ModelTokenizer."""

    def __init__(self, folder: Path) -> None:
        import_transformers()
        try:
            self._guard = Guard(lambda: ModelTokenizer(folder), (InputError,))
        except GuardError as error:
            raise InputError(f"the model's tokenizer cannot be loaded: {error}") from error

    def examples(self, rows: Sequence[Record], train_on: TrainOn | None) -> list[list[Tokens] | Fault]:
        """Return the tokens of the examples that each row makes, or why there are none; where ``train_on`` is None, of
        the two documents of a pair. InputError if the tokenizer or its template take too much for them, or as of
        :meth:`ModelTokenizer.rows`."""
        try:
            found = self._guard.call("rows", [row.values for row in rows], train_on)
        except GuardError as error:
            more = f", or on one of the {len(rows) - 1:,} after it" if len(rows) > 1 else ""
            reason = f"the model's tokenizer or chat template fails on it{more}: {error}"
            raise InputError(str(rows[0].fault(reason))) from error
        return [
            row.fault(each) if isinstance(each, str) else [(ids, counted) for ids, counted in each]
            for row, each in zip(rows, found, strict=True)
        ]

    def with_images(self, row: Record, train_on: TrainOn) -> list[tuple[Tokens, ImageTokens]] | Fault:
        """Return the tokens of the examples that a chat in parts makes, and their images, or why there are none; errors
        as of :meth:`examples`."""
        try:
            found = self._guard.call("with_images", row.values, train_on, row.path.parent.absolute())
        except GuardError as error:
            raise InputError(str(row.fault(f"the model's processor of images fails on it: {error}"))) from error
        if isinstance(found, str):
            return row.fault(found)
        return [((ids, counted), images) for (ids, counted), images in found]


def counts(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return whether each token [n] counts: whether one of its characters [start, stop), [n, 2], is in one of the
    spans. Some tokenizers leave blanks out of a token's characters. A token of blanks then has none, and is given those
    between the token before it and its end. Where there are none either, it counts within a span, not at its ends."""
    start, stop = offsets.T
    before = np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), stop]))[:-1]
    start = np.where(start == stop, before, start)
    counted = np.zeros(len(offsets), np.bool_)
    for first, last in spans:
        counted |= (start < last) & (stop > first)
    return counted
