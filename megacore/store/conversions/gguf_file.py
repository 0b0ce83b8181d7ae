"""A model as one file of llama.cpp's format GGUF, written by the `gguf` library in the memory of one tensor.

Hyperparameters and tensors go by llama.cpp's names. Its llama turns dimensions of queries and keys that lie beside each
other, where Hugging Face has half a head between them; norms that add 1 there have it in their weights here; vectors
stay in fp32, which its kernels ask for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megacore.models.config import ModelConfig
from megacore.models.rope_config import DefaultRope, LinearRope, Llama3Rope, Rope
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.conversion import tensors
from megacore.store.conversions.target import MadeFile, MadeFolder, Progress, check_beside
from megacore.store.io.files import replacing
from megacore.store.io.strict_json import StoreError, parse_json, short
from megacore.store.tensor_files.companions import Companion, copy_companion
from megacore.store.tensor_files.dtypes import FLOATS, as_dtype, as_floats
from megacore.store.tensor_files.stream import Tensor, assemble
from megacore.store.tensor_files.tensors import os_errors
from megacore.store.weight_folders.folder import WeightFolder

Q8_0 = "q8_0"
"""Blocks of 32 numbers of 8 bits with a scale in fp16 each."""
_BLOCK = 32
_NUMBERS = 1 << 20
"""Numbers that are rounded to q8_0 at a time."""
_TYPES = {"F32": 0, "F16": 1, Q8_0: 8, "BF16": 30}
"""{dtype: ggml's number of it}."""
_FILE_TYPES = {"F32": 0, "F16": 1, Q8_0: 7, "BF16": 32}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Kinds of tokens, by the numbers that sentencepiece gives them too."""


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp makes of a family. ``pairs``: whether dimensions that turn together
    lie beside each other; ``norm_offset``: what its norms have in their weights, and Hugging Face's add to them;
    ``wants``: {field: its one value that is computed there}."""

    name: str
    pairs: bool = False
    norm_offset: float = 0.0
    wants: Mapping[str, object] = field(default_factory=dict)


_QWEN: Mapping[str, object] = {"hidden_act": "silu", "use_sliding_window": False}
ARCHITECTURES: Mapping[str, _Architecture] = {
    "gemma2": _Architecture(
        "gemma2", norm_offset=1.0, wants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    ),
    "llama": _Architecture("llama", pairs=True, wants={"hidden_act": "silu"}),
    "mistral": _Architecture("llama", pairs=True, wants={"hidden_act": "silu"}),
    "qwen2": _Architecture("qwen2", wants=_QWEN),
    "qwen3": _Architecture("qwen3", wants={**_QWEN, "attention_bias": False}),
}
"""{family: what llama.cpp makes of it}."""

_GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Mapping[tuple[str, ...], str] = {
    (): "gpt-2",
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _GPT4 % r"\p{N}{1,3}",): "llama-bpe",
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _GPT4 % r"\p{N}",): "qwen2",
}
"""{the patterns by which a tokenizer.json cuts text into words: what llama.cpp calls them}."""


