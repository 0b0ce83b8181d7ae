"""Models of which one part is of a family here: a text model that also sees. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.config import ModelConfigError

# What is said of the whole, and is the part's as well where that says nothing of its own.
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class Wrapper:
    """The place of a part in the whole, in ``config.json`` and among the tensors.

    Args:
        family: The part's ``model_type``.
        section: The field of ``config.json`` that holds the part's.
        prefix: The beginning of the names of the part's tensors.
        others: The beginnings of the names of all others.
    """

    family: str
    section: str = "text_config"
    prefix: str = "language_model."
    others: tuple[str, ...] = ("multi_modal_projector.", "vision_tower.")


WRAPPERS: Mapping[str, Wrapper] = {"gemma3": Wrapper("gemma3_text")}
"""{Hugging Face's ``model_type``: which part of it is read}."""


def unwrapped(config: Mapping[str, Any]) -> tuple[dict[str, Any], Wrapper | None]:
    """Return (the ``config.json`` of the part that is read, what it is wrapped in), or what is given and None.

    Raises:
        ModelConfigError: the part is not there, or is of another family.
    """
    name = config.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None:
        return dict(config), None
    part = config.get(wrapper.section)
    if not isinstance(part, Mapping):
        raise ModelConfigError(str(name), [f"{wrapper.section} is {part!r}: it must be a mapping, the text model's"])
    if (found := part.get("model_type", wrapper.family)) != wrapper.family:
        raise ModelConfigError(str(name), [f"{wrapper.section} is of family {found!r}: only {wrapper.family} is read"])
    shared = {key: config[key] for key in _SHARED if key in config}
    # transformers ties by what the whole says.
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**shared, **part, **tied, "model_type": wrapper.family}, wrapper
