"""Models in bf16 on a CPU without instructions for it: torch is left no product in bf16, and the numbers stay."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megacore.inference.generation import Ending, generate
from megacore.inference.sampling import Greedy
from megacore.models.assemble import Model
from megacore.models.decoder import Losses, Microbatch
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel import kernels
from megacore.parallel.kernels import upcast
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""What CPUs without instructions for bf16 are slow at. Forward, attention's kernel for CPUs has products of its own."""

LENGTH, SEQUENCES = 32, 2


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    preset: str
    tuning: Tuning = EVERYTHING
    documents: tuple[int, ...] | None = None
    chunk: int | None = None


LORA = Tuning(lora=Lora(8, 16.0, ("*",), dropout=0.1))
CASES = {
    "llama": Case("llama-tiny"),
    "documents": Case("llama-tiny", documents=(20, 12, 32), chunk=24),
    "lora": Case("llama-tiny", LORA),
    "dropout": Case("gpt2-tiny"),
    "softcaps": Case("gemma2-tiny", documents=(20, 12, 32)),
    "windows and sinks": Case("gpt_oss-tiny"),
    "experts": Case("mixtral-tiny"),
    "experts with adapters": Case("mixtral-tiny", LORA),
    "a shared expert": Case("qwen2_moe-tiny"),
    "latents": Case("deepseek_v3-tiny"),
}


def create(case: Case, mesh: Mesh, dtype: torch.dtype) -> Model:
    config = configure({"preset": case.preset})
    layout = layout_of(config, mesh.shape, tuning=case.tuning)
    model = Model.create(config, layout, mesh, dtype, Losses(chunk=case.chunk), tuning=case.tuning)
    model.parameters.initialise(seed=0)
    return model


def step(model: Model, case: Case) -> Tensor:
    """The loss of a microbatch, whose gradients are added."""
    embed, vocab = model.parameters.layout.schema.sizes["embed"], model.config.vocab_size
    drawn = torch.randint(vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = drawn[:, :-1].flatten(), drawn[:, 1:].flatten()
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    shape = len(tokens) // model.parameters.mesh.shape.tp, embed
    loss: Tensor = model.chunks[0](None, Microbatch(tokens, labels, positions, SEQUENCES, shape, case.documents))
    loss.backward()
    return loss.detach()


def narrow_products(run: Any) -> list[str]:
    """The products in bf16 that torch was asked for, but for those of few rows, such as an expert may have."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    narrow = [e for e in events if e.name() in PRODUCTS and "c10::BFloat16" in e.dtypes()]
    return [e.name() for e in narrow if e.name() != "aten::mm" or e.shapes()[0][0] >= upcast.FEW]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU has no instructions for bf16."""
    monkeypatch.setitem(upcast._found, "bf16", False)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("without")
def test_no_product_of_a_step_is_left_to_torch_in_bf16(name: str) -> None:
    model = create(CASES[name], Mesh.single(), torch.bfloat16)
    assert narrow_products(lambda: step(model, CASES[name])) == []


def test_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests of this file would see none anywhere."""
    monkeypatch.setitem(upcast._found, "bf16", True)
    model = create(CASES["experts"], Mesh.single(), torch.bfloat16)
    assert {"aten::mm", "aten::_grouped_mm"} <= {*narrow_products(lambda: step(model, CASES["experts"]))}


@pytest.mark.parametrize("preset", ["llama-tiny", "gemma2-tiny", "gpt_oss-tiny", "mixtral-tiny"])
@pytest.mark.usefixtures("without")
def test_nor_are_those_of_generating(preset: str) -> None:
    """With so many prompts that a linear is worth its casts."""
    model = create(Case(preset), Mesh.single(), torch.bfloat16)
    for chunk in model.chunks:
        chunk.eval()
    prompts = [[1, 2, 3 + number] for number in range(8)]
    assert narrow_products(lambda: [*generate(model, prompts, Greedy(), Ending(frozenset(), 3, 32), 8)]) == []


# -- the numbers


def measured(case: Case, shape: MeshShape, dtype: torch.dtype, has_bf16: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of all ranks' tokens, and the gradients of what every rank holds whole, of all ranks."""
    before = kernels.cpu_has_bf16()
    upcast._found["bf16"] = has_bf16
    try:
        mesh = Mesh.create(shape)
        model = create(case, mesh, dtype)
        loss = step(model, case)
        torch.distributed.all_reduce(loss)
        found = dict[str, Tensor]()
        for name, parameter in model.parameters.items():
            if name.endswith("norm.weight") and parameter.grad is not None:
                total = parameter.grad.float()
                torch.distributed.all_reduce(total)
                found[name] = total
        return loss.item(), found
    finally:
        upcast._found["bf16"] = before


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys() and found
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("name", ["llama", "documents", "experts"])
def test_the_numbers_are_those_of_bf16_on_any_layout(pool: Pool, name: str) -> None:
    """No further from those of fp64 than where the CPU multiplies bf16, on one rank and with tp=2."""
    case, one, two = CASES[name], MeshShape(), MeshShape(tp=2)
    ((exact, gradients),) = pool.run(1, measured, case, one, torch.float64, True)
    ((loss, native),) = pool.run(1, measured, case, one, torch.bfloat16, True)
    bound = 1.5 * distance(native, gradients)
    assert abs(loss - exact) < 2e-3 * exact
    for shape in (one, two):
        for loss, found in pool.run(shape.world, measured, case, shape, torch.bfloat16, False):
            assert abs(loss - exact) < 2e-3 * exact
            assert distance(found, gradients) < bound
