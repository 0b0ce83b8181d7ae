"""Tiny models that also see, both parts of random weights, and a prompt with an image for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig
from transformers.processing_utils import ProcessorMixin

VOCAB, IMAGE = 64, 60
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Of 2 x 2 patches.
VIT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
# Of 4 x 4 patches, of which 2 x 2 make a token.
QWEN_VIT = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
GLM_ROPE = {**SECTIONS, "mrope_section": [0, 1, 1], "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
    "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
}

CHUNKS = {"attention_chunk_size": 8, "interleave_moe_layer_step": 2}


def pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Seeing:
    """A model: what its text config has beside :data:`TEXT`, that of its tower, fields of the whole, how many tokens
    an image is, and the image."""

    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    tokens: int
    image: Callable[[], Mapping[str, Any]]
    whole: Mapping[str, Any] = field(default_factory=lambda: {"image_token_id": IMAGE})


def _square() -> Mapping[str, Any]:
    return {"pixel_values": pixels(1, 3, 16, 16)}


def _sized() -> Mapping[str, Any]:
    return {**_square(), "image_sizes": torch.tensor([[16, 16]])}


def _in_five() -> Mapping[str, Any]:
    return {"pixel_values": pixels(1, 5, 3, 16, 16), "image_sizes": torch.tensor([[32, 32]])}


def _of_many() -> Mapping[str, Any]:
    return {"pixel_values": pixels(1, 1, 3, 16, 16)}


def _patches(height: int = 4, width: int = 4) -> Mapping[str, Any]:
    return {"pixel_values": pixels(height * width, 96), "image_grid_thw": torch.tensor([[1, height, width]])}


def _places() -> Mapping[str, Any]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
    return {"pixel_values": pixels(1, 16, 48), "image_position_ids": places[None]}


_INDEX = {"image_token_index": IMAGE}
_QWEN = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
_GLM = {
    "image_token_id": IMAGE,
    "video_token_id": 61,
    "image_start_token_id": 62,
    "image_end_token_id": 63,
    "video_start_token_id": 58,
    "video_end_token_id": 59,
}
_SMOL = Seeing({"model_type": "llama"}, VIT, 1, _of_many, {"image_token_id": IMAGE, "scale_factor": 2})
# What a text model needs where it is another than that of :data:`SEEING`.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 6},
    "mistral4": {
        "num_key_value_heads": 4,
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "v_head_dim": 8,
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
    },
}
_LLAMA_TOWER = ("vision_output_dim", "projector_input_dim", "projector_output_dim")
_CLIP = {**VIT, "model_type": "clip_vision_model"}
_FIVE = {**_INDEX, "image_grid_pinpoints": [[32, 32]]}

_GEMMA4 = {
    "sliding_window": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "pad_token_id": 0,
}


_GEMMA4_SEES = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


class Tower(PreTrainedModel):
    """In place of that of Gemma 3n, for which transformers asks a library that is not here."""

    config_class = Gemma3nVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.timm_model = torch.nn.Conv2d(3, config.hidden_size, 8, 8)
        self.post_init()

    def forward(self, pixel_values: Tensor, **others: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.timm_model(pixel_values))


AutoModel.register(Gemma3nVisionConfig, Tower, exist_ok=True)
_HEARS = {
    "hidden_size": 16,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": (4, 4),
}

SEEING: Mapping[str, Seeing] = {
    "aria": Seeing(
        {"moe_num_experts": 4, "intermediate_size": 16},
        VIT,
        2,
        _square,
        {**_INDEX, "projector_patch_to_query_dict": {4: 2}},
    ),
    "gemma3": Seeing(
        {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
        VIT,
        4,
        _square,
        {**_INDEX, "mm_tokens_per_image": 4},
    ),
    "gemma3n": Seeing(
        {
            "sliding_window": 8,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 58,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "laurel_rank": 3,
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
            "pad_token_id": 0,
        },
        {"hidden_size": 16, "vocab_offset": 58, "vocab_size": 4},
        4,
        _square,
        {
            "image_token_id": IMAGE,
            "vision_soft_tokens_per_image": 4,
            "audio_config": {**_HEARS, "vocab_offset": 62, "vocab_size": 2},
        },
    ),
    "gemma4": Seeing(
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
        },
        {**VIT, "patch_size": 4, "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2},
        4,
        _places,
        {"image_token_id": 70},  # beyond the text's: transformers takes another embedding for it in any prompt
    ),
    "gemma4_unified": Seeing(
        _GEMMA4,
        {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16},
        16,
        _places,
        {"image_token_id": 70},
    ),
    "glm4v": Seeing({"rope_parameters": SECTIONS}, {**QWEN_VIT, "image_size": 16}, 4, _patches, _GLM),
    "glm4v_moe": Seeing(
        {**EXPERTS, "rope_parameters": GLM_ROPE, "n_routed_experts": 4, "first_k_dense_replace": 1},
        {**QWEN_VIT, "image_size": 16},
        4,
        _patches,
        _GLM,
    ),
    "idefics3": _SMOL,
    "internvl": Seeing({"model_type": "qwen2"}, {**VIT, "image_size": [16, 16], "patch_size": [8, 8]}, 1, _square),
    "llama4": Seeing(
        {**CHUNKS, "num_local_experts": 4, "intermediate_size_mlp": 40},
        {**VIT, "intermediate_size": 64, **dict.fromkeys(_LLAMA_TOWER, 16)},
        1,
        _square,
        {"image_token_index": IMAGE, "boi_token_index": 61, "eoi_token_index": 62},
    ),
    "llava": Seeing({"model_type": "llama"}, _CLIP, 4, _square, _INDEX),
    "llava_next": Seeing({"model_type": "mistral"}, _CLIP, 24, _in_five, _FIVE),
    "llava_onevision": Seeing(
        {"model_type": "qwen2"}, {**VIT, "model_type": "siglip_vision_model"}, 24, _in_five, _FIVE
    ),
    "mistral3": Seeing(
        {"model_type": "mistral"},
        {**VIT, "model_type": "pixtral"},
        4,
        _sized,
        {**_INDEX, "spatial_merge_size": 1},
    ),
    "paligemma": Seeing(
        {"model_type": "gemma"},
        {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        4,
        _square,
        {**_INDEX, "projection_dim": 32, "hidden_size": 32},
    ),
    "qwen2_5_vl": Seeing(
        {"rope_parameters": SECTIONS}, {**QWEN_VIT, "window_size": 16, "fullatt_block_indexes": [1]}, 4, _patches, _QWEN
    ),
    "qwen2_vl": Seeing(
        {"rope_parameters": SECTIONS},
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        4,
        _patches,
        _QWEN,
    ),
    "qwen3_5": Seeing(DELTA, {**QWEN_VIT, "num_position_embeddings": 16}, 4, _patches, _QWEN),
    "qwen3_5_moe": Seeing(
        {**DELTA, **EXPERTS, "num_experts": 4, "intermediate_size": 16, "shared_expert_intermediate_size": 16},
        {**QWEN_VIT, "num_position_embeddings": 16},
        4,
        _patches,
        _QWEN,
    ),
    "qwen3_vl": Seeing(
        {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        {**QWEN_VIT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        4,
        _patches,
        _QWEN,
    ),
    "qwen3_vl_moe": Seeing(
        {
            **EXPERTS,
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True},
        },
        {**QWEN_VIT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        4,
        _patches,
        _QWEN,
    ),
    "smolvlm": _SMOL,
}


SHOWN: Mapping[str, Seeing] = {
    **SEEING,
    "gemma4": replace(SEEING["gemma4"], text=_GEMMA4_SEES, whole={"image_token_id": IMAGE}),
}
"""Those that are shown images here: of Gemma 4 one whose layers are told of no tokens."""
# What a processor makes of images has other sizes than a tower has here.
WITH_KINDS = tuple(name for name, each in SEEING.items() if each.image in (_patches, _places))
"""Those that are told of each token whether an image has it."""
_ARIA = {**VIT, "patch_size": 490, "image_size": 980}
PROCESSED: Mapping[str, Seeing] = {
    "aria": replace(SEEING["aria"], tower=_ARIA, whole={**_INDEX, "projector_patch_to_query_dict": {4: 2}}),
    "gemma3": replace(SEEING["gemma3"], whole={"image_token_index": 263, "mm_tokens_per_image": 4}),
    **{name: SEEING[name] for name in ("idefics3", "llava", "llava_next", "qwen3_vl")},
    "paligemma": replace(SEEING["paligemma"], tower={**SEEING["paligemma"].tower, "patch_size": 4}),
}
"""Those of which transformers has a processor that needs no torchvision, or that of videos alone."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set text = [{'type': 'text', 'text': m['content']}] %}"
    "{% for part in (text if m['content'] is string else m['content']) %}"
    "{% if part['type'] == 'image' %}<image>"
    "{% elif m['role'] == 'assistant' %}{% generation %}{{ part['text'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] != 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved(name: str, path: Path, of: Seeing | None = None, /, **text: Any) -> Path:
    """A folder as transformers saves it, with the files of a processor. ``text``: fields of the text config."""
    torch.manual_seed(0)
    of = of or SEEING[name]
    kind: Any = CONFIG_MAPPING[name]
    own = PARTS.get(text.get("model_type", ""), {})
    config = kind(text_config={**TEXT, **of.text, **text, **own}, vision_config=dict(of.tower), **of.whole)
    made = AutoModelForImageTextToText.from_config(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"image_std": [0.5], "auto_map": {"AutoImageProcessor": "code.P"}}')
    return path