def to_gguf(source: WeightFolder, target: Path, dtype: str | None, dry_run: bool, progress: Progress) -> MadeFolder:
    """Write a model as one file -> what was made. ``dtype``: that of matrices: one of torch's, or "q8_0"; None for the
    source's. Rows that are no whole blocks of q8_0 are in fp16. Raises StoreError: llama.cpp computes something else of
    it, its tokenizer has no name there, the library is missing, the file is there, or there is no room."""
    family = source.config.family
    if family not in ARCHITECTURES:
        raise StoreError(f"{source.path} is a {family}: GGUF is written of {', '.join(sorted(ARCHITECTURES))}")
    source.check_predicts()
    check_beside(source.path, target)
    if target.exists():
        raise StoreError(f"{target} exists: choose another name, or remove it")
    wanted = Q8_0 if dtype == Q8_0 else next((name for name, kind in FLOATS.items() if kind == dtype), None)
    if dtype is not None and wanted not in _TYPES:
        raise StoreError(f"`dtype={dtype}`: choose from float32, float16, bfloat16, {Q8_0}")
    try:
        import gguf
    except ImportError as error:
        raise StoreError("GGUF is written by the library gguf: pip install 'megacore[gguf]'") from error
    architecture = ARCHITECTURES[family]
    with tempfile.TemporaryDirectory(prefix="megacore-gguf-") as folder:
        writer = gguf.GGUFWriter(None, architecture.name)
        _hyperparameters(writer, architecture, source, wanted)
        try:
            _tokenizer(writer, source.companions(), source.config, Path(folder))
        except StoreError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StoreError(f"the tokenizer of {source.path} cannot be told to llama.cpp: {error!r}") from error
    planned = list(_tensors(architecture, source, wanted))
    for name, shape, kind, _ in planned:
        width = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint16)
        as_bytes = kind == Q8_0
        given = (*shape[:-1], shape[-1] // _BLOCK * (_BLOCK + 2)) if as_bytes else shape
        number = gguf.GGMLQuantizationType(_TYPES[kind])
        writer.add_tensor_info(name, given, np.dtype(np.uint8 if as_bytes else width), _bytes(shape, kind), number)
    size = sum(_bytes(shape, kind) for _, shape, kind, _ in planned)
    if not dry_run:
        with os_errors(target, size), replacing(target) as file, progress(size, target.name) as done:
            writer.write_header_to_file(Path(file.name))
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for _, shape, kind, make in planned:
                writer.write_tensor_data(make())
                done(_bytes(shape, kind))
            writer.close()
    whole = target.stat().st_size if target.exists() else size
    files = (MadeFile(target.name, whole, len(planned)),)
    return MadeFolder(target, not dry_run, "a GGUF file", source.schema.parameters, whole, files)


def _bytes(shape: Sequence[int], kind: str) -> int:
    numel = int(np.prod(shape, dtype=np.int64))
    return numel // _BLOCK * (_BLOCK + 2) if kind == Q8_0 else numel * (4 if kind == "F32" else 2)


def _tensors(
    architecture: _Architecture, source: WeightFolder, wanted: str | None
) -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], np.ndarray]]]:
    """Yield the name, shape and dtype of each, and what makes it; matrices have the wanted dtype, or the source's.
    Raises StoreError: llama.cpp has no name for some, or no such dtype."""
    import gguf

    config: Any = source.config
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    targets = list(hugging_face(config.schema))
    theirs = {each.name: names.get_name(each.name, (".weight", ".bias")) for each in targets}
    if unknown := [name for name, found in theirs.items() if found is None]:
        raise StoreError(f"{source.path}: llama.cpp knows no {', '.join(unknown[:3])} of {config.family}")
    if isinstance(config.rope_parameters, Llama3Rope):
        factors = _llama3_factors(config.rope_parameters, config.head_dim)
        yield "rope_freqs.weight", factors.shape, "F32", lambda: factors
    for tensor in tensors(config.schema, source, "weights", targets, None):
        shape, name = tensor.stored.shape, theirs[tensor.stored.name]
        kind = "F32" if len(shape) == 1 else wanted or tensor.dtype
        if kind not in _TYPES:
            raise StoreError(f"{source.path} holds {tensor.dtype}, which llama.cpp does not take: `dtype`")
        if kind == Q8_0 and shape[-1] % _BLOCK:
            kind = "F16"
        yield name, shape, kind, partial(_made, architecture, source, name, kind, tensor)


