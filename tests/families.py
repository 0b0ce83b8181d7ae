"""Small models of every family of the registry: drawn at random, and as transformers has them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
import yaml
from _pytest.mark.structures import ParameterSet
from draws import draw
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Mistral4Config, PretrainedConfig, PreTrainedModel
from transformers.activations import FastGELUActivation
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock
from transformers.models.xglm.modeling_xglm import XGLMAttention

from megacore.models.anatomy import SLIDING
from megacore.models.families.deepseek_v4 import HEAVY, SPARSE
from megacore.models.mtp import FIELD
from megacore.models.registry import FAMILIES, family
from megacore.models.rope_config import PLAIN

# Which transformers 5.23 has, and does not find by its config.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

IDLE = LongcatFlashExperts.__init__
"""Of transformers 5.23, which makes gates of experts that do nothing, and refuses files that have none."""


def working(self: LongcatFlashExperts, config: PretrainedConfig) -> None:
    IDLE(self, config)
    self.gate_up_proj = torch.nn.Parameter(self.gate_up_proj.detach()[: config.n_routed_experts])


LongcatFlashExperts.__init__ = working  # type: ignore[method-assign]
LIGHTNING = MiniMaxLightningAttention.__init__
"""Of transformers, which saves what it computes, of every layer 4 MiB in fp32 for so few heads."""


def lightning(self: MiniMaxLightningAttention, *arguments: Any) -> None:
    LIGHTNING(self, *arguments)
    self._non_persistent_buffers_set |= {name for name, _ in self.named_buffers(recurse=False)}


_FORWARD = MiniMaxLightningAttention.forward


def exactly(self: MiniMaxLightningAttention, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
    """In float64 with factors that are not rounded, of rates that are: to float32, as they are here."""
    if hidden_states.dtype == torch.float64:
        rates = self.get_slope_rate().double()
        made = zip(("query", "key", "diagonal"), self.decay_factors(rates), strict=True)
        for name, factors in (("slope_rate", rates), *((f"{each}_decay", of) for each, of in made)):
            setattr(self, name, factors)
    return _FORWARD(self, hidden_states, *arguments, **named)


MiniMaxLightningAttention.__init__ = lightning  # type: ignore[assignment, method-assign]
MiniMaxLightningAttention.forward = exactly  # type: ignore[method-assign]

_RECURRENT = RecurrentGemmaRecurrentBlock.forward


def afresh(self: RecurrentGemmaRecurrentBlock, x: Tensor, position_ids: Tensor, *arguments: Any, **named: Any) -> Any:
    """Where a text of one token begins, the convolution of transformers goes on with the text before."""
    self.conv1d_state = None if position_ids[0, 0] == 0 else self.conv1d_state
    return _RECURRENT(self, x, position_ids, *arguments, **named)


RecurrentGemmaRecurrentBlock.forward = afresh  # type: ignore[assignment, method-assign]

T = TypeVar("T")

SMALL: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("small.yaml").read_text())

ALWAYS_PADDED = ("modernbert-decoder",)
"""Whose class of transformers takes no null for a token."""
NEVER_TIED = ("bailing_hybrid", "kimi_linear", "nemotron_h")
"""Whose class of transformers ties nothing, whatever a file says."""
ALWAYS_TIED = "zamba2"
"""Which is read only where it is: transformers' class shares no blocks otherwise."""


def rotated(cases: Iterable[T], few: int = 1) -> list[ParameterSet]:
    """Return parameters (family, case) of every family and every case: each family, or one in so many, has a case in
    turn, the others are of the grid."""
    listed = list(cases)
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{case}",
            marks=pytest.mark.in_turn(few * len(listed), few * at - number),
        )
        for number, name in enumerate(FAMILIES)
        for at, case in enumerate(listed)
    ]


def one_in(few: int) -> list[ParameterSet]:
    """Return every family, of which all but one in so many are of the grid: for what goes by no family of its own."""
    return [pytest.param(name, marks=pytest.mark.in_turn(few, -number)) for number, name in enumerate(FAMILIES)]


