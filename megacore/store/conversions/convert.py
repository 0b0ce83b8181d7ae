"""Folders converted: `megacore convert`, and :func:`convert` from Python. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from megacore.parallel.weights.fingerprint import combined
from megacore.store.conversions.adapters import check_fingerprint, merged, to_peft
from megacore.store.conversions.formats import open_folder
from megacore.store.conversions.gguf_file import to_gguf
from megacore.store.conversions.target import NARROW, FolderTarget, MadeFolder, Progress, make_folder, threads, unseen
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.audit import fingerprints
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.hugging_face import HuggingFace


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Literal["megacore", "hf", "peft", "gguf"] = "megacore",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    chunks: int = 1,
    layers_per_stage: Sequence[int] | None = None,
    dtype: str | None = None,
    max_shard_size: str | None = None,
    base: str | Path | None = None,
    ignored_fields: Sequence[str] = (),
    config: str | Path | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
) -> MadeFolder:
    """Make a checkpoint in any layout of a Hugging Face folder, or such a folder of a checkpoint, as `megacore convert`
    does, byte for byte -> what was made.

    Numbers are moved and not computed, but for ``dtype`` and ``base``; files are streamed, in the memory of a tensor;
    the folder appears under its name when all of it is there.

    Args:
        source: A Hugging Face folder for "megacore"; a checkpoint, or the folder of a run, for the others; for "gguf"
            and for "fp8" either. A checkpoint of another trainer for all but "peft".
        target: The folder to make, or file, which is not there yet.
        to: The format: "megacore" for a checkpoint, "hf" for a Hugging Face folder, "peft" for adapters alone, "gguf"
            for a file of llama.cpp.
        tp, pp, ep: Parts of a checkpoint: tensor parallel ranks, stages, expert parallel ranks.
        etp: Parts of each expert, 1 or as many as tp.
        chunks: Chunks of each stage (interleaved).
        layers_per_stage: Layers of each of the pp x chunks virtual stages; None for balanced ones.
        dtype: That of the weights, as "bfloat16", with "gguf" also "q8_0", with "hf" also "fp8": matrices in e4m3, and
            a scale for each 128 x 128 of them; None lets each keep its own, bit for bit.
        max_shard_size: The most bytes of a Hugging Face file, as "5GB".
        base: With "hf", the Hugging Face folder to merge adapters into.
        ignored_fields: Fields of config.json to leave out, which are unknown here and change nothing of the model.
        config: With a checkpoint of another trainer, the Hugging Face config.json of the model, or the folder that has
            it; None where it lies beside the tensors.
        jobs: Threads; None for two per core.
        dry_run: Whether to write nothing.

    Raises:
        DamageError: the source is a checkpoint whose files are damaged.
        StoreError: what is asked for does not fit the source, with all reasons; or nothing could be made, and nothing
            is left.
    """
    asked = FolderTarget(to, tp, pp, ep, etp, chunks, layers_per_stage, dtype, max_shard_size)
    opened, opened_base = open_source(source, asked, base, ignored_fields, config)
    return convert_opened(opened, Path(target), asked, opened_base, jobs, dry_run)


def open_source(
    source: str | Path,
    asked: FolderTarget,
    base: str | Path | None,
    ignored_fields: Sequence[str],
    config: str | Path | None,
) -> tuple[SafetensorsFolder, SafetensorsFolder | None]:
    """Open what is to be converted -> the folder, and the model that its adapters are merged into. Raises StoreError:
    there is no such folder, or none that becomes what is asked for."""
    if (to := asked.to) not in ("megacore", "hf", "peft", "gguf"):
        raise StoreError(f"`to={to}`: choose megacore, hf, peft or gguf")
    # Adapters without their model are refused where a model is needed, in words that tell how to merge them.
    opened = open_folder(
        Path(source),
        to == "peft" or base is not None,
        ignored_fields=ignored_fields,
        config=None if config is None else Path(config),
    )
    if base is not None and to != "hf":
        raise StoreError("`base` is for `to=hf`: it is the model that adapters are merged into")
    if to in ("hf", "peft") and opened.format == HuggingFace.format and asked.dtype != NARROW:
        raise StoreError(f"{opened.path} is a Hugging Face folder already")
    if to == "megacore" and opened.format == Checkpoint.format:
        raise StoreError(
            f"{opened.path} is a checkpoint of ours: change its layout with `megacore reshard`, or make a Hugging Face "
            "folder of it with `to=hf`"
        )
    if base is None:
        return opened, None
    opened_base = open_folder(Path(base))
    if opened_base.format != HuggingFace.format:
        raise StoreError(f"{base} is a checkpoint: make a Hugging Face folder of it first, by `to=hf`")
    return opened, opened_base


def convert_opened(
    source: SafetensorsFolder,
    target: Path,
    asked: FolderTarget,
    base: SafetensorsFolder | None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = unseen,
) -> MadeFolder:
    """Convert what :func:`open_source` has opened -> what was made. Raises as :func:`convert`."""
    if asked.to == "gguf":
        asked.refuse_layout("a GGUF file")
        if asked.max_shard_size is not None:
            raise StoreError("`max_shard_size` is for `to=hf`: a GGUF file is one")
        return to_gguf(source, target, asked.dtype, dry_run, progress)
    if base is not None:
        plan = asked.planned(source, partial(merged, source, base, dtype=asked.stored_dtype))
        if not dry_run:
            with progress(sum(record.size for record in base.index.files.values()), base.path.name) as done:
                found = combined(fingerprints(base, "weights", threads(jobs), done))
            check_fingerprint(source, base.path, found)
    elif asked.to == "peft":
        plan = asked.planned(source, lambda _: to_peft(source, asked.stored_dtype))
    else:
        plan = asked.planned(source)
    return make_folder(plan, source.path, target, jobs, dry_run, progress)