def _made(architecture: _Architecture, source: WeightFolder, name: str, kind: str, tensor: Tensor) -> np.ndarray:
    import gguf

    config: Any = source.config
    bits = assemble(tensor.stored, tensor.copies, source.read(), tensor.dtype)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture.pairs and heads:
        bits = bits.reshape(heads, 2, -1, *bits.shape[1:]).swapaxes(1, 2).reshape(bits.shape)
    if kind == Q8_0:
        rows = bits.reshape(-1, bits.shape[-1])
        made = np.empty((len(rows), rows.shape[1] // _BLOCK * (_BLOCK + 2)), np.uint8)
        for start in range(0, len(rows), step := max(1, _NUMBERS // rows.shape[1])):
            floats = as_floats(rows[start : start + step], tensor.dtype, "F32")
            made[start : start + step] = gguf.quants.quantize(floats, gguf.GGMLQuantizationType.Q8_0)
        return made
    if kind != "F32":
        return as_dtype(bits, tensor.dtype, kind)
    floats = as_floats(bits, tensor.dtype, "F32")
    return floats + np.float32(architecture.norm_offset) if name.endswith("norm.weight") else floats


def _hyperparameters(writer: Any, architecture: _Architecture, source: WeightFolder, wanted: str | None) -> None:
    """Raises StoreError: llama.cpp computes something else."""
    import gguf

    config: Any = source.config
    rope: Rope = config.rope_parameters
    wrong = [
        f"{name} is {getattr(config, name)!r} and not {value!r}"
        for name, value in architecture.wants.items()
        if getattr(config, name) != value
    ]
    if not isinstance(rope, DefaultRope | LinearRope | Llama3Rope) or rope.part(config.head_dim) != config.head_dim:
        wrong.append(f"rope_type is {rope.rope_type} of {rope.part(config.head_dim)} dimensions")
    window = getattr(config, "sliding_window", None)
    if config.family == "gemma2":
        caps = (config.attn_logit_softcapping, config.final_logit_softcapping)
        usual = tuple(map(config.kind, range(config.num_hidden_layers)))
        if config.kinds != usual:
            wrong.append("layer_types is not every other layer in turn")
        if None in caps or config.query_pre_attn_scalar != config.head_dim or window is None:
            wrong.append("it has no softcap or window, or a query_pre_attn_scalar other than head_dim")
        else:
            writer.add_attn_logit_softcapping(caps[0])
            writer.add_final_logit_softcapping(caps[1])
            writer.add_sliding_window(window)
    if wrong:
        raise StoreError(f"{source.path}: llama.cpp computes other things of a {config.family}: {'; '.join(wrong)}")
    positions = config.max_position_embeddings
    if config.family == "mistral" and window is not None:  # its llama has none: up to there it needs none
        positions = min(positions, window)
    writer.add_name(source.path.name)
    held = {source.dtype("weights", each) for each in source.stored()}
    writer.add_file_type(_FILE_TYPES[wanted or next((name for name in ("F32", "BF16", "F16") if name in held), "F32")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.rope_theta)
    if isinstance(rope, LinearRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)


def _llama3_factors(rope: Llama3Rope, head_dim: int) -> np.ndarray:
    """Return what the frequencies of a plain rope are divided by: [head_dim / 2]."""
    from megacore.models.rope import inverse_frequencies

    plain = inverse_frequencies(DefaultRope(rope_theta=rope.rope_theta), head_dim, 1)[0]
    return (plain / inverse_frequencies(rope, head_dim, 1)[0]).numpy()


# -- tokens


def _tokenizer(writer: Any, files: Mapping[str, Companion], config: ModelConfig, folder: Path) -> None:
    """Add a tokenizer of the files that go with a model, if there are some. Raises StoreError: it is of a kind that is
    not told here."""
    import gguf

    vocabulary = config.sizes["vocab"]
    if not {"tokenizer.json", "tokenizer.model"} & files.keys():
        writer.add_tokenizer_model("no_vocab")
        return
    fast = parse_json(files["tokenizer.json"].read(), files["tokenizer.json"].path) if "tokenizer.json" in files else {}
    added = {each["id"]: (each["content"], each["special"]) for each in fast.get("added_tokens", ())}
    tokens: list[tuple[str, float, int]] = [(f"[PAD{i}]", -1000.0, _UNUSED) for i in range(vocabulary)]
    if "tokenizer.model" in files:
        for number, piece in enumerate(_pieces(files["tokenizer.model"].read())):
            tokens[number] = piece
        writer.add_tokenizer_model("llama")
        normaliser = dict(_fields(dict(_fields(files["tokenizer.model"].read())).get(3, b"")))
        writer.add_add_space_prefix(bool(normaliser.get(3, 1)))  # whether a space is put in front of a text
    else:
        for text, number in fast["model"]["vocab"].items():
            tokens[number] = (text, 0.0, _NORMAL)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_words(fast, files["tokenizer.json"].path))
    for number, (text, special) in added.items():
        tokens[number] = (text, tokens[number][1], _CONTROL if special else _USER_DEFINED)
    texts, scores, kinds = zip(*tokens[:vocabulary], strict=True)
    writer.add_token_list(texts)
    if "tokenizer.model" in files:
        writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    for name, file in files.items():
        copy_companion(file, folder / name, durable=False)
    gguf.SpecialVocab(folder, load_merges="tokenizer.model" not in files, n_vocab=vocabulary).add_to_gguf(writer, True)


def _words(fast: Any, path: Path) -> str:
    """Return llama.cpp's name of how a byte-level tokenizer cuts text into words. Raises StoreError: it has none."""
    cutting = fast.get("pre_tokenizer") or {}
    parts = cutting.get("pretokenizers", [cutting])
    patterns = tuple(each["pattern"].get("Regex", "") for each in parts if each.get("type") == "Split")
    kinds = {each.get("type") for each in parts}
    by_bytes = [each for each in parts if each.get("type") == "ByteLevel"]
    plain = fast["model"].get("type", "BPE") == "BPE" and kinds <= {"Split", "ByteLevel"} and len(by_bytes) == 1
    if not plain or patterns not in _WORDS or by_bytes[0].get("use_regex", True) != (not patterns):
        how = short(patterns or sorted(map(str, kinds)))
        raise StoreError(
            f"{path} cuts text in a way that is not told to llama.cpp here ({how}): make a Hugging Face folder by "
            "`to=hf`, and give it to llama.cpp's own converter"
        )
    return _WORDS[patterns]


def _pieces(model: bytes) -> Iterator[tuple[str, float, int]]:
    """Yield the text, score and kind of the pieces of a sentencepiece model, a message of protocol buffers whose first
    field they are: each has these three as its fields 1, 2 and 3."""
    for number, value in _fields(model):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            (score,) = np.frombuffer(piece.get(2, bytes(4)), "<f4")
            yield piece[1].decode(), float(score), int(piece.get(3, _NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message's fields: an int, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or varint()
        yield number, message[at : at + size]
        at += size
