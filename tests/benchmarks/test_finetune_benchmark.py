"""The benchmark of fine-tuning: it runs, its work is the same for everyone, and its bars are judged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import finetune
from benchmarks.finetune_work import Work

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA with a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special: Any = {"eos_token": "<|end|>", "additional_special_tokens": ["<|start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.in_turn(6, 0)
def test_everyone_has_the_same_tokens_and_mask(model: Path, tmp_path: Path) -> None:
    path, examples = finetune.prepare(model, tmp_path, facts=20, length=512, rows=2, accumulation=1)
    work = Work.read(path)
    assert work.model == model and work.length == 512
    rows = [json.loads(line) for line in work.prepared.read_text().splitlines()]
    chats = [json.loads(line)["messages"] for line in work.chats.read_text().splitlines()]
    assert len(rows) == len(chats) == examples.count > 20
    kept = 0
    for made, messages in zip(rows, chats, strict=True):
        said = sum(len(m["content"].encode()) + 1 for m in messages if m["role"] == "assistant")
        assert len(made["input_ids"]) == len(made["counted"])
        whole = sum(len(f"<{m['role']}\n{m['content']}>\n".encode()) for m in messages)  # a special token is one
        assert sum(made["counted"]) == said if whole <= 513 else len(made["input_ids"]) <= 513 < whole  # cut
        kept += whole <= 513
    assert kept > 20


@pytest.mark.in_turn(12, 3)
@pytest.mark.slow
def test_it_runs_without_peers(model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--model", str(model), "--rounds", "1", "--warm-up", "1", "--steps", "1", "--facts", "20"]
    options += ["--rows", "2", "--accumulation", "1", "--only", "megacore", "--json", str(results)]
    done = subprocess.run(
        [sys.executable, "benchmarks/finetune.py", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modes = json.loads(results.read_text())["modes"]
    assert modes.keys() == {"megacore", "megacore, masters", "megacore LoRA", "megacore LoRA, masters"}
    assert not [mode["failure"] for mode in modes.values() if mode["failure"]]
    assert all(mode["tokens_per_second"] > 0 for mode in modes.values()), done.stdout
