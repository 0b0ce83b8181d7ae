"""The arguments of Megatron-LM's pretrain_gpt.py, from a script or a file of them (megatron/training/arguments.py)."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from itertools import takewhile
from typing import Any

from megacore.batch_sizes import BatchSizes, Ramp
from megacore.foreign.rules import ForeignConfig, Given, Project, Rule, Verdict, off, only, to, where, without

_SHELL = re.compile(r"\[@\]|\[\*\]|\.py$|^(export|torchrun|python3?|\\)$")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def arguments(text: str) -> dict[str, Any]:
    """Return {name of an option: its value} of what stands in a shell script, or in a file of arguments: True of an
    option alone, a list of one with several values. Variables are replaced where the script sets them."""
    known, found = dict[str, str](), dict[str, Any]()

    def filled(word: str) -> str:
        return _VARIABLE.sub(lambda match: known.get(match[1], match[2] or match[0]), word)

    for line in text.replace("\\\n", " ").splitlines():
        values: list[str] | None = None
        for word in _words(line):
            if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word):
                known[match[1]] = filled(match[2])
            elif word.startswith("--"):
                name, _, value = word[2:].partition("=")
                found[name.replace("_", "-")] = values = [filled(value)] if value else []
            elif values is not None:
                values += filled(word).split()
    return {name: _value(values) for name, values in found.items()}


def _value(words: list[str]) -> Any:
    made = list(map(_scalar, words))
    return made[0] if len(made) == 1 else made or True


def _scalar(word: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def _words(line: str) -> list[str]:
    """Return the words of a line without what belongs to the shell: brackets of arrays, arrays that are put in, and
    programs."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that goes over several lines
        words = line.split()
    bare = (re.sub(r"^\w+\+?=\((?=--|$)", "", word).removesuffix(")").removeprefix("(") for word in words)
    return [
        word for word in takewhile(lambda word: word not in ("|", "&&", ";"), bare) if word and not _SHELL.search(word)
    ]


def _model(key: str) -> Rule:
    """Return the rule of a size of the model, as LLaMA spells it; GPT-2 has names of its own."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        names = _GPT2 if _family(config.given) == "gpt2" else {}
        name = names.get(key, key)
        return Verdict({f"model.{name}": value} if name else {}, "" if name else "follows from others")

    return rule


_GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "head_dim": "",
    "num_key_value_heads": "",
}


def _family(given: Given) -> str | None:
    """Return the family that the arguments describe; None where it is none that can be named."""
    gated, rms = bool(given.get("swiglu")), given.get("normalization", "LayerNorm") == "RMSNorm"
    rope = given.get("position-embedding-type", "learned_absolute") == "rope" or given.get(
        "use-rotary-position-embeddings"
    )
    plain = given.get("disable-bias-linear", False)
    if gated and rms and rope and plain:
        if given.get("num-experts"):
            return "mixtral"
        return "qwen2" if given.get("add-qkv-bias") else "qwen3" if given.get("qk-layernorm") else "llama"
    if not (gated or rms or rope or plain or given.get("num-experts")):
        return "gpt2"
    return None


def _layers(value: Any, config: ForeignConfig) -> Verdict:
    family = _family(config.given)
    if family is None:
        return Verdict(
            remark="no family has these parts: LLaMA's are --swiglu, --normalization RMSNorm, --position-embedding-type"
            " rope and --disable-bias-linear, GPT-2's none of them; name the model yourself (megacore models)",
            refused=True,
        )
    return Verdict({"model.family": family, **_model("num_hidden_layers")(value, config).keys})


def _vocabulary(value: Any, config: ForeignConfig) -> Verdict:
    if value is None:
        return Verdict(remark="set model.vocab_size, which the tokenizer says there")
    return Verdict({"model.vocab_size": value})


def _dropout(value: Any, config: ForeignConfig) -> Verdict:
    if _family(config.given) == "gpt2":
        return Verdict({"model.resid_pdrop": value, "model.embd_pdrop": value})
    return off("this family drops no activations: 0")(value, config)


def _attention_dropout(value: Any, config: ForeignConfig) -> Verdict:
    return Verdict({"model.attn_pdrop" if _family(config.given) == "gpt2" else "model.attention_dropout": value})


def _data(value: Any, config: ForeignConfig) -> Verdict:
    listed = value if isinstance(value, list) else [value]
    if len(listed) % 2 == 0 and all(isinstance(each, int | float) for each in listed[::2]):
        paths = [{"path": path, "weight": weight} for weight, path in zip(listed[::2], listed[1::2], strict=True)]
        return Verdict({"data.train": paths}, "Megatron's token files are read as they are")
    return Verdict({"data.train": [{"path": path} for path in listed]}, "Megatron's token files are read as they are")


def _split(value: Any, config: ForeignConfig) -> Verdict:
    shares = [float(each) for each in str(value).split(",")]
    train, held = (*shares, 0.0)[:2]
    remark = "a test part is not held out" if len(shares) > 2 and shares[2] else ""
    return Verdict({"data.validation_fraction": round(held / (train + held), 6)}, remark)


def _samples(key: str, after: str = "") -> Rule:
    """Return the rule of a number of samples; ``after``: the key of those before it, which it counts too."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        size = config.given.get("global-batch-size")
        if not isinstance(size, int):
            return Verdict(remark="counts steps here: give --global-batch-size too", refused=True)
        sizes = BatchSizes(size, _ramp_of(config.given.get("rampup-batch-size")))
        return Verdict({key: sizes.batches(value) - sizes.batches(config.given.get(after, 0))})

    return rule