@cache
def qwen_processor() -> type[ProcessorMixin]:
    """That of Qwen-VL without its processor of videos, which wants torchvision; transformers finds it from here on."""
    from transformers import Qwen3VLProcessor

    class QwenProcessor(Qwen3VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.video_token = tokenizer.image_token, "<global-img>"
            self.image_token_id, self.video_token_id = (
                tokenizer.convert_tokens_to_ids(each) for each in (self.image_token, self.video_token)
            )

    AutoProcessor.register(CONFIG_MAPPING["qwen3_vl"], QwenProcessor, exist_ok=True)
    return QwenProcessor


def processed(name: str, path: Path) -> Path:
    """A folder of one of PROCESSED with a processor, whose bytes and marks are tokens of its model."""
    from transformers import (
        AriaProcessor,
        Gemma3Processor,
        Idefics3Processor,
        LlavaNextProcessor,
        LlavaProcessor,
        PaliGemmaProcessor,
    )
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    vocabulary = 1440 if name == "paligemma" else 288  # whose processor adds places and masks to any tokenizer
    saved(name, path, PROCESSED[name], vocab_size=vocabulary, max_position_embeddings=256)
    (path / "preprocessor_config.json").unlink()
    marks = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<global-img>"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*tokens[:IMAGE], "<image>", *tokens[IMAGE:], *marks, "<end_of_utterance>"]
    fast = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens(["<image>", *marks, "<end_of_utterance>"])
    first = ("<s>", fast.token_to_id("<s>"))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    crops = {"image_token": "<global-img>", "boi_token": "<image>", "eoi_token": "<fake_token_around_image>"}
    named_image = {key: {"image_token": "<image>"} for key in ("aria", "paligemma", "qwen3_vl")}
    more = {**named_image, "gemma3": crops}.get(name, {})
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=fast, **named, extra_special_tokens=more)
    square: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    patches = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    of_qwen: Any = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
    of_siglip: Any = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    of_siglip.image_seq_length = 16
    made: Any = {
        "aria": lambda: AriaProcessor(AriaImageProcessorPil(), tokenizer, size_conversion={980: 2}),
        "gemma3": lambda: Gemma3Processor(
            Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer, image_seq_length=4
        ),
        "idefics3": lambda: Idefics3Processor(
            Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}), tokenizer, 1
        ),
        "llava": lambda: LlavaProcessor(CLIPImageProcessorPil(**square), tokenizer, **patches),
        "llava_next": lambda: LlavaNextProcessor(
            LlavaNextImageProcessorPil(**square, image_grid_pinpoints=[[32, 32]]), tokenizer, **patches
        ),
        "paligemma": lambda: PaliGemmaProcessor(of_siglip, tokenizer),
        "qwen3_vl": lambda: qwen_processor()(Qwen2VLImageProcessorPil(**of_qwen), tokenizer),
    }[name]()
    made.chat_template = CHATML
    made.save_pretrained(path)
    return path