def told(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, but for what of ties is not said of all families."""
    return {field: value for field, value in fields.items() if field != "tie_word_embeddings" or name != ALWAYS_TIED}


def drawn(
    name: str, seed: int = 0, *, layers: int = 5, vocab: int = 13, positions: int = 16, tp: int = 4, **fields: Any
) -> dict[str, Any]:
    """A recipe's section of a random model of the family, but for these fields."""
    sizes = {"layers": layers, "vocab": vocab, "positions": positions, "tp": tp}
    made = {"family": name, **draw(family(name).config, Random(seed), **sizes), **told(name, fields)}
    return made | ({"pad_token_id": 5} if name in ALWAYS_PADDED and made["pad_token_id"] is None else {})


def of_transformers(section: dict[str, Any]) -> PretrainedConfig:
    """The same model's config, of the class that transformers has for its ``model_type``."""
    kind = CONFIG_MAPPING[section["family"]]
    # Which counts one layer that predicts further tokens where nothing is said, and has none.
    none = {FIELD: 0} if FIELD in kind.attribute_map.values() else {}
    return kind(**{name: value for name, value in (none | section).items() if name != "family"})


def small(name: str, **fields: Any) -> PretrainedConfig:
    """The family's config at transformers' defaults, with small sizes and these fields."""
    kind, convention = CONFIG_MAPPING[name], getattr(family(name).config, "rope_convention", PLAIN)
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    # A quarter of so small heads would be no pair.
    wide = {"hidden_size": 32} if convention.partial_rotary_factor == 0.25 else {}
    # Of latents each head has keys and values of its own.
    own = {"num_key_value_heads": SMALL["num_attention_heads"]} if "kv_lora_rank" in known else {}
    own |= {} if "kv_lora_rank" in known else {"v_head_dim": 3}  # no more than those of keys
    # Which layers have windows, GPT-Neo says of all.
    layers = fields.get("num_hidden_layers", SMALL["num_hidden_layers"])
    own |= {"attention_types": [[["local"], layers]]}
    # And which have a state; where one in four attends, it would be none.
    own |= {"attn_layer_indices": [*range(0, layers, 3)]}
    branches = "full_attention", "linear_attention", "moe"
    own |= {"layers_block_type": [branches[layer % 3] for layer in range(layers)]} if "n_groups" in known else {}
    for field, mixer in (
        ("linear_num_key_heads", "linear_attention"),
        ("linear_num_heads", "linear_attention"),
        ("conv_L_cache", "conv"),
        ("mamba_n_heads", "linear_attention"),
    ):
        if field in known and known.isdisjoint(("attn_layer_indices", "mamba_d_ssm")):
            own |= {"layer_types": [mixer if layer % 3 else "full_attention" for layer in range(layers)]}
    own |= {"num_attention_heads_per_layer": [8 if layer % 2 else 4 for layer in range(layers)]}
    own |= {"num_heads": 8, "state_size": 6} if "state_size" in known else {}
    if "num_mem_blocks" in known:
        own |= {"layers_block_type": ["linear_attention" if layer % 2 else "hybrid" for layer in range(layers)]}
        own |= {"n_mamba_heads": 8, "adapter_rank": 3, "head_dim": 8}
    own |= {"pad_token_id": 5} if name in ALWAYS_PADDED else {}
    # Of which transformers saves the convolutions in three equal parts.
    own |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16} if name == "olmo_hybrid" else {}
    if "hc_mult" in known:  # whose heads turn in part, and whose layers are of three kinds
        kinds = SLIDING, SPARSE, HEAVY
        own |= {"num_key_value_heads": 1, "n_shared_experts": 1, "head_dim": 8, "partial_rotary_factor": 0.5}
        own |= {"layer_types": [kinds[layer % 3] for layer in range(layers)], "num_hash_layers": 1}
        own |= {"compress_rates": {SPARSE: 2, HEAVY: 4}, "o_groups": 4, "o_lora_rank": 3}
    if "laurel_rank" in known:  # which cannot do without what layers are told; and their first gates are cut off
        own |= {"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 43, "laurel_rank": 3}
        own |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.9, *[0.0] * (layers - 1)]}
    if "zero_expert_num" in known:  # whose num_hidden_layers are twice as many
        fields = {"num_layers": layers, **{name: value for name, value in fields.items() if "layers" not in name}}
        own |= {"zero_expert_num": 4, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 6, "moe_topk": 3, "head_dim": 4}
    others = {"kda_lower_bound", "zero_expert_num"}  # whose head_dim does not follow
    known -= {"head_dim"} if {"kv_lora_rank", *others} & known == {"kv_lora_rank"} else set()
    known |= {"num_hash_layers"} if "hc_mult" in known else set()
    return kind(
        **{field: value for field, value in (SMALL | wide | own).items() if field in known} | told(name, fields)
    )


