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
        families: What the part's ``model_type`` may be; the first, where it has none.
        section: The field of ``config.json`` that holds the part's.
        prefix: The beginning of the names of the part's tensors.
        others: The beginnings of the names of all others.
    """

    families: tuple[str, ...]
    section: str = "text_config"
    prefix: str = "language_model."
    others: tuple[str, ...] = ("multi_modal_projector.", "vision_tower.")


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(("gemma3_text",)),
    "mistral3": Wrapper(("mistral", "ministral3")),
}
"""{Hugging Face's ``model_type``: which part of it is read}."""


SAME: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""{a ``model_type`` that transformers does not know: the family whose class its makers name}."""


def unwrapped(config: Mapping[str, Any]) -> tuple[dict[str, Any], Wrapper | None]:
    """Return (the ``config.json`` of the part that is read, what it is wrapped in), or what is given and None.

    Raises:
        ModelConfigError: the part is not there, or is of another family.
    """
    name = config.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None:
        same = SAME.get(name) if isinstance(name, str) else None
        return {**config, **({} if same is None else {"model_type": same})}, None
    part = config.get(wrapper.section)
    if not isinstance(part, Mapping):
        raise ModelConfigError(str(name), [f"{wrapper.section} is {part!r}: it must be a mapping, the text model's"])
    if (found := part.get("model_type", wrapper.families[0])) not in wrapper.families:
        only = " and ".join(wrapper.families)
        raise ModelConfigError(str(name), [f"{wrapper.section} is of family {found!r}: only {only} is read"])
    shared = {key: config[key] for key in _SHARED if key in config}
    # transformers ties by what the whole says.
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    return {**shared, **part, **tied, "model_type": found}, wrapper
