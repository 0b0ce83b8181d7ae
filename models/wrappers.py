"""Models of which one part is of a family here: a text model that also sees. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.config import SCORING, ModelConfig, ModelConfigError

# What is said of the whole, and is the part's as well where that says nothing of its own.
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype", "transformers_version")
_OF_WHOLE = ("architectures", "model_type", "vision_config")
_ROPES = ("rope_parameters", "rope_scaling")
# Tokens that stand for images, which files say of the whole, of the part or of both.
_IMAGES = ("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id", "vision_token_id")
# What transformers saves a field by, and what files of its makers have.
_OTHER_NAMES = {"num_local_experts": "num_experts"}
# How the experts of a part lie in the file, which its tensors say.
LIE = "stacked_experts"
# How the three numbers of a position share out a head; of text the three are one number.
_SECTIONS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class Naming:
    """The names of a text model's tensors within the whole. ``body``: the beginning that stands there for its
    ``model.``; ``head``: that before all other names."""

    body: str
    head: str = ""

    def outside(self, name: str) -> str:
        """Return the name in the whole of a tensor of the part."""
        inner = name.removeprefix(_BODY)
        return (self.head if inner == name else self.body) + inner

    def inside(self, name: str) -> str | None:
        """Return the name by itself of a tensor of the whole; None for one of another part."""
        if name.startswith(self.body):
            return _BODY + name.removeprefix(self.body)
        inner = name.removeprefix(self.head) if name.startswith(self.head) else _BODY
        return None if inner.startswith(_BODY) else inner


_BODY = "model."
NAMINGS = (
    Naming("model.language_model."),
    Naming("language_model.model.", "language_model."),
    Naming("model.text_model."),
    Naming(_BODY),
)
"""Those that transformers has written, through its releases."""


@dataclass(frozen=True)
class Wrapper:
    """The place of a part in the whole, in ``config.json`` and among the tensors.

    Args:
        families: What the part's ``model_type`` may be; the first, where it has none.
        called: What the part may say instead of the first family's name.
        section: The field of ``config.json`` that holds the part's.
        others: The beginnings of the names of all other tensors, with ``model.`` before them or not.
        defaults: What transformers' class takes for fields that the part leaves out, where the family's takes another.
        harmless: Fields of the part that say nothing of text.
        flat: Whether there are files in which the part's fields stand among those of the whole.
        no_images: Why chats that have images are not trained on; empty if they are.
        sections: Where tokens of images have three positions, in time, height and width: how many frequencies turn by
            each, if the file does not say it.
        interleaved: Whether frequencies that turn by each come in turns, not one section after the other.
        added: Where layers of the tower give more of an image, which is added to what the first layers give: the field
            of ``vision_config`` that lists them, and what transformers' class has.
        projector: The beginnings of the names of those tensors that connect the tower to the text model.
    """

    families: tuple[str, ...]
    called: str = ""
    section: str = "text_config"
    others: tuple[str, ...] = ("multi_modal_projector.", "vision_tower.", "image_newline")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    flat: bool = False
    no_images: str = ""
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    added: tuple[str, tuple[int, ...]] = ("", ())
    projector: tuple[str, ...] = ("multi_modal_projector.", "image_newline")

    def carries(self, name: str) -> bool:
        """Return whether a tensor of the whole is of another part."""
        return name.startswith(self.others) or name.removeprefix(_BODY).startswith(self.others)

    def projects(self, name: str) -> bool:
        """Return whether a tensor that is carried is of the projector."""
        return name.removeprefix(_BODY).startswith(self.projector)

    def naming(self, names: Iterable[str]) -> Naming:
        """Return how the tensors of the text part are named among those of the whole."""
        of_text = [name for name in names if not self.carries(name)]
        found = (each for each in NAMINGS if any(name.startswith(each.body) for name in of_text))
        return next(found, NAMINGS[0])


def _sizes(vocabulary: int, embed: int, mlp: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma": _sizes(256000, 3072, 24576, 28, 16, 8192),
    "gemma2": _sizes(256000, 2304, 9216, 26, 8, 8192),
    "llama": _sizes(32000, 4096, 11008, 32, 32, 2048),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 131072),
    "qwen2": _sizes(151936, 4096, 22016, 32, 32, 32768),
    "qwen3": _sizes(151936, 4096, 22016, 32, 32, 32768),
}
"""{a family: the sizes that transformers' class takes}: files of parts say only what is otherwise."""
_QWEN2 = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_window_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_MOE = {
    **_sizes(151936, 2048, 5632, 24, 16, 128000),
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,  # whatever a file says
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "rope_theta": 5e5,
    LIE: "inputs",
}
_VISUAL = {"others": ("visual.",), "projector": ("visual.merger.", "visual.deepstack_merger_list.")}
_QWEN2_VL: Mapping[str, Any] = {**_VISUAL, "defaults": _QWEN2, "flat": True, "sections": (16, 24, 24)}
_QWEN3_VL: Mapping[str, Any] = {
    **_VISUAL,
    "sections": (24, 20, 20),
    "interleaved": True,
    "added": ("deepstack_visual_indexes", (8, 16, 24)),
}
_QWEN3_5: Mapping[str, Any] = {**_VISUAL, "sections": (11, 11, 10), "interleaved": True}
_GLM4V: Mapping[str, Any] = {**_VISUAL, "sections": (8, 12, 12)}
_TOLD = "its layers are told of tokens, and images have none of those"
_SEES_AND_HEARS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_SMOL = Wrapper(
    ("llama",),
    others=("connector.", "vision_model."),
    harmless=(
        "_flash_attn_2_enabled",
        "is_llama_config",
        "neftune_noise_alpha",
        "perceiver_config",
        "pixel_shuffle_factor",
        "qk_layer_norms",
        "use_resampler",
    ),
    projector=("connector.",),
)

WRAPPERS: Mapping[str, Wrapper] = {
    "aria": Wrapper(("aria_text",)),
    "gemma3": Wrapper(("gemma3_text",)),
    "gemma3n": Wrapper(
        ("gemma3n_text",),
        others=_SEES_AND_HEARS,
        no_images=_TOLD,
    ),
    "gemma4": Wrapper(("gemma4_text",), others=_SEES_AND_HEARS, projector=("embed_vision.",)),
    "gemma4_unified": Wrapper(
        ("gemma4_unified_text",),
        others=("vision_embedder.", "embed_vision.", "embed_audio."),
        no_images="transformers has another mask of its images in training than in generation",
    ),
    "glm4v": Wrapper(
        ("glm4",),
        "glm4v_text",
        defaults={"head_dim": None, "pad_token_id": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
        **_GLM4V,
    ),
    "glm4v_moe": Wrapper(("glm4_moe",), "glm4v_moe_text", defaults={"attention_bias": True}, **_GLM4V),
    "idefics3": _SMOL,
    "internvl": Wrapper(("qwen2", "qwen3", "llama")),
    "llama4": Wrapper(
        ("llama4_text",),
        others=("multi_modal_projector.", "vision_model."),
        no_images="transformers makes its images by torch alone",
    ),
    "llava": Wrapper(("llama", "mistral", "qwen2")),
    "llava_next": Wrapper(("llama", "mistral", "qwen2")),
    "llava_onevision": Wrapper(("qwen2",)),
    "mistral3": Wrapper(("mistral", "ministral3", "mistral4")),
    # Text without an image is what follows a prompt there: a token looks at those before it.
    "paligemma": Wrapper(
        ("gemma", "gemma2"),
        harmless=("num_image_tokens", "projection_dim", "use_bidirectional_attention"),
    ),
    "qwen2_5_vl": Wrapper(("qwen2",), "qwen2_5_vl_text", **_QWEN2_VL),
    "qwen2_vl": Wrapper(("qwen2",), "qwen2_vl_text", **_QWEN2_VL),
    "qwen3_5": Wrapper(("qwen3_5_text",), **_QWEN3_5),
    "qwen3_5_moe": Wrapper(("qwen3_5_moe_text",), **_QWEN3_5),
    "qwen3_vl": Wrapper(("qwen3",), "qwen3_vl_text", defaults={"rope_theta": 5e5}, **_QWEN3_VL),
    "qwen3_vl_moe": Wrapper(
        ("qwen3_moe",),
        "qwen3_vl_moe_text",
        defaults=_QWEN3_MOE,
        harmless=("norm_topk_prob", "tie_word_embeddings"),
        **_QWEN3_VL,
    ),
    "smolvlm": _SMOL,
}
"""{Hugging Face's ``model_type``: which part of it is read}."""


SAME: Mapping[str, str] = {"gpt-sw3": "gpt2", "kimi_k2": "deepseek_v3"}
"""{a ``model_type`` that has no class of its own: the family whose class its makers name}."""


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
    named = config.get("architectures")
    if isinstance(named, list) and any(str(each).endswith(SCORING) for each in named):
        raise ModelConfigError(
            str(name), [f"architectures is {named!r}: of larger models only language models are read"]
        )
    part = config.get(wrapper.section)
    if _is_flat(config, wrapper):
        part = {key: value for key, value in config.items() if key not in _OF_WHOLE}
    if not isinstance(part, Mapping):
        raise ModelConfigError(str(name), [f"{wrapper.section} is {part!r}: it must be a mapping, the text model's"])
    found = part.get("model_type", wrapper.families[0])
    is_called = bool(wrapper.called) and found in (wrapper.called, wrapper.families[0])
    found = wrapper.families[0] if is_called else found
    if found not in wrapper.families:
        only = " and ".join(wrapper.families)
        raise ModelConfigError(str(name), [f"{wrapper.section} is of family {found!r}: only {only} is read"])
    shared = {key: config[key] for key in _SHARED if key in config}
    # transformers ties by what the whole says.
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    plain = {key: value for key, value in part.items() if key not in (*_IMAGES, *wrapper.harmless)}
    ropes = {key: _one_section(part[key]) for key in _ROPES if isinstance(part.get(key), Mapping)}
    said = {key for rope in ropes.values() for key in rope} | {_OTHER_NAMES.get(key) for key in part}
    left_out = wrapper.defaults if is_called else _LEFT_OUT.get(str(found), {})
    defaults = {key: value for key, value in left_out.items() if key not in said}
    return {**defaults, **shared, **plain, **ropes, **tied, "model_type": found}, wrapper


def images_refusal(whole: Mapping[str, Any], config: ModelConfig) -> str:
    """Return why a model cannot be trained on chats that have images; empty if it can. ``whole``: the ``config.json``
    of what it is the text part of; ``config``: that of the part."""
    reason = WRAPPERS[str(whole["model_type"])].no_images or (_TOLD if "input" in config.sizes else "")
    run = ", ".join(name for name, each in WRAPPERS.items() if not each.no_images)
    return reason and (
        f"has images, which are not trained on in a {whole['model_type']}, as {reason}: leave them out, or start from "
        f"one of {run}"
    )


def rope_axes(whole: Mapping[str, Any], config: ModelConfig) -> list[int]:
    """Return by which position of a token each frequency of the rope turns, 0 in time, 1 in height, 2 in width; empty
    where tokens have one. ``config``: that of the part. Raises ModelConfigError: the file shares them out otherwise."""
    name, wrapper = str(whole["model_type"]), WRAPPERS[str(whole["model_type"])]
    if not wrapper.sections:
        return []
    part: Any = whole if _is_flat(whole, wrapper) else whole[wrapper.section]
    ropes = [rope for key in _ROPES if isinstance(rope := part.get(key), Mapping)]
    sections: Any = next((rope[_SECTIONS[0]] for rope in ropes if _SECTIONS[0] in rope), wrapper.sections)
    (rope,) = config.anatomy.ropes.values()
    count = rope.turning(config.sizes["head"]) // 2
    numbers = sections if isinstance(sections, list | tuple) and all(type(n) is int for n in sections) else ()
    if len(numbers) != 3 or min(numbers) < 0 or sum(numbers) != count:
        problem = f"{_SECTIONS[0]} is {sections!r}: it must be three numbers that share out {count} frequencies"
        raise ModelConfigError(name, [problem])
    if wrapper.interleaved:
        return [n % 3 if n < 3 * numbers[n % 3] else 0 for n in range(count)]
    return [axis for axis, size in enumerate(numbers) for _ in range(size)]


def image_problems(whole: Mapping[str, Any], config: ModelConfig, first: int) -> Iterator[str]:
    """Yield why a model that sees is not trained on images as it stands. ``config``: that of its text part; ``first``:
    the layers in the first part of the pipeline."""
    name = str(whole["model_type"])
    key, default = WRAPPERS[name].added
    vision = whole.get("vision_config")
    listed = vision.get(key, default) if isinstance(vision, Mapping) else default
    if isinstance(listed, list | tuple) and first < len(listed):
        yield (
            f"mesh.pp, pipeline.chunks: a {name} adds features of images to what its first {len(listed)} layers give, "
            f"and the first part of the pipeline has {first}: give it {len(listed)} with pipeline.layers_per_stage, or "
            "choose a smaller mesh.pp or pipeline.chunks"
        )
    try:
        rope_axes(whole, config)
    except ModelConfigError as error:
        yield from (f"model: {problem}" for problem in error.problems)


def rewrapped(whole: Mapping[str, Any], part: Mapping[str, Any], unknown: Collection[str]) -> dict[str, Any]:
    """Return the ``config.json`` of a whole with what its part says now, all else as it is.

    Args:
        part: The fields of the part, as :func:`unwrapped` has them.
        unknown: Fields that the part lacks for its family does not know them: they stay.
    """
    before, wrapper = unwrapped(whole)
    assert wrapper is not None
    made: dict[str, Any] = dict(whole)
    inner = made if _is_flat(whole, wrapper) else dict(whole[wrapper.section])
    if inner is not made:
        made[wrapper.section] = inner
    ropes = [rope for key in _ROPES if isinstance(rope := inner.get(key), Mapping)]
    sections = {key: rope[key] for rope in ropes for key in _SECTIONS if key in rope}
    for key in [key for key in {**before, **part} if key != LIE]:
        places = (inner, made) if key in (*_SHARED, "tie_word_embeddings") else (inner,)
        if key not in part and key not in unknown:
            for each in places:
                each.pop(key, None)
        elif key in part and (key not in before or before[key] != part[key]):
            value = part[key]
            for each in places:
                if each is inner or key in each:
                    each[key] = {**value, **sections} if key in _ROPES and isinstance(value, Mapping) else value
    return made


def _is_flat(config: Mapping[str, Any], wrapper: Wrapper) -> bool:
    return wrapper.flat and wrapper.section not in config


def _one_section(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope as it is of text."""
    plain = {key: value for key, value in rope.items() if key not in _SECTIONS}
    return {
        key: "default" if value == "mrope" and key in ("type", "rope_type") else value for key, value in plain.items()
    }
