"""Rows of weights tables that many families share: a norm, a linear, the two ends of a model. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.parallel.weights.schema import Param

_QKV = "(q: heads {0} + k: kv {0} + v: kv head)"
QKV = _QKV.format("head")
# Where no heads share keys and values; and of each head together, as GPT-NeoX stores them.
QKV_EACH = "(q: heads head + k: heads head + v: heads head)"
QKV_BY_HEAD = "(heads (q: head + k: head + v: head))"
BY_HEAD: dict[str, Any] = {"here": QKV_EACH, "stored": QKV_BY_HEAD}
# Initial values: of decays spread evenly from 1 to 16, and of steps from 0.001 to 0.1, of which softplus makes as much.
FADES: Mapping[str, Any] = {"mean": 8.5, "std": 4.33, "uniform": True, "log": True}
STEPS: Mapping[str, Any] = {"mean": 0.0505, "std": 0.0285, "uniform": True, "log": True}
HEADS, KV_HEADS = "(heads head)", "(kv head)"
OF_ALL = HEADS, KV_HEADS
GATE_UP = "(gate: mlp + up: mlp)"
GATE_UP_OF_EXPERTS = "(gate: expert_mlp + up: expert_mlp)"
# What the gated delta rule makes of a token, head by head of keys.
STATE_VALUES = "state_heads each state_value"
STATE_QKV = f"q: state_heads state_key + k: state_heads state_key + v: {STATE_VALUES}"
# What a state space layer makes of a token: each group of b and c is of several heads of x.
STATE_XBC = "x: state_heads state_value + b: state_groups state_key + c: state_groups state_key"

Rows = tuple[Param, ...]

# Parts of a block, of ``DecoderConfig.parts``: its branches, the norms of what these are given
# and of what they give.
BRANCHES = {"mixer": "", "network": ""}
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
OUT_NORMS = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}


def around(attn_norm: str, mlp_norm: str, attn_out_norm: str = "", mlp_out_norm: str = "") -> dict[str, str]:
    """Return the parts of a block in the order in which they are computed, with norms that have a name."""
    attention = {"attn_norm": attn_norm, "mixer": "", "attn_out_norm": attn_out_norm}
    parts = attention | {"mlp_norm": mlp_norm, "network": "", "mlp_out_norm": mlp_out_norm}
    return {part: hf for part, hf in parts.items() if hf or part in BRANCHES}


@dataclass(frozen=True)
class Pairs:
    """Heads of which dimensions 2 i and 2 i + 1 turn together on disk, as GPT-J's do, and i and i + turning/2 here.

    Args:
        head: Size of a head.
        turning: The number of its dimensions that turn, the first ones.
    """

    head: int
    turning: int

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the axes of a head."""
        still = self.head - self.turning
        return {"two": 2, "half": self.turning // 2} | ({"rest": still} if still else {})

    @property
    def here(self) -> str:
        """The sentence of a head of queries or keys."""
        return self._head("two half")

    @property
    def stored(self) -> str:
        """Hugging Face's sentence of it."""
        return self._head("half two")

    def _head(self, pairs: str) -> str:
        return pairs if self.turning == self.head else f"(turn: {pairs} + still: rest)"


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one family's weights table.

    Our names are ``layers.{layer}.<name>`` within a block, where Hugging Face's are ``<layer>.<name>``.

    Args:
        layer: The beginning of Hugging Face's names of a block.
        std: Standard deviation of initial weights.
        out_std: That of the linears that end a branch.
        norm_mean: Initial weight of norms.
        norm_bias: Whether norms have biases.
    """

    layer: str = "model.layers.{layer}"
    std: float
    out_std: float
    norm_mean: float = 1.0
    norm_bias: bool = False

    def row(self, name: str, pattern: str, hf: str, stored: str = "", **how: Any) -> Param:
        """Return a row of a block, by its names there."""
        return Param(f"layers.{{layer}}.{name}", pattern, f"{self.layer}.{hf}", stored, **how)

    def norm(self, name: str, hf: str, pattern: str = "embed", *, stored: str = "", mean: float | None = None) -> Rows:
        """Return a norm of a block, with a bias where norms have one; ``stored`` where Hugging Face stores it
        otherwise."""
        mean = self.norm_mean if mean is None else mean
        weight = self.row(f"{name}.weight", pattern, f"{hf}.weight", stored, mean=mean, vector=True)
        bias = self.row(f"{name}.bias", pattern, f"{hf}.bias", stored, vector=True)
        return (weight, bias) if self.norm_bias else (weight,)

    def norms_of_heads(self, hf: str = "self_attn.{}_norm", of: tuple[str, str] = ("head", "head")) -> Rows:
        """Return norms of queries and keys, of each head unless the sentences say otherwise."""
        return self.norm("attn.q_norm", hf.format("q"), of[0]) + self.norm("attn.k_norm", hf.format("k"), of[1])

    def embed_norm(self, hf: str) -> Rows:
        """Return a norm of the embeddings, of this name."""
        weight = Param("embed_norm.weight", "embed", f"{hf}.weight", at="first", mean=self.norm_mean, vector=True)
        bias = Param("embed_norm.bias", "embed", f"{hf}.bias", at="first", vector=True)
        return (weight, bias) if self.norm_bias else (weight,)

    def dense_head(self, hf: str = "lm_head", *, bias: bool = False) -> Rows:
        """Return a linear and a norm between the final norm and the head, of this name, as ModernBERT has them."""
        dense = Param("dense_head.weight", "embed turned", f"{hf}.dense.weight", at="last", std=self.out_std)
        norm = Param(
            "dense_head_norm.weight", "embed", f"{hf}.norm.weight", at="last", mean=self.norm_mean, vector=True
        )
        of_norm = Param("dense_head_norm.bias", "embed", f"{hf}.norm.bias", at="last", vector=True)
        of_dense = Param("dense_head.bias", "embed", f"{hf}.dense.bias", at="last")
        return (dense, *([of_dense] if bias else []), norm, *([of_norm] if self.norm_bias else []))

    def linear(
        self,
        name: str,
        out: str,
        inner: str,
        hf: str,
        *,
        bias: bool = False,
        stored: str = "",
        stored_bias: str = "",
        held: str = "",
        ends: bool = False,
    ) -> Rows:
        """Return a linear of a block.

        Args:
            name: Our name.
            out, inner: Sentences of what it gives and what it takes.
            hf: Hugging Face's name; ``{q,k,v}`` where each piece is a tensor of its own.
            bias: Whether it has one.
            stored, stored_bias: Hugging Face's sentences of the weight and the bias, where they differ.
            held: The name of transformers for the weight in memory, where that differs.
            ends: Whether it ends a branch.
        """
        how = {"hf_held": held and f"{self.layer}.{held}", "std": self.out_std if ends else self.std}
        weight = self.row(f"{name}.weight", f"{out} {inner}", f"{hf}.weight", stored, **how)
        return (weight, self.row(f"{name}.bias", out, f"{hf}.bias", stored_bias)) if bias else (weight,)

    def attention(
        self,
        *,
        bias: bool = False,
        out_bias: bool = False,
        hf: str = "self_attn.{q,k,v}_proj",
        out: str = "self_attn.o_proj",
        pairs: Pairs | None = None,
        here: str = QKV,
        stored: str = "",
        name: str = "attn",
        heads: str = HEADS,
    ) -> Rows:
        """Return queries, keys, values and what comes out, as LLaMA's ``self_attn`` has them.

        Args:
            bias, out_bias: Whether they have biases.
            hf, out: Hugging Face's names.
            pairs: The pairs that turn together in heads, where neighbours do on disk.
            here, stored: The sentences of queries, keys and values, ours and Hugging Face's, where that differs.
            name: Ours.
            heads: The sentence of what heads give.
        """
        if pairs is not None:
            here, stored = _QKV.format(pairs.here), _QKV.format(pairs.stored)
        of_weight = stored and f"{stored} embed"
        return (
            *self.linear(f"{name}.qkv", here, "embed", hf, bias=bias, stored=of_weight, stored_bias=stored),
            *self.linear(f"{name}.out", "embed", heads, out, bias=out_bias, ends=True),
        )

    def sinks(self, hf: str = "self_attn.sinks", held: str = "", name: str = "attn") -> Rows:
        """Return a logit of each head that stands for no token; ``held`` where its name in memory is another."""
        return (self.row(f"{name}.sinks", "heads", hf, hf_held=held and f"{self.layer}.{held}", std=self.std),)

    def gated_attention(self, *, bias: bool = False) -> Rows:
        """Queries and gates, head by head, keys, values and what comes out, as Qwen3-Next's ``self_attn`` has them."""
        here = "(q: (own: heads head + gate: heads head) + k: kv head + v: kv head)"
        stored = "(q: heads (own: head + gate: head) + k: kv head + v: kv head)"
        return self.attention(bias=bias, out_bias=bias, here=here, stored=stored)

    def delta_rule(
        self, inner: str, hf: str, conv: str = "conv1d", norm: str = "norm", out: str = "out_proj", *, stored: str = ""
    ) -> Rows:
        """Return the gated delta rule, as Qwen3-Next's ``linear_attn`` has it.

        Args:
            inner: The sentence of what is projected: q, k, v, z, b, a, in this order.
            hf: Hugging Face's names of its pieces.
            conv, norm, out: And of the convolution, the norm and what comes out.
            stored: Its sentence of what is projected, where it differs.
        """
        each, hf_of = "(state_heads each)", "linear_attn.{}".format
        return (
            *self.linear("delta.inner", inner, "embed", hf_of(hf), stored=stored and f"{stored} embed"),
            *self.convolution("delta.conv", f"({STATE_QKV})", hf_of(conv)),
            # Of decays spread evenly from 0.01 to 16.
            self.row("delta.fade", each, hf_of("A_log"), mean=8.005, std=4.616, uniform=True, log=True),
            self.row("delta.fade_bias", each, hf_of("dt_bias"), mean=1.0),
            *self.norm("delta.norm", hf_of(norm), "state_value", mean=1.0),
            *self.linear("delta.out", "embed", "(state_heads each state_value)", hf_of(out), ends=True),
        )

    def lightning_attention(self) -> Rows:
        """Return lightning attention, as MiniMax-01's ``self_attn`` has it."""
        keys, values = "state_heads state_key", "state_heads state_value"
        by_head = "state_heads (q: state_key + k: state_key + v: state_value)"
        inner, stored = (
            f"(qkv: ({each}) + gate: {values})" for each in (f"q: {keys} + k: {keys} + v: {values}", by_head)
        )
        linears = "self_attn.{qkv_proj,output_gate}"
        return (
            *self.linear("lightning.inner", inner, "embed", linears, stored=f"{stored} embed"),
            *self.norm("lightning.norm", "self_attn.norm", f"({values})"),
            *self.linear("lightning.out", "embed", f"({values})", "self_attn.out_proj", ends=True),
        )

    def state_space(
        self,
        hf: str = "mamba",
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        norm: bool = True,
    ) -> Rows:
        """Return a state space layer (Mamba-2), as Bamba's ``mamba`` has it, or of another name.

        Args:
            hf: Hugging Face's name.
            bias: Whether what takes the tokens has one, and what gives them where nothing else is said.
            out_bias: Whether what gives the tokens has one.
            conv_bias: Whether the convolution has one.
            norm: Whether what comes out is normalised.
        """
        out_bias = bias if out_bias is None else out_bias
        inner = f"(z: state_heads state_value + {STATE_XBC} + dt: state_heads)"
        return (
            *self.linear("ssm.inner", inner, "embed", f"{hf}.in_proj", bias=bias),
            *self.convolution("ssm.conv", f"({STATE_XBC})", f"{hf}.conv1d", bias=conv_bias),
            self.row("ssm.fade", "state_heads", f"{hf}.A_log", **FADES),
            self.row("ssm.step", "state_heads", f"{hf}.dt_bias", **STEPS),
            self.row("ssm.skip", "state_heads", f"{hf}.D", mean=1.0),
            *(self.norm("ssm.norm", f"{hf}.norm", "(state_heads state_value)", mean=1.0) if norm else ()),
            *self.linear("ssm.out", "embed", "(state_heads state_value)", f"{hf}.out_proj", bias=out_bias, ends=True),
        )

    def convolution(self, name: str, channels: str, hf: str, *, bias: bool = False) -> Rows:
        """Return a short convolution of each channel, and its bias where it has one."""
        weight = self.row(f"{name}.weight", f"{channels} one taps", f"{hf}.weight", std=self.std, vector=True)
        return (weight, self.row(f"{name}.bias", channels, f"{hf}.bias")) if bias else (weight,)

    def selective_scan(
        self, key: int, latent: int, hf: str = "mamba", *, bias: bool = False, conv_bias: bool = True, norm: str = ""
    ) -> Rows:
        """Return a state space layer of channels (Mamba), as Jamba's ``mamba`` has it, or of another name.

        Args:
            key: The numbers of a channel's state.
            latent: The numbers of what steps are made of.
            hf: Hugging Face's name.
            bias: Whether what takes the tokens has one, and what gives them.
            conv_bias: Whether the convolution has one.
            norm: Its name of the norms of what steps are made of, of B and of C; empty: they have no weights.
        """
        normed = {"dt": "dt_latent", "b": "state_key", "c": "state_key"} if norm else {}
        steps: dict[str, Any] = {"std": (3 * latent) ** -0.5, "uniform": True}
        fades: dict[str, Any] = {"mean": (1 + key) / 2, "std": (key - 1) / 12**0.5, "uniform": True, "log": True}
        return (
            *self.linear("ssm.inner", "(x: channels + z: channels)", "embed", f"{hf}.in_proj", bias=bias),
            *self.convolution("ssm.conv", "channels", f"{hf}.conv1d", bias=conv_bias),
            *self.linear("ssm.select", "(dt: dt_latent + b: state_key + c: state_key)", "channels", f"{hf}.x_proj"),
            *(
                row
                for each, of in normed.items()
                for row in self.norm(f"ssm.{each}_norm", f"{hf}.{norm.format(each)}", of)
            ),
            self.row("ssm.dt.weight", "channels dt_latent", f"{hf}.dt_proj.weight", **steps),
            # Of steps and decays as those of a state space of heads.
            self.row("ssm.step", "channels", f"{hf}.dt_proj.bias", **STEPS),
            self.row("ssm.fade", "channels state_key", f"{hf}.A_log", vector=True, **fades),
            self.row("ssm.skip", "channels", f"{hf}.D", mean=1.0),
            *self.linear("ssm.out", "embed", "channels", f"{hf}.out_proj", bias=bias, ends=True),
        )

    def recurrent_unit(self, hf: str) -> Rows:
        """Return a real-gated linear recurrent unit, as RecurrentGemma's ``temporal_block`` has it."""
        channels = "state_heads state_value"
        gates, both = "(write: state_value + fade: state_value)", f"{hf}.rg_lru.{{input,recurrent}}_gate"
        # Of which, where gates are open, 0.9^8 to 0.999^8 is left.
        fades: dict[str, Any] = {"mean": 0.056, "std": 0.0318, "uniform": True, "log": True}
        return (
            *self.linear("lru.inner", f"(x: {channels} + z: {channels})", "embed", f"{hf}.linear_{{x,y}}", bias=True),
            *self.convolution("lru.conv", f"({channels})", f"{hf}.conv_1d", bias=True),
            self.row("lru.gates", f"state_heads state_given {gates}", f"{both}_weight", std=self.std),
            self.row("lru.gates_bias", f"state_heads {gates}", f"{both}_bias", vector=True),
            self.row("lru.fade", f"({channels})", f"{hf}.rg_lru.recurrent_param", **fades),
            *self.linear("lru.out", "embed", f"({channels})", f"{hf}.linear_out", bias=True, ends=True),
        )

    def short_convolution(self, *, bias: bool = False) -> Rows:
        """Return a gated convolution of each channel, as LFM2's ``conv`` has it."""
        inner = "(b: channels + c: channels + x: channels)"
        return (
            *self.linear("short.inner", inner, "embed", "conv.in_proj", bias=bias),
            *self.convolution("short.conv", "channels", "conv.conv", bias=bias),
            *self.linear("short.out", "embed", "channels", "conv.out_proj", bias=bias, ends=True),
        )

    def latent_attention(
        self,
        *,
        latent_queries: bool,
        bias: bool = False,
        pairs: bool = True,
        hf: str = "self_attn",
        out: str = "o_proj",
        gate: str = "",
    ) -> Rows:
        """Multi-head latent attention, as DeepSeek's ``self_attn`` has it.

        Args:
            latent_queries: Whether queries are made of a latent, too.
            bias: Whether what takes or gives the tokens has one.
            pairs: Whether dimensions 2 i and 2 i + 1 turn together on disk, and not i and i + turning/2 as here.
            hf, out: Hugging Face's names of it and of what gives the tokens.
            gate: That of what weighs each head's outputs; empty: nothing does.
        """
        turning = "half two" if pairs else "two half"
        # Here the part of a head that turns comes first, as all that rotates has it.
        queries, stored = "(heads (turn: two half + still: rest))", f"(heads (still: rest + turn: {turning}))"
        keys, keys_stored = (f"(latent: kv_latent + turn: {each})" for each in ("two half", turning))
        q_a, kv_a, kv_b = (f"{hf}.{each}" for each in ("q_a", "kv_a", "kv_b_proj"))
        of_queries = (
            (
                *self.linear("attn.q_a", "q_latent", "embed", f"{q_a}_proj", bias=bias),
                *self.norm("attn.q_a_norm", f"{q_a}_layernorm", "q_latent"),
                *self.linear("attn.q_b", queries, "q_latent", f"{hf}.q_b_proj", stored=f"{stored} q_latent"),
            )
            if latent_queries
            else self.linear("attn.q", queries, "embed", f"{hf}.q_proj", stored=f"{stored} embed")
        )
        return (
            *of_queries,
            *self.linear(
                "attn.kv_a",
                keys,
                "embed",
                f"{kv_a}_proj_with_mqa",
                bias=bias,
                stored=f"{keys_stored} embed",
                stored_bias=keys_stored,
            ),
            *self.norm("attn.kv_a_norm", f"{kv_a}_layernorm", "kv_latent"),
            *self.linear(
                "attn.kv_b",
                "(k: heads rest + v: heads value)",
                "kv_latent",
                kv_b,
                stored="(heads (k: rest + v: value)) kv_latent",
            ),
            *(self.linear("attn.gate", "heads", "embed", f"{hf}.{gate}") if gate else ()),
            *self.linear("attn.out", "embed", "(heads value)", f"{hf}.{out}", bias=bias, ends=True),
        )

    def indexer(self, *, pairs: bool) -> Rows:
        """Return the indexer of a latent attention, as DeepSeek-V3.2's ``self_attn.indexer`` has it; ``pairs`` is that
        of :meth:`latent_attention`."""
        head, theirs = "(turn: two half + still: index_rest)", "self_attn.indexer"
        stored = "(turn: half two + still: index_rest)" if pairs else ""
        queries, of_queries, of_keys = f"(index_heads {head})", f"(index_heads {stored}) q_latent", f"{stored} embed"
        return (
            *self.linear("attn.index.q", queries, "q_latent", f"{theirs}.wq_b", stored=stored and of_queries),
            *self.linear("attn.index.k", head, "embed", f"{theirs}.wk", stored=stored and of_keys),
            *replace(self, norm_bias=True).norm("attn.index.k_norm", f"{theirs}.k_norm", head, stored=stored, mean=1.0),
            *self.linear("attn.index.weights", "index_heads", "embed", f"{theirs}.weights_proj"),
        )

    def layer_inputs(self) -> Rows:
        """Return what layers are told of tokens by themselves, as Gemma 3n has it, whose files hold all layers' tables
        and projections in one tensor each."""
        name, theirs, every = "layers.{layer}.inputs", "model.per_layer", "(layer input)"
        table = "model.embed_tokens_per_layer.weight"
        return (
            Param(f"{name}.embed.weight", "input_vocab input", table, f"input_vocab {every}", std=self.std),
            Param(
                f"{name}.proj.weight",
                "input embed",
                f"{theirs}_model_projection.weight",
                f"{every} embed",
                std=self.std,
            ),
            Param("inputs_norm.weight", "input", f"{theirs}_projection_norm.weight", at="layers", mean=self.norm_mean),
            *self.linear("inputs.gate", "input", "embed", "per_layer_input_gate"),
            *self.linear("inputs.out", "embed", "input", "per_layer_projection", ends=True),
            *self.norm("inputs.out_norm", "post_per_layer_input_norm"),
        )

    def gated_mlp(self, up: str = "mlp.{gate,up}_proj", down: str = "mlp.down_proj", *, bias: bool = False) -> Rows:
        """Return a gated feed-forward network, as LLaMA's ``mlp`` has it, or of other names."""
        return (
            *self.linear("mlp.up", GATE_UP, "embed", up, bias=bias),
            *self.linear("mlp.down", "embed", "mlp", down, bias=bias, ends=True),
        )

    def plain_mlp(self, up: str = "mlp.up_proj", down: str = "mlp.down_proj", *, bias: bool = False) -> Rows:
        """Return a feed-forward network of two linears, of these names."""
        return (
            *self.linear("mlp.up", "mlp", "embed", up, bias=bias),
            *self.linear("mlp.down", "embed", "mlp", down, bias=bias, ends=True),
        )

    def experts(
        self,
        *,
        hf: str = "mlp.experts.{experts}.{gate,up}_proj",
        down: str = "mlp.experts.{experts}.down_proj",
        router: str = "mlp.gate",
        correction: str = "",
        of_correction: str = "routes",
        held: tuple[str, str] = ("mlp.experts", "mlp.gate"),
        gated: bool = True,
    ) -> Rows:
        """Experts and their router, as Qwen3's ``mlp`` has them.

        Args:
            hf, down: Hugging Face's names of what goes into an expert's hidden features, and of what comes out of them.
            router: Its name of the router.
            correction: Its name of what is added to the scores that choose; empty: nothing is.
            of_correction: The sentence of that.
            held: The names of transformers for the modules of the experts and of the router in memory.
            gated: Whether experts are.
        """
        hidden = f"experts {GATE_UP_OF_EXPERTS}" if gated else "experts expert_mlp"
        up = "gate_up_proj" if gated else "up_proj"
        corrects = self.row("mlp.router.correction", of_correction, correction, buffer=True, vector=True)
        return (
            *self.linear("mlp.router", "routes", "embed", router, held=f"{held[1]}.weight"),
            *([corrects] if correction else []),
            *self.linear("mlp.experts.up", hidden, "embed", hf, held=f"{held[0]}.{up}"),
            *self.linear(
                "mlp.experts.down", "experts embed", "expert_mlp", down, held=f"{held[0]}.down_proj", ends=True
            ),
        )

    def stacked_experts(
        self,
        stored: str = GATE_UP_OF_EXPERTS,
        hf: str = "mlp.experts",
        *,
        bias: bool = False,
        turned: bool = False,
        outputs_first: bool = False,
    ) -> Rows:
        """Return experts without their router whose tensors hold all of a layer, inputs before outputs, as gpt-oss has
        them.

        Args:
            stored: The sentence of gates and ups there.
            hf: Hugging Face's name.
            bias: Whether they have biases.
            turned: Whether the peft library takes their inputs for outputs, as where their class does not tell it.
            outputs_first: Whether outputs stand before inputs.
        """
        ours, hidden = "mlp.experts.", f"experts {GATE_UP_OF_EXPERTS}"
        up, down = f"{hf}.gate_up_proj", f"{hf}.down_proj"
        of_up, of_down = ("", "") if outputs_first else (f"experts embed {stored}", "experts expert_mlp embed")
        rows = (
            self.row(f"{ours}up.weight", f"{hidden} embed", up, of_up, std=self.std, hf_turned=turned),
            self.row(f"{ours}up.bias", hidden, f"{up}_bias", f"experts {stored}", vector=True),
            self.row(
                f"{ours}down.weight", "experts embed expert_mlp", down, of_down, std=self.out_std, hf_turned=turned
            ),
            self.row(f"{ours}down.bias", "experts embed", f"{down}_bias", vector=True),
        )
        return rows if bias else rows[::2]

    def shared_expert(
        self,
        hf: str = "mlp.shared_experts",
        gate: str = "",
        *,
        bias: bool = False,
        gated: bool = True,
        up: str = "{gate,up}_proj",
        down: str = "down_proj",
    ) -> Rows:
        """Return an expert that every token goes to, of this name and with linears of these, and what weighs it, of
        another; empty: nothing does."""
        inner = "(gate: shared_mlp + up: shared_mlp)" if gated else "shared_mlp"
        return (
            *self.linear("mlp.shared.up", inner, "embed", f"{hf}.{up}", bias=bias),
            *self.linear("mlp.shared.down", "embed", "shared_mlp", f"{hf}.{down}", bias=bias, ends=True),
            *(self.linear("mlp.shared_gate", "one", "embed", gate) if gate else ()),
        )

    def model(
        self,
        *block: Rows,
        tied: bool,
        embed: str = "model.embed_tokens",
        norm: str = "model.norm",
        head: str = "lm_head",
        head_bias: bool = False,
    ) -> Rows:
        """Return the whole table: the embedding, the rows of a block, the final norm unless it has no name, and the
        head unless it is tied."""
        last_norm = Param("norm.weight", "embed", f"{norm}.weight", at="last", mean=self.norm_mean)
        return (
            Param("embed.weight", "vocab embed", f"{embed}.weight", at="first last" if tied else "first", std=self.std),
            *(param for rows in block for param in rows),
            *([last_norm] if norm else []),
            *([Param("norm.bias", "embed", f"{norm}.bias", at="last")] if norm and self.norm_bias else []),
            *([] if tied else [Param("head.weight", "vocab embed", f"{head}.weight", at="last", std=self.std)]),
            *([Param("head.bias", "vocab", f"{head}.bias", at="last")] if head_bias else []),
        )


def in_layers(layers: Collection[int], rows: Rows) -> Rows:
    """Return rows that these layers alone have, or some of them that a row says; none where there are no layers."""
    some = tuple(sorted(layers))
    return tuple(replace(row, layers=some) if row.layers is None else row for row in rows) if layers else ()