def _ramp_of(value: Any) -> Ramp | None:
    match value:
        case [int(first), int(increment), int(samples)] if min(value) > 0:
            return first, increment, samples
    return None


def _ramp(value: Any, config: ForeignConfig) -> Verdict:
    if (ramp := _ramp_of(value)) is None:
        return Verdict(remark="is no first size, increment and number of samples", refused=True)
    return Verdict({"batch.ramp": list(ramp)})


def _ratio(value: Any, config: ForeignConfig) -> Verdict:
    most = config.given.get("lr")
    return Verdict({"schedule.min_ratio": float(value) / float(most)}) if most else Verdict(remark="without --lr")


def _warmup(given: Given) -> int | None:
    """Return the steps of the warm-up; None where they are a share of what is not given."""
    steps = given.get("lr-decay-iters", given.get("train-iters"))
    if (share := given.get("lr-warmup-fraction")) is not None:
        return None if steps is None else round(float(share) * steps)
    return int(given.get("lr-warmup-iters", 0))


def _fraction(value: Any, config: ForeignConfig) -> Verdict:
    steps = _warmup(config.given)
    if steps is None:
        return Verdict(remark="a share of --train-iters, which is not given: set schedule.warmup_steps", refused=True)
    return Verdict({"schedule.warmup_steps": steps})


def _decay(value: Any, config: ForeignConfig) -> Verdict:
    if config.given.get("train-iters") == value:
        return Verdict(remark="all steps, as here")
    return Verdict({"schedule.decay_steps": value - (_warmup(config.given) or 0)})


def _chunks(value: Any, config: ForeignConfig) -> Verdict:
    return Verdict({"pipeline.chunks": value, "pipeline.schedule": "interleaved"})


