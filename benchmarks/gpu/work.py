"""The models of ``gpu_first.py``: shapes, and for each program a function that takes a training step on the device.

bf16 parameters, gradients and AdamW state (fused) for everyone, clipping at 1.0, cross entropy over the whole
vocabulary, one microbatch. Weights are drawn on the device: on the host 1B takes half a minute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.assemble import Model
from megacore.models.config import ModelConfig
from megacore.models.decoder import Losses, Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.enum_errors import Precision, Recompute
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.pipeline.run import Pipeline
from megacore.planning.setting import Setting, Widths
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep

LR = 3e-4
BETAS, DECAY = (0.9, 0.95), 0.1

Step = Callable[[], Tensor]
"""Takes a step and gives its loss, on the device."""


@dataclass(frozen=True)
class Shape:
    """A model and the sequences of a step."""

    model: Mapping[str, Any]
    sequence_length: int = 4096
    sequences: int = 1

    @property
    def config(self) -> ModelConfig:
        return configure(self.model)

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length


SHAPES: Mapping[str, Shape] = {
    "1b": Shape({"preset": "llama-3.2-1b"}, sequences=2),
    # Weights, gradients and state of all 32 layers take 64 GB, and activations without recomputation more than is left.
    "8b": Shape({"preset": "llama-3.1-8b", "num_hidden_layers": 8}),
    "tiny": Shape({"preset": "llama-tiny", "num_hidden_layers": 3}, sequence_length=64, sequences=2),
}


def batch(shape: Shape, device: torch.device) -> Tensor:
    """[sequences, sequence length + 1], the same for everyone."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(shape.config.vocab_size, (shape.sequences, shape.sequence_length + 1), generator=generator)
    return drawn.to(device)


# -- ours


@dataclass(frozen=True)
class Way:
    """How we train, where it is not in bf16 alone.

    Args:
        compiled: Whether blocks are compiled.
        precision: Of the products of linears: bf16 or fp8.
        activations: What is kept of the blocks.
        loss_chunk: Tokens whose logits are there at a time.
        masters: Whether there are fp32 masters, moments and gradients.
    """

    compiled: bool = False
    precision: Precision = "bf16"
    activations: Activations = field(default_factory=Activations)
    loss_chunk: int | None = None
    masters: bool = False

    def setting(self, shape: Shape, device: torch.device) -> Setting:
        """The run on paper."""
        recompute: Recompute = self.activations.recompute
        return Setting(
            shape.config,
            layout_of(shape.config, Mesh.single().shape),
            Widths.of("bf16", self.masters),
            shape.sequence_length,
            shape.sequences,
            1,
            recompute=recompute,
            loss_chunk=self.loss_chunk,
            offload_activations=self.activations.offload,
            device="cuda" if device.type == "cuda" else "cpu",
        )


def draw(parameters: Parameters) -> None:
    """Weights of the right size, on the device."""
    torch.manual_seed(0)
    for name, parameter in parameters.items():
        param = parameters.shards[name].param
        values = parameter.detach()
        _ = values.normal_(param.mean, param.std) if param.std else values.fill_(param.mean)


def live(shape: Shape, device: torch.device, way: Way) -> tuple[Model, TrainStep]:
    mesh = Mesh.single(device)
    config = shape.config
    losses = Losses(chunk=way.loss_chunk)
    layout = layout_of(config, mesh.shape)
    model = Model.create(config, layout, mesh, torch.bfloat16, losses, way.activations)
    draw(model.parameters)
    if way.precision == "fp8":
        model.use_fp8()
    if way.compiled:
        model.compile()
    gradients = Gradients(model.parameters, model.chunks, torch.float32 if way.masters else torch.bfloat16)
    if gradients.widens:
        model.hand_weight_gradients(gradients.receive)
    optimizer = Optimizer(gradients, lr=LR, betas=BETAS, weight_decay=DECAY, master_weights=way.masters)
    return model, TrainStep(mesh, Pipeline(mesh, model.chunks, torch.bfloat16), gradients, optimizer)


