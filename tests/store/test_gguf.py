"""GGUF files beside the two independent readers there are: that of the `gguf` library, and that of transformers."""

import inspect
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import small
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megacore import StoreError, convert
from megacore.data import tokenizer
from megacore.store.conversions.gguf_file import ARCHITECTURES, _words

gguf = pytest.importorskip("gguf")

TEXTS = ["The sun rose over the quiet harbour. ", "a b c d e f g " * 4]
FIELDS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {
        "query_pre_attn_scalar": 256,
        "head_dim": 256,
        "sliding_window": 8,
    },  # transformers reads no other scalar
    "llama": {"attention_bias": True, "head_dim": 32},
    "mistral": {"tie_word_embeddings": True, "head_dim": 32, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # nor another size of heads
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def model(family: str, folder: Path, dtype: torch.dtype = torch.float16, **fields: Any) -> Path:
    """A folder as transformers saves it, with random weights and a tokenizer."""
    given = {key: value for key, value in FIELDS.items() if family != "qwen2" or key != "head_dim"}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(small(family, **(given | OWN[family] | fields)))
    for each in made.parameters():
        torch.nn.init.normal_(each, std=0.3)
    made.to(dtype).save_pretrained(folder)
    tokenizer.train(TEXTS, 300, folder)
    return folder


def logits(folder: Path, **options: Any) -> np.ndarray:
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        found: np.ndarray = made(torch.arange(3, 40)[None]).logits.numpy()
    return found


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_transformers_computes_the_same_of_it(family: str, tmp_path: Path) -> None:
    folder, file = model(family, tmp_path / "model"), tmp_path / "model.gguf"
    convert(folder, tmp_path / "ours", tp=2)
    convert(tmp_path / "ours", file, to="gguf")
    # Its reader asks no file for biases of attention: of llama it is told, of the others it reads all by itself.
    told = {"config": AutoConfig.from_pretrained(folder)} if family == "llama" else {}
    want, got = logits(folder), logits(tmp_path, gguf_file=file.name, **told)
    # Gemma's norms have lost their last bits when 1 was added to them.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max() if family == "gemma2" else 0)
    assert np.abs(want).max() > 1
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name), AutoTokenizer.from_pretrained(folder)
    assert [theirs(each)["input_ids"] for each in TEXTS] == [ours(each)["input_ids"] for each in TEXTS]
    assert theirs.eos_token_id == ours.eos_token_id
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == "gpt-2"


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_numbers_are_those_of_the_source_rounded_once(dtype: str, tmp_path: Path) -> None:
    folder, file = model("qwen2", tmp_path / "model", torch.float32, intermediate_size=80), tmp_path / "model.gguf"
    with mock.patch("megacore.store.conversions.gguf_file._NUMBERS", 64 * 7):  # as of a large one, in parts
        made = convert(folder, file, to="gguf", dtype=dtype)
    assert made.path == file and made.bytes == file.stat().st_size
    source = load_file(folder / "model.safetensors")
    read = {each.name: each for each in gguf.GGUFReader(file).tensors}
    assert len(read) == len(source) == made.tensors
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 3)
    for name, tensor in source.items():
        found = read[names.get_name(name, (".weight", ".bias"))]
        if tensor.ndim == 1:
            np.testing.assert_array_equal(found.data, tensor.numpy())
        elif dtype == "q8_0" and tensor.shape[-1] % 32 == 0:
            want = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(found.data, want, err_msg=name)
        else:
            kind = DTYPES.get(dtype, torch.float16)
            assert found.tensor_type.name == {"bfloat16": "BF16"}.get(dtype, "F16")
            bits = found.data.reshape(-1).view(np.int16).reshape(tensor.shape)
            np.testing.assert_array_equal(bits, tensor.to(kind).view(torch.int16).numpy(), err_msg=name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name) is not None