def loaded(path: Path) -> PreTrainedModel:
    # Their other products of experts know no float64.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path, **eager).eval()
    # Products of weights that begin elsewhere in the memory of a file are rounded otherwise.
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model


def prompts(name: str, of: Seeing | None = None) -> list[Mapping[str, Any]]:
    """One of text, and one with an image."""
    of, text = of or SEEING[name], torch.arange(20)[None] % 58
    if of.image is _patches:
        return [{"input_ids": text}, of_patches((4, 4))]
    image = of.whole.get("image_token_id", IMAGE)
    tokens = torch.tensor([[1, 2, 3, *[image] * of.tokens, 4, 5, 6, 7]])
    named = {"gemma3": "token_type_ids", **dict.fromkeys(WITH_KINDS, "mm_token_type_ids")}
    kinds = {named[name]: (tokens == image).int()} if name in named else {}
    # Text of PaliGemma is what follows a prompt; it counts from 1, by which angles of fp32 are rounded otherwise.
    follows = {"token_type_ids": torch.ones_like(text), "position_ids": torch.arange(20)[None]}
    of_text = {"input_ids": text} | (follows if name == "paligemma" else {})
    if name == "paligemma":
        kinds = {"token_type_ids": (torch.arange(tokens.numel()) > 8)[None].int()}
        kinds["position_ids"] = torch.arange(tokens.numel())[None]
    return [of_text, {"input_ids": tokens, **of.image(), **kinds}]


def of_patches(*sizes: tuple[int, int]) -> dict[str, Tensor]:
    """A text with images of so many patches, of which 2 x 2 are a token, and text before, between and behind them."""
    pieces = [torch.tensor([1, 2, 3])]
    for number, (height, width) in enumerate(sizes):
        pieces += [torch.full((height * width // 4,), IMAGE), torch.arange(4, 8 + number)]
    tokens = torch.cat(pieces)[None]
    images = [_patches(*size) for size in sizes]
    found = {key: torch.cat([each[key] for each in images]) for key in images[0]}
    return {"input_ids": tokens, **found, "mm_token_type_ids": (tokens == IMAGE).int()}


@torch.no_grad()
def logits(path: Path, name: str) -> list[Tensor]:
    model = loaded(path)
    return [model(**prompt).logits for prompt in prompts(name)]
