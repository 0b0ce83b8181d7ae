"""Adapters and freezing on any layout: the numbers of one process, in float64; and what is frozen stays as it is."""

import itertools
import math
import re
from collections.abc import Mapping

import pytest
import torch
from layouts import ALL, CONV, DOWN, INT8, LLAMA, MIXED_LORA, NF4, NF4_EXPERTS, SOME, TUNED_FAMILIES
from oracle import Case, Run, lively, microbatches
from torch import Tensor, nn

from megacore.models.assemble import Model
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.models.tuning import Tuning
from megacore.parallel.layers.linear import ColumnParallelLinear
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import MeshShape

# -- the formula

EVERY_KIND = [ALL, SOME, CONV, MIXED_LORA, DOWN, NF4, INT8, NF4_EXPERTS]


def model_of(case: Case, tuning: Tuning) -> Model:
    mesh = Mesh.single()
    layout = lively(layout_of(case.config, mesh.shape, tuning=tuning))
    model = Model.create(case.config, layout, mesh, torch.float64, tuning=tuning)
    model.parameters.initialise(seed=1)
    return model


def loss_of(case: Case, model: Model) -> Tensor:
    (first, *_) = microbatches(case, Run(micro=2), 0, Mesh.single())
    loss: Tensor = model.chunks[0](None, first)
    return loss


@pytest.mark.in_turn(3)
@pytest.mark.quick
@pytest.mark.parametrize("case", [*EVERY_KIND, *TUNED_FAMILIES], ids=lambda case: case.name)
def test_a_step_is_that_of_the_formula(case: Case) -> None:
    """W + scale B A in place of W, multiplied out piece by piece, gives the loss and, by the chain rule, dA and dB."""
    lora = case.tuning.lora
    assert lora is not None
    adapted, plain = model_of(case, case.tuning), model_of(case, Tuning())
    found: dict[str, nn.Parameter] = {}
    with torch.no_grad():
        for name, weight in plain.parameters.items():
            held: Tensor = adapted.parameters[name]
            if name in adapted.parameters.blocks:
                assert held.dtype == torch.uint8
                held = adapted.parameters.blocks[name].dequantise(held, torch.float64)
            weight.copy_(held)
            if name.endswith(".weight") and f"{name.removesuffix('.weight')}.lora_a" in adapted.parameters:
                found[name] = weight
        for name, weight in found.items():
            for a, b, rows in _pieces(adapted.parameters, name):
                weight[rows].add_(lora.scale * b @ a)
    one, other = loss_of(case, adapted), loss_of(case, plain)
    assert one.item() == pytest.approx(other.item(), rel=1e-12)
    one.backward()
    other.backward()
    assert found
    for name, weight in found.items():
        gradients = adapted.parameters
        a_name, b_name = (name.removesuffix(".weight") + end for end in (".lora_a", ".lora_b"))
        assert adapted.parameters[name].grad is None
        if ".index." in name:  # which learns by a loss of its own alone
            assert weight.grad is None and gradients[a_name].grad is None and gradients[b_name].grad is None
            continue
        assert weight.grad is not None
        da, db = [], []
        for a, b, rows in _pieces(adapted.parameters, name):
            da.append(lora.scale * b.mT @ weight.grad[rows])
            db.append(lora.scale * weight.grad[rows] @ a.mT)
        for got, want in ((gradients[a_name].grad, da), (gradients[b_name].grad, db)):
            assert got is not None
            by_hand = torch.cat(want)
            # What cancels is rounded by the size of what is summed.
            atol = max(1e-12, 1e-11 * float(by_hand.abs().max()))
            torch.testing.assert_close(got, by_hand, rtol=1e-9, atol=atol)


def _pieces(parameters: Parameters, name: str) -> list[tuple[Tensor, Tensor, slice]]:
    """(A, B, rows of the weight) of each adapter of a weight, cut by hand as its sentence reads."""
    a, b = (parameters[name.removesuffix(".weight") + end].detach() for end in (".lora_a", ".lora_b"))
    rank, labels = b.shape[-1], parameters.shards[name.removesuffix(".weight") + ".lora_a"].param.sentence.labels
    if labels == ("",):
        return [(a, b, slice(None))]
    rows = _rows(str(parameters.shards[name].param.sentence), parameters.shards[name].sizes)
    start = dict(zip(rows, itertools.accumulate(rows.values(), initial=0), strict=False))
    made, at = [], 0
    for number, label in enumerate(labels):
        own = slice(start[label], start[label] + rows[label])
        made.append((a[number * rank : (number + 1) * rank], b[at : at + rows[label]], own))
        at += rows[label]
    return made


def _rows(sentence: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """{piece: rows} of a sentence such as ``(q: heads (a: half + b: half) + k: kv head) embed``."""

    def size(term: str) -> int:
        return math.prod(int(word) if word.isdigit() else sizes[word] for word in term.split(": ")[1].split())

    terms = sentence[1 : sentence.rindex(")")]
    while inner := re.search(r"\(([^()]*)\)", terms):
        terms = terms.replace(inner[0], str(sum(map(size, inner[1].split(" + ")))))
    return {term.split(": ")[0]: size(term) for term in terms.split(" + ")}


@pytest.mark.quick
def test_adapters_begin_as_nothing_and_as_linears_do() -> None:
    """B is zero; A is uniform within 1 / sqrt(in), over all ranks and layers the same numbers (the oracle's own)."""
    config = configure(LLAMA | {"hidden_size": 256, "intermediate_size": 512})
    tuning = Tuning(Lora(16, 16.0, ("*",)))
    parameters = Parameters(layout_of(config, MeshShape(), tuning=tuning), Mesh.single(), torch.float32)
    parameters.initialise(0)
    ends = {"attn.qkv": 256, "mlp.up": 256, "mlp.down": 512, "attn.out": 48}
    for name, inputs in ends.items():
        assert not parameters[f"layers.1.{name}.lora_b"].any()
        a = parameters[f"layers.1.{name}.lora_a"].detach()
        assert 0.98 < a.abs().max() * inputs**0.5 <= 1 and a.std() * (3 * inputs) ** 0.5 == pytest.approx(1, rel=0.05)


@pytest.mark.quick
def test_frozen_linears_are_left_as_they_were() -> None:
    model = model_of(SOME, SOME.tuning)
    linears = [module for module in model.chunks[0].modules() if isinstance(module, ColumnParallelLinear)]
    assert linears and not any(linear.weight.requires_grad for linear in linears)
    assert "attn.out.base" not in dict(model.chunks[0].named_modules())


@pytest.mark.quick
def test_linears_and_experts_are_quantised_and_nothing_else() -> None:
    """With adapters or not; those of attention and of the experts' outputs have some here."""
    parameters = model_of(NF4_EXPERTS, NF4_EXPERTS.tuning).parameters
    ends = ("attn.qkv.weight", "attn.out.weight", "experts.up.weight", "experts.down.weight")
    assert parameters.blocks.keys() == {name for name in parameters if name.endswith(ends)}
    for name, parameter in parameters.items():
        held = parameter.nbytes * 64 == math.prod(parameters.shards[name].shape) * 36
        assert held == (name in parameters.blocks) and parameter.requires_grad == ("lora" in name), name