def _layers_of_chunk(value: Any, config: ForeignConfig) -> Verdict:
    layers, stages = config.given.get("num-layers", 0), config.given.get("pipeline-model-parallel-size", 1)
    return _chunks(layers // (stages * value), config)


def _group(value: Any, config: ForeignConfig) -> Verdict:
    virtual = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if all(config.given.get(each) is None for each in virtual):
        return Verdict(remark="one chunk of layers a stage: nothing to group")
    return Verdict({"pipeline.group": value}, "at most so many, as even as can be; theirs leave a smaller one for last")


def _recompute(value: Any, config: ForeignConfig) -> Verdict:
    remark = "other parts of a block than theirs; numbers are the same" if value == "selective" else ""
    return Verdict({"memory.recompute": value}, remark)


_RULES: dict[str, Rule] = {
    "num-layers": _layers,
    "hidden-size": _model("hidden_size"),
    "ffn-hidden-size": _model("intermediate_size"),
    "num-attention-heads": _model("num_attention_heads"),
    "num-query-groups": _model("num_key_value_heads"),
    "kv-channels": _model("head_dim"),
    "max-position-embeddings": _model("max_position_embeddings"),
    "norm-epsilon": _model("rms_norm_eps"),
    "layernorm-epsilon": _model("rms_norm_eps"),
    "rotary-base": lambda value, config: Verdict(
        {"model.rope_parameters": {"rope_type": "default", "rope_theta": float(value)}}
    ),
    "rotary-percent": only(1, 1.0, why="all dimensions of a head rotate in these families"),
    "use-rope-scaling": off("write model.rope_parameters as Hugging Face does (megacore models llama-3.1-8b)"),
    "untie-embeddings-and-output-weights": where({True: {"model.tie_word_embeddings": False}, False: {}}, "is a flag"),
    "tied": to("model.tie_word_embeddings"),
    "hidden-dropout": _dropout,
    "attention-dropout": _attention_dropout,
    "vocab-size": _vocabulary,
    "num-experts": to("model.num_local_experts"),
    "moe-router-topk": to("model.num_experts_per_tok"),
    "moe-aux-loss-coeff": off("set experts.batch_balance or experts.sequence_balance, which are counted otherwise"),
    "moe-z-loss-coeff": off("set experts.z_loss, which is counted otherwise"),
    "moe-*": without("nothing is dropped or padded here, and numbers are the same"),
    "init-method-std": to("model.initializer_range"),
    "make-vocab-size-divisible-by": without("the vocabulary is padded to tp in memory alone"),
    "seq-length": to("data.sequence_length"),
    "encoder-seq-length": to("data.sequence_length"),
    "micro-batch-size": to("batch.micro_size"),
    "global-batch-size": to("batch.global_size"),
    "rampup-batch-size": _ramp,
    "train-iters": to("train.steps"),
    "train-samples": _samples("train.steps"),
    "lr": to("optimizer.lr", float),
    "min-lr": _ratio,
    "lr-decay-style": to(
        "schedule.name", {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    ),
    "lr-decay-iters": _decay,
    "lr-decay-samples": _samples("schedule.decay_steps", after="lr-warmup-samples"),
    "lr-wsd-decay-iters": to("schedule.decay_steps"),
    "lr-warmup-iters": to("schedule.warmup_steps"),
    "lr-warmup-fraction": _fraction,
    "lr-warmup-samples": _samples("schedule.warmup_steps"),
    "optimizer": only("adam", why="only AdamW is carried: see optimizer.name for Muon"),
    "weight-decay": to("optimizer.weight_decay", float),
    "adam-beta1": without("goes with adam-beta2"),
    "adam-beta2": lambda value, config: Verdict(
        {"optimizer.betas": [float(config.given.get("adam-beta1", 0.9)), float(value)]}
    ),
    "adam-eps": to("optimizer.eps", float),
    "clip-grad": to("optimizer.clip", lambda value: float(value) or None),
    "bf16": where({True: {"train.precision": "bf16"}}, "is a flag"),
    "fp16": where({True: {"train.precision": "fp16"}}, "is a flag"),
    "precision": to("train.precision"),
    "apply-layernorm-1p": without("the norm's weight is another number there, and the same norm"),
    "grad-reduce-in-bf16": where({True: {"zero.compress": "bf16"}, False: {}}, "is a flag"),
    "fp8-format": off("train.precision=fp8, whose scales are of each tensor (docs/precision.md)"),
    "initial-loss-scale": to("loss_scale.initial", float),
    "min-loss-scale": to("loss_scale.minimum", float),
    "loss-scale-window": to("loss_scale.growth_interval", int),
    "loss-scale": off("the scale is dynamic here"),
    "hysteresis": without("each overflow halves the scale here"),
    "tensor-model-parallel-size": to("mesh.tp"),
    "pipeline-model-parallel-size": to("mesh.pp"),
    "context-parallel-size": to("mesh.cp"),
    "expert-model-parallel-size": to("mesh.ep"),
    "expert-tensor-parallel-size": to("mesh.etp"),
    "cp-comm-type": to("context.exchange", {"p2p": "ring", "all_gather": "gather", "a2a": "heads"}),
    "num-layers-per-virtual-pipeline-stage": _layers_of_chunk,
    "num-virtual-stages-per-pipeline-rank": _chunks,
    "microbatch-group-size-per-virtual-pipeline-stage": _group,
    "sequence-parallel": without("tokens are always split over tp between layers"),
    "use-distributed-optimizer": where({True: {"zero.shard": "optimizer"}}, "is a flag"),
    "data-parallel-sharding-strategy": to(
        "zero.shard",
        {"no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters"},
    ),
    "recompute-activations": lambda value, config: _recompute("selective", config),
    "recompute-granularity": _recompute,
    "recompute-method": without("a block at a time"),
    "recompute-num-layers": only(1, None, why="all blocks are recomputed here, one at a time"),
    "optimizer-cpu-offload": where({True: {"memory.offload_optimizer": "host"}}, "is a flag"),
    "data-path": _data,
    "train-data-path": _data,
    "split": _split,
    "reset-attention-mask": where({True: {"data.within_documents": True}}, "is a flag"),
    "reset-position-ids": without("goes with --reset-attention-mask: positions begin anew there"),
    "eod-mask-loss": off("the token after a document's end is learned here"),
    "save": to("out"),
    "load": without("convert that checkpoint to Hugging Face's format there, and name it by --init"),
    "save-interval": to("checkpoint.every"),
    "eval-interval": to("evaluate.every"),
    "eval-iters": to("evaluate.batches"),
    "log-interval": to("log.every"),
    "tensorboard-dir": lambda value, config: Verdict({"log.tensorboard": True}, "the files go to the run's folder"),
    "wandb-project": to("log.wandb"),
    "seed": lambda value, config: Verdict({"train.seed": value, "data.seed": value}, "other numbers come of it"),
    "distributed-timeout-minutes": to("train.timeout", float),
}
_WITHOUT = {
    "says the family": "swiglu normalization position-embedding-type use-rotary-position-embeddings add-qkv-bias "
    "disable-bias-linear qk-layernorm group-query-attention no-position-embedding",
    "how ranks are started: NPROC_PER_NODE, NNODES, NODE_RANK and MASTER_ADDR (docs/launch.md)": "nproc-per-node "
    "nnodes node-rank master-* rdzv-*",
    "token files are read; the tokenizer beside them, if there is one, goes with the model": "tokenizer-* vocab-file "
    "merge-file mock-data data-cache-path",
    "kernels are chosen here (docs/kernels.md)": "transformer-impl use-flash-attn attention-backend no-*-fusion "
    "cross-entropy-*",
    "messages travel beside the computing here wherever they can": "overlap-* tp-comm-overlap* ddp-* align-* delay-*",
    "says nothing of the training": "use-mcore-models num-workers distributed-backend log-* tensorboard-* wandb-* "
    "timing-* manual-gc* ckpt-* dist-ckpt-* async-save use-checkpoint-args no-load-* use-dist-ckpt no-save-* exit-* "
    "override-opt* use-cpu-initialization profile* no-create-attention-mask* attention-softmax-in-fp32 "
    "accumulate-allreduce-grads-in-fp32 use-megatron-fsdp finetune empty-unused-memory-level calculate-per-token-loss",
}


def _defaults(given: Given) -> Given:
    """Return the values of what is left out that the numbers depend on."""
    found: dict[str, Any] = {} if given.keys() & {"bf16", "fp16"} else {"precision": "fp32"}
    if "num-layers" in given:
        width, family = given.get("hidden-size"), _family(given)
        found["vocab-size"] = None
        found |= {"tied": True} if not given.get("untie-embeddings-and-output-weights") else {}
        found |= {"hidden-dropout": 0.1, "attention-dropout": 0.1} if family else {}
        if family not in (None, "gpt2") and isinstance(width, int):
            heads = given.get("num-attention-heads", 1)
            mlp = int(4 * width * 2 / 3) // 64 * 64 if given.get("swiglu") else 4 * width
            found |= {"ffn-hidden-size": mlp, "kv-channels": width // heads, "rotary-base": 10000}
            found |= {} if given.get("group-query-attention") else {"num-query-groups": heads}
            found |= {} if "layernorm-epsilon" in given else {"norm-epsilon": 1e-5}
    if "data-path" in given:
        found["split"] = "969,30,1"
    if "lr" in given:
        found |= {"adam-beta2": 0.999, "weight-decay": 0.01, "min-lr": 0.0, "lr-decay-style": "linear"}
    return found


def _elsewhere(value: Any) -> str:
    return f"{value} is set elsewhere" if "$" in str(value) else ""


MEGATRON = Project("Megatron-LM", _RULES, _WITHOUT, _defaults, _elsewhere)
