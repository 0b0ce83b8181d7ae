"""`megacore models`: the families and presets that a recipe may name, their sizes, and what is special of each.

docs/zoo.md is what it prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacore.models.anatomy import AltUp, Anatomy
from megacore.models.config import ModelConfig, active_parameters, parameters_in_words
from megacore.models.registry import FAMILIES, configure, family, presets
from megacore.models.wrappers import WRAPPERS
from megacore.parallel.enum_errors import nearest
from megacore.parallel.weights.schema import Schema
from megacore.say import err, say
from megacore.tools.options import command_parser

HEADING = """# The zoo

Printed by `megacore models` from the registry, [models/registry.py](../models/registry.py). What is special of a family
is read off the weights table and the anatomy of its largest preset.

Of each family the tests compare random small models with transformers' class in float64 at 1e-9: logits, loss and every
gradient (60 configs with `-m grid`); every default of `config.json`; the names that `save_pretrained` writes; and
greedy tokens out of our cache. They train it on layouts beside one process (tp with shared heads, uneven and
interleaved stages, ZeRO, packed documents, adapters), and convert, reshard and export it bitwise.
"""

NOT_CARRIED = {
    "other states in place of keys and values": "rwkv, xlstm",
    "state spaces (Mamba) of heads of channels, beside blocks that several layers share": "zamba",
    "keys and values that are compressed, or convolved": "inkling2_text, inkling_text, zaya",
    "indexers that choose blocks of tokens": "minimax_m3_vl_text, qwen4_exp, qwen4_exp_text",
    "several residual streams, or sums weighed by depth": "beam, hy_v4",
    "gates of norms or of latent attention": "axk2, dots3_note, dots3_note_text",
    "a rope for some kinds of layers and none for the others": "cohere_compass_text",
    "experts in place of the linears of attention": "jetmoe",
    "differences of attentions, or masks that are learned": "diffllama, doge",
    "layers that are passed through more than once": "hrm_text",
    "weights of three values, which every step rounds": "bitnet",
    "patches of bytes": "blt",
    "biases of scores by distance, which are learned": "cpmant",
    "a rope that transformers does not read where published files say it": "dbrx",
    "text that looks at tokens after it": "xlnet",
    "hashes that choose which tokens a token looks at": "reformer",
    "drafts of another model, whose keys and values they look at": "gemma4_assistant, gemma4_unified_assistant",
    "models that also see, hear or speak, whose other parts nobody carries": "emu3, fuyu, git, got_ocr2, mllama, "
    "moshi, moss_transcribe_diarize, musicgen, musicgen_melody, phi4_multimodal",
    "decoders of an encoder's states": "bart, bigbird_pegasus, blenderbot, blenderbot-small, marian, mbart, mvp, "
    "pegasus, plbart, prophetnet, trocr, whisper",
    "encoders, which transformers also runs as decoders": "bert, bert-generation, big_bird, camembert, data2vec-text, "
    "electra, ernie, megatron-bert, rembert, roberta, roberta-prelayernorm, roc_bert, roformer, xlm, xlm-roberta, "
    "xlm-roberta-xl, xmod",
}
"""{what is not there: the model types of transformers that need it}: every causal language model of transformers 5.23
that is no family, and some others."""


def main(argv: Sequence[str]) -> int:
    parser = command_parser("models", __doc__)
    parser.add_argument("name", nargs="?", help="a family (qwen3) or a preset (qwen3-8b); all families by default")
    name = parser.parse_args(argv).name
    if name is None:
        say("\n".join([HEADING, *_table(), *_seeing(), *_not_carried()]))
        return 0
    known = presets()
    if name in FAMILIES:
        for preset in family(name).presets:
            say(_line(preset, configure({"preset": preset})))
    elif name in known:
        say(_line(name, configure({"preset": name})))
    else:
        err(f"there is no family or preset {name!r}{nearest(name, [*FAMILIES, *known])}")
        return 2
    return 0


def _table() -> Iterator[str]:
    yield "| family | class of transformers | special | presets |"
    yield "|---|---|---|---|"
    for name in sorted(FAMILIES):
        found = family(name)
        made = {preset: configure({"preset": preset}) for preset in found.presets}
        largest = max(made.values(), key=lambda config: config.schema.parameters)
        sizes = ", ".join(
            f"{preset} ({_count(config)})" for preset, config in made.items() if not preset.endswith("-tiny")
        )
        yield f"| {name} | {found.config.architecture} | {', '.join(special(largest))} | {sizes} |"


def _seeing() -> Iterator[str]:
    yield "\nModels that also see: their text model is trained, and tower and projector are carried byte by byte"
    yield "([finetune.md](finetune.md#models-that-also-see)). Of each a random small one of transformers goes there and"
    yield "back over tp=2 x pp=2 bitwise, with the same logits of text and image; ours of text agree in fp64 at 1e-9,"
    yield "and those of an image where chats with images are trained on (gemma4: where layers are told of no tokens, as"
    yield "in 26B-A4B and 31B).\n"
    yield "| model type | text model | chats with images |\n|---|---|---|"
    for name, each in sorted(WRAPPERS.items()):
        yield f"| {name} | {', '.join(each.families)} | {f'no: {each.no_images}' if each.no_images else 'yes'} |"


def _not_carried() -> Iterator[str]:
    yield "\nNot carried, and why: every other model type of which transformers 5.23 has a causal language model, and"
    yield "some of which it has none.\n"
    yield "| what is wanting, or what they are | model types |\n|---|---|"
    yield from (f"| {part} | {names} |" for part, names in NOT_CARRIED.items())


def _line(preset: str, config: ModelConfig) -> str:
    sizes = ", ".join(f"{axis} {size:,}" for axis, size in config.sizes.items())
    return f"{preset}: {parameters_in_words(config)} ({sizes}): {', '.join(special(config))}"


def _count(config: ModelConfig) -> str:
    count, active = config.schema.parameters, active_parameters(config)
    return _short(count) + (f", {_short(active)} active" if active < count else "")


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def special(config: ModelConfig) -> list[str]:
    """Return what a model has that a plain one has not, in a few words each."""
    return [*_of_table(config.schema), *_of_anatomy(config.anatomy)]


def _of_table(schema: Schema) -> Iterator[str]:
    names = {param.name.removeprefix("layers.{layer}.").removeprefix("local_"): param for param in schema.params}
    for mixer, words in (
        ("delta", "the gated delta rule"),
        ("lightning", "lightning attention"),
        ("ssm", "selective scans" if "ssm.select.weight" in names else "state spaces"),
        ("lru", "linear recurrences"),
        ("short", "short convolutions"),
    ):
        of_either = (f"{where}{mixer}.{each}.weight" for where in ("", "then.") for each in ("conv", "inner"))
        layers = {layer for each in of_either if each in names for layer in names[each].values("layer", schema.sizes)}
        if layers:
            yield f"{words} in {len(layers)} of {schema.sizes['layer']} layers"
    if (block := names.get("pair_norm.weight")) is not None and block.owners is not None:
        yield f"{len(block.layers or ())} shared block(s) in front of {len(block.owners)} of them"
    if (row := names.get("delta.fade_bias")) is not None and "state_key" in row.sentence.axes:
        yield "gates of channels"
    qkv = names.get("attn.qkv.weight")
    labels = () if qkv is None else qkv.sentence.labels
    if "attn.gate.weight" in names or not {"q.gate", "gate"}.isdisjoint(labels):
        yield "gated attention"
    # Where keys have the axis `share`, groups are of heads that share nothing.
    each = qkv is not None and any("share" in qkv.sentence.piece_axes(k) for k in qkv.sentence.labels if k[0] == "k")
    heads = schema.sizes.get("heads", 0)
    if min(schema.sizes.get(axis, heads) for axis in ("kv", "groups")) < heads and not each:
        yield "shared keys and values"
    if "local_head" in schema.sizes:
        yield "heads of other sizes in windows"
    elif "local_kv" in schema.sizes:
        yield "more heads of keys and values in windows"
    elif "local_heads" in schema.sizes:
        yield "heads of two numbers"
    if "attn_norm.weight" not in names and "attn_out_norm.weight" in names:
        yield "norms after the branches"
    elif "attn_sum_norm.weight" in names:
        yield "norms of the sums behind the branches"
    elif "attn_out_norm.weight" in names:
        yield "norms before and after the branches"
    if "attn.q_norm.weight" in names:
        axes = names["attn.q_norm.weight"].sentence
        yield "norms of queries and keys" + (" over all heads" if len(axes.dims) == 1 < len(axes.axes) else "")
    if biases := [linear for linear in ("attn.qkv", "attn.out", "mlp.up", "mlp.down") if f"{linear}.bias" in names]:
        yield f"biases ({', '.join(biases)})"
    if any({*param.sentence.labels} == {"q", "k"} for param in schema.params):
        yield "keys as values"
    if "attn.kv_a.weight" in names:
        yield "latent attention"
    if "then.attn.out.weight" in names:
        yield "two blocks in a layer"
    if "attn.sinks" in names:
        yield "sinks"
    if router := names.get("mlp.router.weight"):
        if router.layers is not None:
            yield f"experts in {len(router.layers)} of {schema.sizes['layer']} layers"
        if table := names.get("mlp.router.table"):
            listed = table.layers or range(schema.sizes["layer"])
            yield f"experts listed for each token in {len(listed)} of {schema.sizes['layer']} layers"
        if "mlp.shared.up.weight" in names:
            yield "a shared expert" + (" with a gate" if "mlp.shared_gate.weight" in names else "")
    elif "mlp.up.weight" not in names:
        yield "no networks"
    elif "gate" not in names["mlp.up.weight"].sentence.labels:
        yield "no gate"
    others = {
        "positions.weight": "learned positions",
        "embed_norm.weight": "a norm of the embeddings",
        "inputs.embed.weight": "embeddings of each layer",
        "laurel.left.weight": "low-rank linears beside attention",
        "dense_head.weight": "a dense layer before the head",
    }
    yield from (words for name, words in others.items() if name in names)
    if "head.weight" not in names:
        yield "tied head"


def _of_anatomy(anatomy: Anatomy) -> Iterator[str]:
    layers = anatomy.layers
    if anatomy.norm == "layer":
        yield "LayerNorm"
    if (routing := anatomy.routing) is not None:
        limited = f" out of {routing.kept_groups} of {routing.groups} groups" if routing.groups > 1 else ""
        how = {"softmax": "", "sigmoid": " by sigmoids", "sqrtsoftplus": " by roots of softplus"}[routing.score]
        close = ", weighed among those that are close" if routing.weigh == "close" else ""
        inputs = ", whose inputs are scaled" if routing.scales_inputs else ""
        idle = f", of which {routing.idle} do nothing" if routing.idle else ""
        yield f"top {routing.top_k} of {routing.experts} experts{idle}{limited}{how}{close}{inputs}"
    if anatomy.sinusoids is not None:
        yield "sinusoids for positions"
    if anatomy.plain_norms:
        yield "norms without weights"
    if anatomy.alibi is not None:
        yield "slopes of heads in place of positions"
    if tempered := sum(each.temperature is not None for each in layers):
        yield "queries scaled by their position" + (
            f" in {tempered} of {len(layers)} layers" if tempered < len(layers) else ""
        )
    if anatomy.norms_after_rope:
        yield "norms of heads after the rope"
    if anatomy.norm_offset:
        yield f"norms of {anatomy.norm_offset:g} + w"
    if anatomy.activation != "silu":
        yield anatomy.activation
    if anatomy.parallel:
        yield "parallel branches"
    if windows := [each.window for each in layers if each.window is not None]:
        share = "" if len(windows) == len(layers) else f" in {len(windows)} of {len(layers)} layers"
        yield f"window {windows[0]:,}{share}"
    if tops := [each.top for each in layers if each.top is not None]:
        sharing = sum(each.chooser is not None and each.chooser != at for at, each in enumerate(layers))
        what = "blocks" if any(each.block for each in layers) else "tokens"
        yield f"{tops[0]:,} {what} that an indexer chooses" + (f", in {sharing} layers another's" if sharing else "")
    if blocks := sorted({each.block for each in layers if each.block is not None}):
        yield f"blocks of {' and '.join(map(str, blocks))} tokens as keys"
    if sharing := sum(each.keys is not None for each in layers):
        yield f"in {sharing} of {len(layers)} layers another's keys and values"
    if anatomy.streams is not None:
        predicted = " that a layer predicts" if isinstance(anatomy.streams, AltUp) else ""
        yield f"{anatomy.streams.count} residual streams{predicted}"
    if some := sum(map(bool, anatomy.cut)):
        yield f"gates that are cut off in {some} of {len(layers)} layers"
    if chunks := [each.chunk for each in layers if each.chunk is not None]:
        yield f"chunks of {chunks[0]:,} in {len(chunks)} of {len(layers)} layers"
    if still := sum(each.rope is None for each in layers) * bool(anatomy.ropes):
        yield f"no rope in {still} of {len(layers)} layers"
    kinds = dict.fromkeys(rope.rope_type for rope in anatomy.ropes.values() if rope.rope_type != "default")
    yield from (f"{kind} rope" for kind in kinds)
    if len(anatomy.ropes) > 1:
        yield "a rope for each kind of layer"
    factors = {factor for rope in anatomy.ropes.values() if (factor := rope.partial_rotary_factor) != 1}
    yield from (f"{factor:g} of each head turns" for factor in factors)
    if anatomy.attention_softcap or anatomy.logit_softcap:
        yield "softcaps"
    if anatomy.factors.keys() - {"experts"}:
        yield "factors of each branch"
    scales = {
        "embeddings": anatomy.embedding_scale != 1,
        "branches": anatomy.branch_scale != 1,
        "logits": anatomy.logit_scale != 1,
        "scores": anatomy.attention_scale is not None and anatomy.alibi is None,
    }
    if any(scales.values()):
        yield f"scaled {', '.join(what for what, scaled in scales.items() if scaled)}"
