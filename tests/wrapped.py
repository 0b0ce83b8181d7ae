"""Tiny models that also see, both parts of random weights, and a prompt with an image for each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
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

_SAID = yaml.safe_load(Path(__file__).with_name("wrapped.yaml").read_text())
TEXT, VIT, _GEMMA4 = (_SAID["of_several"][name] for name in ("text", "vit", "gemma4"))
IMAGE = 60
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


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
_IMAGES = {each.__name__: each for each in (_square, _sized, _in_five, _of_many, _patches, _places)}
SEEING: Mapping[str, Seeing] = {
    name: Seeing(**{**each, "image": _IMAGES[f"_{each['image']}"]}) for name, each in _SAID["seeing"].items()
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
    "aria": replace(SEEING["aria"], tower=_ARIA),
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