def test_the_rope_of_llama_3_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = scaled | {"rope_theta": 500.0, "original_max_position_embeddings": 32}
    folder, file = model("llama", tmp_path / "model", rope_parameters=rope), tmp_path / "model.gguf"
    convert(folder, file, to="gguf")
    read = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    config = AutoModelForCausalLM.from_pretrained(folder).config
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500.0 ** -(np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(plain / read["rope_freqs.weight"], want.numpy(), rtol=1e-6)
    assert read["rope_freqs.weight"].max() > 7 and read["rope_freqs.weight"].min() == 1


def test_words_go_by_the_names_that_llama_cpp_has() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    def words(*parts: dict[str, Any]) -> str:
        given = {"type": "Sequence", "pretokenizers": list(parts)}
        return _words({"model": {"type": "BPE"}, "pre_tokenizer": given}, Path("tokenizer.json"))

    by_bytes = {"type": "ByteLevel", "use_regex": False}
    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    for name, pattern in {"qwen2": PRETOKENIZE_REGEX, "llama-bpe": llama3}.items():
        assert words({"type": "Split", "pattern": {"Regex": pattern}}, by_bytes) == name
    for wrong in ([by_bytes], [{"type": "Split", "pattern": {"Regex": "x"}}, by_bytes], [{"type": "Digits"}, by_bytes]):
        with pytest.raises(StoreError, match="is not told to"):
            words(*wrong)


def test_pieces_of_sentencepiece_keep_their_scores(tmp_path: Path) -> None:
    from transformers.utils import sentencepiece_model_pb2_new

    messages: Any = sentencepiece_model_pb2_new
    folder, proto = model("llama", tmp_path / "model"), messages.ModelProto()
    kinds = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x0A>", 0.0, 6), ("\u2581the", -1.5, 1), ("e", -300.25, 1)]
    for text, score, kind in kinds:
        proto.pieces.add(piece=text, score=score, type=kind)
    (folder / "tokenizer.json").unlink()
    for adds in (False, True):  # a space in front of a text
        proto.normalizer_spec.add_dummy_prefix = adds
        (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
        convert(folder, tmp_path / f"{adds}.gguf", to="gguf")
        fields = gguf.GGUFReader(tmp_path / f"{adds}.gguf").fields
        assert fields["tokenizer.ggml.add_space_prefix"].contents() is adds
    told = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "tokens", "scores", "token_type")]
    assert told[0] == "llama" and len(told[1]) == 300
    assert [*zip(*(each[:5] for each in told[1:]), strict=True)] == kinds


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path: Path) -> None:
    folder = model("qwen3", tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())

    def refused(**fields: Any) -> str:
        path.write_text(json.dumps(config | fields))
        with pytest.raises(StoreError) as error:
            convert(folder, tmp_path / "out.gguf", to="gguf")
        assert not (tmp_path / "out.gguf").exists()
        return str(error.value)

    assert "hidden_act is 'gelu' and not 'silu'" in refused(hidden_act="gelu")
    gemma = model("gemma2", tmp_path / "gemma")
    raw = json.loads((gemma / "config.json").read_text())
    raw["layer_types"] = ["full_attention"] * len(raw["layer_types"])
    (gemma / "config.json").write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="layer_types is not every other layer in turn"):
        convert(gemma, tmp_path / "out.gguf", to="gguf")
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    assert "rope_type is yarn" in refused(rope_parameters=yarn)
    path.write_text(json.dumps(config))
    fast = json.loads((folder / "tokenizer.json").read_text())
    fast["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    assert refused().startswith(f"{folder / 'tokenizer.json'} cuts text in a way that is not told to llama.cpp")
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 7}]}')
    assert "cannot be told to llama.cpp: KeyError" in refused()
    with pytest.raises(StoreError, match="has no layout"):
        convert(folder, tmp_path / "out.gguf", to="gguf", tp=2)
    olmo = tmp_path / "olmo"
    AutoModelForCausalLM.from_config(small("olmo2")).save_pretrained(olmo)
    with pytest.raises(StoreError, match="is a olmo2: GGUF is written of gemma2, llama, mistral, qwen2, qwen3"):
        convert(olmo, tmp_path / "out.gguf", to="gguf")