def random_model(config: PretrainedConfig, seed: int = 0, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """transformers' model, every weight of it random: zeros and ones would hide mistakes."""
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # their other products of experts know no float64
    made: PreTrainedModel = auto.from_config(config)
    for name, parameter in made.named_parameters():
        # Smaller biases: beside those of norms the tokens must count, too.
        torch.nn.init.normal_(parameter, std=0.1 if name.endswith(".bias") else 0.3)
    return made


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' model of a folder."""
    # Their other products of experts know no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    for module in model.modules():
        if isinstance(module, XGLMAttention):
            module.forward = wide_numbers()(module.forward)  # type: ignore[method-assign]
    return model


@contextmanager
def wide_numbers() -> Iterator[None]:
    """Within this, numbers that float32 does not have make tensors of float64: of XGLM, the least one."""
    full = torch.full

    def full_enough(size: Any, fill_value: Any, **named: Any) -> Tensor:
        beyond = isinstance(fill_value, float) and abs(fill_value) > torch.finfo(torch.float32).max
        return full(size, fill_value, **(named | {"dtype": torch.float64} if beyond else named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "full", full_enough)
        yield


def saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that ``save_pretrained`` writes, under their names on disk: a tied head is the embedding, a shared
    block the first of them."""
    again = {family(model.config.model_type).config.tied[1], *model.all_tied_weights_keys}
    tensors = revert_weight_conversion(model, model.state_dict())
    are_tied = model.config.tie_word_embeddings and model.config.model_type not in NEVER_TIED
    return {name: t for name, t in tensors.items() if name not in again or not are_tied}


@contextmanager
def in_float64() -> Iterator[None]:
    """Within this, transformers' models of float64 compute in float64 all the way.

    Their norms, softmaxes and some logits are cast to float32 whatever the model's dtype. Rotary frequencies and angles
    are not touched: they are float32 from the start.
    """
    to, kind, single, softmax, sample = Tensor.to, Tensor.type, Tensor.float, Tensor.softmax, F.grid_sample

    def to_no_less(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        wanted = named.get("dtype", arguments[0] if arguments else None)
        return self if self.dtype == torch.float64 and wanted == torch.float32 else to(self, *arguments, **named)

    def type_no_less(self: Tensor, wanted: torch.dtype) -> Tensor:
        return self if self.dtype == torch.float64 and wanted == torch.float32 else kind(self, wanted)

    def softmax_no_less(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(self, dim, dtype=None if self.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch, wide_numbers():
        # Whose constants have eight digits, and ten.
        for rounded in (BloomGelu, FastGELUActivation):
            patch.setattr(rounded, "forward", lambda self, x: F.gelu(x, approximate="tanh"))
        # Which rounds a cosine otherwise than cos.
        patch.setattr(torch, "polar", lambda size, angle: torch.complex(size * angle.cos(), size * angle.sin()))
        patch.setattr(Tensor, "to", to_no_less)
        patch.setattr(Tensor, "type", type_no_less)
        patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else single(self))
        patch.setattr(Tensor, "softmax", softmax_no_less)
        # Of which shares are made in float32.
        ones = SimpleNamespace(**{**vars(F), "one_hot": lambda *shape: F.one_hot(*shape).double()})
        patch.setattr(modeling_gemma4, "F", ones)
        # At places of float32, as the position embeddings of GLM-4V are.
        patch.setattr(F, "grid_sample", lambda x, places, **how: sample(x, places.to(x.dtype), **how))
        yield