def microbatch(shape: Shape, device: torch.device) -> Microbatch:
    rows = batch(shape, device)
    positions = torch.arange(shape.sequence_length, device=device).repeat(shape.sequences)
    inputs, labels = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    return Microbatch(inputs, labels, positions, shape.sequences, (shape.tokens, shape.config.boundary_width))


def ours(shape: Shape, device: torch.device, way: Way) -> Step:
    step, given = live(shape, device, way)[1], microbatch(shape, device)
    return lambda: step([given], LR).loss


# -- the peers


def _train(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], shape: Shape, device: torch.device) -> Step:
    """The step that everybody writes around a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    rows = batch(shape, device)
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].flatten()

    def step() -> Tensor:
        loss = loss_of(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)


def hugging_face(shape: Shape, device: torch.device, compiled: bool) -> Step:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = shape.config.to_hugging_face()
    theirs = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with device:
        model: Any = AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    forward = torch.compile(model) if compiled else model
    return _train(model, lambda x, y: _cross_entropy(forward(input_ids=x, use_cache=False).logits, y), shape, device)


def litgpt(shape: Shape, device: torch.device, compiled: bool) -> Step:
    theirs: Any = importlib.import_module("litgpt")
    sizes = shape.config.sizes
    fields: Any = shape.config.to_hugging_face()
    config = theirs.Config(
        name="benchmark",
        block_size=shape.sequence_length,
        vocab_size=sizes["vocab"],
        padded_vocab_size=sizes["vocab"],
        n_layer=sizes["layer"],
        n_head=sizes["heads"],
        n_query_groups=sizes["kv"],
        head_size=sizes["head"],
        n_embd=sizes["embed"],
        intermediate_size=sizes["mlp"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_eps=fields["rms_norm_eps"],
    )
    with device:
        model = theirs.GPT(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    if fields.get("tie_word_embeddings"):
        model.lm_head.weight = model.transformer.wte.weight
    forward = torch.compile(model) if compiled else model
    return _train(model, lambda x, y: _cross_entropy(forward(x), y), shape, device)


class _Layer(nn.Module):
    """A block as torchtitan has it: a linear for each projection, torch's norm and attention."""

    def __init__(self, sizes: Mapping[str, int], eps: float, made: Mapping[str, Any]) -> None:
        super().__init__()
        self.head, embed, mlp = sizes["head"], sizes["embed"], sizes["mlp"]
        heads, kv = sizes["heads"] * self.head, sizes["kv"] * self.head

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **made)

        self.attention_norm, self.ffn_norm = (nn.RMSNorm(embed, eps, **made) for _ in range(2))
        self.wq, self.wo = linear(embed, heads), linear(heads, embed)
        self.wk, self.wv = linear(embed, kv), linear(embed, kv)
        self.w1, self.w3, self.w2 = linear(embed, mlp), linear(embed, mlp), linear(mlp, embed)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def like_torchtitan(shape: Shape, device: torch.device, compiled: bool) -> Step:
    """Each block compiled by itself, and the loss, as torchtitan does it; in our numbers, not in its mixed ones."""
    sizes, fields = shape.config.sizes, shape.config.to_hugging_face()
    eps = fields["rms_norm_eps"]
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    table = nn.Embedding(sizes["vocab"], sizes["embed"], **made)
    layers = nn.ModuleList(_Layer(sizes, eps, made) for _ in range(sizes["layer"]))
    norm = nn.RMSNorm(sizes["embed"], eps, **made)
    head = nn.Linear(sizes["embed"], sizes["vocab"], False, **made)
    model = nn.ModuleList([table, layers, norm, head])
    half = torch.arange(0, sizes["head"], 2, device=device) / sizes["head"]
    angles = torch.arange(shape.sequence_length, device=device)[:, None] * 500_000.0**-half
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    if fields.get("tie_word_embeddings"):
        head.weight = table.weight
    cos, sin = angles.cos(), angles.sin()
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = _cross_entropy
    if compiled:
        cross_entropy = torch.compile(_cross_entropy)
        for layer in layers:
            layer.compile(fullgraph=True)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        x = table(tokens)
        for layer in layers:
            x = layer(x, cos, sin)
        return cross_entropy(head(norm(x)), labels)

    return _train(model, loss, shape, device)
