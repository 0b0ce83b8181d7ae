"""The families and their presets: literal tables. No torch."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.quantization import dequantised
from megacore.models.wrappers import unwrapped
from megacore.parallel import limits
from megacore.parallel.enum_errors import nearest
from megacore.parallel.import_path import ImportPathError, imported

FAMILIES: Mapping[str, str] = {
    "afmoe": "megacore.models.families.afmoe.AfmoeConfig",
    "apertus": "megacore.models.families.apertus.ApertusConfig",
    "arcee": "megacore.models.families.arcee.ArceeConfig",
    "aria_text": "megacore.models.families.aria.AriaTextConfig",
    "axk1": "megacore.models.families.axk1.AXK1Config",
    "bailing_hybrid": "megacore.models.families.bailing_hybrid.BailingHybridConfig",
    "bamba": "megacore.models.families.bamba.BambaConfig",
    "biogpt": "megacore.models.families.biogpt.BioGptConfig",
    "bloom": "megacore.models.families.bloom.BloomConfig",
    "codegen": "megacore.models.families.codegen.CodeGenConfig",
    "cohere": "megacore.models.families.cohere.CohereConfig",
    "cohere2": "megacore.models.families.cohere2.Cohere2Config",
    "cohere2_moe": "megacore.models.families.cohere2_moe.Cohere2MoeConfig",
    "ctrl": "megacore.models.families.ctrl.CtrlConfig",
    "cwm": "megacore.models.families.cwm.CwmConfig",
    "deepseek_v2": "megacore.models.families.deepseek_v2.DeepseekV2Config",
    "deepseek_v3": "megacore.models.families.deepseek_v3.DeepseekV3Config",
    "deepseek_v32": "megacore.models.families.deepseek_v32.DeepseekV32Config",
    "deepseek_v4": "megacore.models.families.deepseek_v4.DeepseekV4Config",
    "dots1": "megacore.models.families.dots1.Dots1Config",
    "ernie4_5": "megacore.models.families.ernie4_5.Ernie4_5Config",
    "ernie4_5_moe": "megacore.models.families.ernie4_5_moe.Ernie4_5MoeConfig",
    "exaone4": "megacore.models.families.exaone4.Exaone4Config",
    "exaone_moe": "megacore.models.families.exaone_moe.ExaoneMoeConfig",
    "falcon": "megacore.models.families.falcon.FalconConfig",
    "falcon_h1": "megacore.models.families.falcon_h1.FalconH1Config",
    "falcon_mamba": "megacore.models.families.falcon_mamba.FalconMambaConfig",
    "flex_olmo": "megacore.models.families.flex_olmo.FlexOlmoConfig",
    "flint": "megacore.models.families.flint.FlintConfig",
    "gemma": "megacore.models.families.gemma.GemmaConfig",
    "gemma2": "megacore.models.families.gemma2.Gemma2Config",
    "gemma3_text": "megacore.models.families.gemma3.Gemma3Config",
    "gemma3n_text": "megacore.models.families.gemma3n.Gemma3nConfig",
    "gemma4_text": "megacore.models.families.gemma4.Gemma4Config",
    "gemma4_unified_text": "megacore.models.families.gemma4_unified.Gemma4UnifiedConfig",
    "glm": "megacore.models.families.glm.GlmConfig",
    "glm4": "megacore.models.families.glm4.Glm4Config",
    "glm4_moe": "megacore.models.families.glm4_moe.Glm4MoeConfig",
    "glm4_moe_lite": "megacore.models.families.glm4_moe_lite.Glm4MoeLiteConfig",
    "glm_moe_dsa": "megacore.models.families.glm_moe_dsa.GlmMoeDsaConfig",
    "gpt2": "megacore.models.families.gpt2.Gpt2Config",
    "gpt_bigcode": "megacore.models.families.gpt_bigcode.GptBigCodeConfig",
    "gpt_neo": "megacore.models.families.gpt_neo.GptNeoConfig",
    "gpt_neox": "megacore.models.families.gpt_neox.GptNeoxConfig",
    "gpt_neox_japanese": "megacore.models.families.gpt_neox_japanese.GptNeoxJapaneseConfig",
    "gpt_oss": "megacore.models.families.gpt_oss.GptOssConfig",
    "gptj": "megacore.models.families.gptj.GptjConfig",
    "granite": "megacore.models.families.granite.GraniteConfig",
    "granite_swa": "megacore.models.families.granite_swa.GraniteSWAConfig",
    "granitemoe": "megacore.models.families.granitemoe.GraniteMoeConfig",
    "granitemoe_swa": "megacore.models.families.granitemoe_swa.GraniteMoeSWAConfig",
    "granitemoehybrid": "megacore.models.families.granitemoehybrid.GraniteMoeHybridConfig",
    "granitemoeshared": "megacore.models.families.granitemoeshared.GraniteMoeSharedConfig",
    "helium": "megacore.models.families.helium.HeliumConfig",
    "hunyuan_v1_dense": "megacore.models.families.hunyuan_v1_dense.HunYuanDenseV1Config",
    "hunyuan_v1_moe": "megacore.models.families.hunyuan_v1_moe.HunYuanMoEV1Config",
    "hy_v3": "megacore.models.families.hy_v3.HYV3Config",
    "hyperclovax": "megacore.models.families.hyperclovax.HyperCLOVAXConfig",
    "internlm3": "megacore.models.families.internlm3.InternLM3Config",
    "iquestcoder": "megacore.models.families.iquestcoder.IQuestCoderConfig",
    "jais2": "megacore.models.families.jais2.Jais2Config",
    "jamba": "megacore.models.families.jamba.JambaConfig",
    "kimi_linear": "megacore.models.families.kimi_linear.KimiLinearConfig",
    "kolibri1": "megacore.models.families.kolibri1.Kolibri1Config",
    "laguna": "megacore.models.families.laguna.LagunaConfig",
    "lfm2": "megacore.models.families.lfm2.Lfm2Config",
    "lfm2_moe": "megacore.models.families.lfm2_moe.Lfm2MoeConfig",
    "lfm3": "megacore.models.families.lfm3.Lfm3Config",
    "llama": "megacore.models.families.llama.LlamaConfig",
    "llama4_text": "megacore.models.families.llama4.Llama4Config",
    "longcat_flash": "megacore.models.families.longcat_flash.LongcatFlashConfig",
    "mamba": "megacore.models.families.mamba.MambaConfig",
    "mamba2": "megacore.models.families.mamba2.Mamba2Config",
    "mellum": "megacore.models.families.mellum.MellumConfig",
    "mimo_v2_flash": "megacore.models.families.mimo_v2_flash.MimoV2FlashConfig",
    "minicpm3": "megacore.models.families.minicpm3.MiniCPM3Config",
    "minimax": "megacore.models.families.minimax.MiniMaxConfig",
    "minimax_m2": "megacore.models.families.minimax_m2.MiniMaxM2Config",
    "ministral": "megacore.models.families.ministral.MinistralConfig",
    "ministral3": "megacore.models.families.ministral3.Ministral3Config",
    "mistral": "megacore.models.families.mistral.MistralConfig",
    "mistral4": "megacore.models.families.mistral4.Mistral4Config",
    "mixtral": "megacore.models.families.mixtral.MixtralConfig",
    "modernbert-decoder": "megacore.models.families.modernbert_decoder.ModernBertDecoderConfig",
    "mpt": "megacore.models.families.mpt.MptConfig",
    "nanochat": "megacore.models.families.nanochat.NanoChatConfig",
    "nemotron": "megacore.models.families.nemotron.NemotronConfig",
    "nemotron_h": "megacore.models.families.nemotron_h.NemotronHConfig",
    "olmo": "megacore.models.families.olmo.OlmoConfig",
    "olmo2": "megacore.models.families.olmo2.Olmo2Config",
    "olmo3": "megacore.models.families.olmo3.Olmo3Config",
    "olmo_hybrid": "megacore.models.families.olmo_hybrid.OlmoHybridConfig",
    "olmoe": "megacore.models.families.olmoe.OlmoeConfig",
    "openai-gpt": "megacore.models.families.openai_gpt.OpenAiGptConfig",
    "opt": "megacore.models.families.opt.OptConfig",
    "persimmon": "megacore.models.families.persimmon.PersimmonConfig",
    "phi": "megacore.models.families.phi.PhiConfig",
    "phi3": "megacore.models.families.phi3.Phi3Config",
    "phimoe": "megacore.models.families.phimoe.PhimoeConfig",
    "qwen2": "megacore.models.families.qwen2.Qwen2Config",
    "qwen2_moe": "megacore.models.families.qwen2_moe.Qwen2MoeConfig",
    "qwen3": "megacore.models.families.qwen3.Qwen3Config",
    "qwen3_5_moe_text": "megacore.models.families.qwen3_5_moe.Qwen3_5MoeConfig",
    "qwen3_5_text": "megacore.models.families.qwen3_5.Qwen3_5Config",
    "qwen3_moe": "megacore.models.families.qwen3_moe.Qwen3MoeConfig",
    "qwen3_next": "megacore.models.families.qwen3_next.Qwen3NextConfig",
    "recurrent_gemma": "megacore.models.families.recurrent_gemma.RecurrentGemmaConfig",
    "seed_oss": "megacore.models.families.seed_oss.SeedOssConfig",
    "smollm3": "megacore.models.families.smollm3.SmolLM3Config",
    "solar_open": "megacore.models.families.solar_open.SolarOpenConfig",
    "stablelm": "megacore.models.families.stablelm.StableLmConfig",
    "starcoder2": "megacore.models.families.starcoder2.Starcoder2Config",
    "vaultgemma": "megacore.models.families.vaultgemma.VaultGemmaConfig",
    "xglm": "megacore.models.families.xglm.XglmConfig",
    "youtu": "megacore.models.families.youtu.YoutuConfig",
    "zamba2": "megacore.models.families.zamba2.Zamba2Config",
}
"""{Hugging Face's ``model_type``: the config in its module}."""


ENTRY_POINTS = "megacore.families"
"""The group of entry points by which a package that is installed declares families, ``model_type = module:name``."""
_OWN: dict[str, type[ModelConfig]] = {}
"""Families of the user's own, by their names, as far as this process has met them."""


class Family(NamedTuple):
    """A family: its config, and {preset: fields}."""

    config: type[ModelConfig]
    presets: Mapping[str, Mapping[str, Any]]


def family(name: str) -> Family:
    """Return the family of a name: one of ours, or of the user's own that has been met or that an installed package
    declares. A folder's ``model_type`` comes from strangers: it is no import path.

    Raises:
        ModelConfigError: there is none of this name.
    """
    if name in FAMILIES:
        path, _, config = FAMILIES[name].rpartition(".")
        return _family(getattr(importlib.import_module(path), config))
    if name not in _OWN:
        for path in sorted({each.value for each in metadata.entry_points(group=ENTRY_POINTS, name=name)}):
            own_family(path)
    if name not in _OWN:
        known = {**FAMILIES, **_OWN}
        raise ModelConfigError(
            "model",
            [
                f"unknown family {name!r}{nearest(name, known)}; there are {_list(known)}, and yours, where a "
                "recipe has its import path (model.family=package.module:name) or an installed package declares it "
                f"(entry point {ENTRY_POINTS})"
            ],
        )
    return _family(_OWN[name])


def register_family(config: type[ModelConfig]) -> type[ModelConfig]:
    """Let folders and recipes of this process have a family of the user's own, by its ``family``.

    Raises:
        ModelConfigError: it is no config of a family, or has a name of ours.
    """
    if not isinstance(config, type) or not issubclass(config, ModelConfig) or not hasattr(config, "family"):
        raise ModelConfigError("model", [f"{config} is no config of a family: derive a class from ModelConfig"])
    if config.family in FAMILIES:
        raise ModelConfigError("model", [f"{config.__qualname__}: {config.family} is one that comes along: rename it"])
    _OWN[config.family] = config
    return config


def own_family(path: str) -> type[ModelConfig]:
    """Return the family at an import path, which is registered.

    Raises:
        ModelConfigError: there is none.
    """
    try:
        return register_family(cast(type[ModelConfig], imported(path)))
    except ImportPathError as error:
        raise ModelConfigError("model", [str(error)]) from error


def _family(config: type[ModelConfig]) -> Family:
    return Family(config, getattr(sys.modules[config.__module__], "PRESETS", {}))


def presets() -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Return {preset: (family, fields)} of all families."""
    return {preset: (name, values) for name in [*FAMILIES, *_OWN] for preset, values in family(name).presets.items()}


def configure(section: Mapping[str, Any], scores: bool = False) -> ModelConfig:
    """Return the model that a recipe's ``model`` section describes.

    Args:
        section: ``preset`` (a name) or ``config`` (a folder with a ``config.json``, or the file) and ``family``, each
            optional, and fields of the family's config, which win over those; the family is a name or an import path.
        scores: Whether its head is to give a score, whatever it gives there.

    Raises:
        ModelConfigError: all problems.
    """
    own = ("family", "preset", "config")
    wrong = [
        f"{key} is {section[key]!r}: it must be text" for key in own if not isinstance(section.get(key), str | None)
    ]
    if wrong:
        raise ModelConfigError("model", wrong)
    fields = {key: value for key, value in section.items() if key not in own}
    name, base = section.get("family"), dict[str, Any]()
    if name is not None and ":" in name:
        name = own_family(name).family
    if section.get("preset") is not None:
        known = presets()
        if section["preset"] not in known:
            near = nearest(str(section["preset"]), known)
            raise ModelConfigError("model", [f"unknown preset {section['preset']!r}{near}; there are {_list(known)}"])
        of_preset, values = known[section["preset"]]
        name, base = _agree(name, of_preset, "preset"), dict(values)
    if section.get("config") is not None:
        base = base | dequantised(unwrapped(_read_json(Path(section["config"])))[0])[0]
        name = _agree(name, base.get("model_type"), "config")
    if name is None:
        raise ModelConfigError(
            "model", [f"give one of family ({_list(FAMILIES)}), preset ({_list(presets())}) or config"]
        )
    kind = family(name).config
    try:
        made = kind.from_hugging_face(kind.override(base, fields))
    except RecursionError as error:
        raise ModelConfigError(kind.family, ["its values are nested too deeply"]) from error
    # They are counted one by one, before there are files that could say how many there are.
    if (layers := made.sizes["layer"]) > limits.LAYERS:
        raise ModelConfigError(kind.family, [f"it has {layers} layers, and may have up to {limits.LAYERS}"])
    return made.scoring(1) if scores and not made.labels else made


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            text = stream.read(limits.JSON + 1)
        if len(text) > limits.JSON:
            raise ValueError(f"it has more than {limits.JSON:,} bytes")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError("model", [f"cannot read {file}: {error}"]) from error
    if not isinstance(content, dict):
        raise ModelConfigError("model", [f"{file} does not hold a JSON object"])
    return content


def _agree(given: str | None, found: str | None, where: str) -> str | None:
    if given is not None and found is not None and given != found:
        way = "model=null before it forgets the recipe's"
        raise ModelConfigError("model", [f"family is {given!r}, but the {where} is of family {found!r}: {way}"])
    return given if found is None else found


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(names)
