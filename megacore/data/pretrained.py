"""Tokenizers, models and configs that transformers loads from a folder: none of its code runs, and nothing is looked
for anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

from megacore.store.io.strict_json import StoreError, short

_PROBE = "What is it?"


def tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder. Raises StoreError: whatever its files lead to."""
    from transformers import AutoTokenizer

    found = _load(AutoTokenizer, folder)
    templates, longest = found.chat_template, found.model_max_length
    texts = templates.values() if isinstance(templates, dict) else [templates]
    if not all(isinstance(text, str | None) for text in texts) or not isinstance(longest, int | float):
        raise StoreError(
            f"{folder}: the tokenizer has chat_template={short(templates)} and model_max_length={short(longest)}: they "
            "must be text and a number"
        )
    return found


def wants_parts(render: Callable[[list[Mapping[str, Any]]], str]) -> bool:
    """Return whether a chat template writes a text that is a part of a content, and none that is all of it, as those of
    models that see may. ``render``: messages to what it writes, or an error."""

    def writes(content: object) -> bool:
        try:
            return _PROBE in render([{"role": "user", "content": content}])
        except Exception:  # a template is a program
            return False

    return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])


def in_parts(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages in whose contents texts are parts."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str)
        else each
        for each in messages
    ]


def processor(folder: Path) -> Any:
    """Return what makes tokens and arrays of texts with images. Raises StoreError: whatever its files lead to."""
    from transformers import AutoImageProcessor, AutoProcessor, PaliGemmaProcessor, ProcessorMixin

    found = _load(AutoProcessor, folder)
    if isinstance(found, PaliGemmaProcessor):  # adds to a prompt what the template says here of a whole chat
        for name in ("prepare_inputs_layout", "validate_inputs"):
            setattr(found, name, MethodType(getattr(ProcessorMixin, name), found))
    # The other one computes with torch, which is not to run in a fork.
    found.image_processor = _load(AutoImageProcessor, folder, backend="pil")
    return found


def tower(config: Mapping[str, Any], tensors: Mapping[str, Any], dtype: Any) -> Any:
    """Return a model that also sees without its text model: its ``get_image_features`` is what tower and projector make
    of images. ``config``: the whole ``config.json``; ``tensors``: {name: tensor} of these parts. Raises
    StoreError: they do not belong together."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    _be_quiet()  # of what the text model lacks
    try:
        made = AutoConfig.for_model(**config)
        text = made.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        text.layer_types = []
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(made)]
        attention = {"": "sdpa", "text_config": "eager"}  # there are text models without the former
        options = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
        found, told = kind.from_pretrained(None, config=made, state_dict=dict(tensors), **options)
    except Exception as error:
        raise StoreError(f"transformers cannot make the tower of a {config.get('model_type')}: {error}") from error
    lacking = [name for name in told["missing_keys"] if not name.startswith(_OF_TEXT)]
    if wrong := [*lacking, *told["mismatched_keys"]]:
        raise StoreError(
            f"the tower of a {config.get('model_type')} has other tensors than its config says: {wrong[0]}"
        )
    return found.eval().requires_grad_(False)


_OF_TEXT = ("lm_head.", "model.language_model.", "model.text_model.")


def model(folder: Path, scores: bool = False, **options: Any) -> Any:
    """Return the model of a folder, whose head gives ``scores`` or logits. Raises StoreError: whatever its files lead
    to."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    known = type(_load(AutoConfig, folder)) in MODEL_FOR_CAUSAL_LM_MAPPING  # else one that also sees
    kind: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
    kind = AutoModelForSequenceClassification if scores else kind
    # A config may name an attention that would be fetched from the hub, code and all; the others leave out softcaps.
    # The other products of experts take no sizes but multiples of 16 bytes.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return _load(kind, folder, **eager, **options)


def parameters(model: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield a model's parameters and buffers, each with the names on disk of what it is made of: of one tensor in
    memory there may be several."""
    from transformers.core_model_loading import revert_weight_conversion

    model._weight_conversions = None  # of a folder in fp8 there are some that cannot be reverted
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield tensor, list(revert_weight_conversion(model, {name: tensor}))


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    _be_quiet()
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        raise StoreError(f"transformers cannot load {folder}: {error}") from error


def _be_quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # warnings quote the files
