"""The families and their presets: literal tables. No torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.config import ModelConfig, ModelConfigError
from models.wrappers import unwrapped
from parallel import limits
from parallel.choices import nearest

FAMILIES: Mapping[str, str] = {
    "arcee": "models.families.arcee.ArceeConfig",
    "cohere": "models.families.cohere.CohereConfig",
    "cohere2": "models.families.cohere2.Cohere2Config",
    "deepseek_v2": "models.families.deepseek_v2.DeepseekV2Config",
    "deepseek_v3": "models.families.deepseek_v3.DeepseekV3Config",
    "falcon": "models.families.falcon.FalconConfig",
    "gemma": "models.families.gemma.GemmaConfig",
    "gemma2": "models.families.gemma2.Gemma2Config",
    "gemma3_text": "models.families.gemma3.Gemma3Config",
    "glm": "models.families.glm.GlmConfig",
    "glm4": "models.families.glm4.Glm4Config",
    "gpt2": "models.families.gpt2.Gpt2Config",
    "gpt_neox": "models.families.gpt_neox.GptNeoxConfig",
    "gpt_oss": "models.families.gpt_oss.GptOssConfig",
    "gptj": "models.families.gptj.GptjConfig",
    "granite": "models.families.granite.GraniteConfig",
    "granitemoe": "models.families.granitemoe.GraniteMoeConfig",
    "helium": "models.families.helium.HeliumConfig",
    "llama": "models.families.llama.LlamaConfig",
    "ministral": "models.families.ministral.MinistralConfig",
    "mistral": "models.families.mistral.MistralConfig",
    "mixtral": "models.families.mixtral.MixtralConfig",
    "nemotron": "models.families.nemotron.NemotronConfig",
    "olmo2": "models.families.olmo2.Olmo2Config",
    "olmo3": "models.families.olmo3.Olmo3Config",
    "olmoe": "models.families.olmoe.OlmoeConfig",
    "phi": "models.families.phi.PhiConfig",
    "phi3": "models.families.phi3.Phi3Config",
    "qwen2": "models.families.qwen2.Qwen2Config",
    "qwen2_moe": "models.families.qwen2_moe.Qwen2MoeConfig",
    "qwen3": "models.families.qwen3.Qwen3Config",
    "qwen3_moe": "models.families.qwen3_moe.Qwen3MoeConfig",
    "seed_oss": "models.families.seed_oss.SeedOssConfig",
    "smollm3": "models.families.smollm3.SmolLM3Config",
    "stablelm": "models.families.stablelm.StableLmConfig",
    "starcoder2": "models.families.starcoder2.Starcoder2Config",
}
"""{Hugging Face's ``model_type``: the config in its module}."""


class Family(NamedTuple):
    """A family: its config, {preset: fields}, and {preset: its published number of parameters}."""

    config: type[ModelConfig]
    presets: Mapping[str, Mapping[str, Any]]
    parameters: Mapping[str, int]


def family(name: str) -> Family:
    """Return the family of a name.

    Raises:
        ModelConfigError: there is none of this name.
    """
    if name not in FAMILIES:
        raise ModelConfigError(
            "model", [f"unknown family {name!r}{nearest(name, FAMILIES)}; there are {_list(FAMILIES)}"]
        )
    path, _, config = FAMILIES[name].rpartition(".")
    module = importlib.import_module(path)
    return Family(getattr(module, config), module.PRESETS, module.PARAMETERS)


def presets() -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Return {preset: (family, fields)} of all families."""
    return {preset: (name, values) for name in FAMILIES for preset, values in family(name).presets.items()}


def configure(section: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a recipe's ``model`` section describes.

    Args:
        section: ``preset`` (a name) or ``config`` (a folder with a ``config.json``, or the file) and ``family``, each
            optional, and fields of the family's config, which win over those.

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
    if section.get("preset") is not None:
        known = presets()
        if section["preset"] not in known:
            near = nearest(str(section["preset"]), known)
            raise ModelConfigError("model", [f"unknown preset {section['preset']!r}{near}; there are {_list(known)}"])
        of_preset, values = known[section["preset"]]
        name, base = _agree(name, of_preset, "preset"), dict(values)
    if section.get("config") is not None:
        base = base | unwrapped(_read_json(Path(section["config"])))[0]
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
    return made


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
        raise ModelConfigError("model", [f"family is {given!r}, but the {where} is of family {found!r}"])
    return given if found is None else found


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(names)
