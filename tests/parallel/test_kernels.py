"""Which kernels are chosen: torch's without apex or without a GPU, apex's where it is NVIDIA's."""

import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megacore.parallel.kernels import choice
from megacore.parallel.kernels.choice import (
    ApexImpostor,
    adamw,
    apex_has,
    chosen,
    has_triton,
    layer_norm,
    rms_norm,
    set_updates,
    step_if,
    take_flash_attention,
    updates,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROBES = (apex_has, has_triton, choice._triton_serves)
KERNELS = ("FusedLayerNorm", "FusedRMSNorm")
NVIDIA = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    return "apex rms", tuple(normalized_shape), eps

def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    return "apex layer", tuple(normalized_shape), eps
""",
}
IMPOSTOR = {"apex/__init__.py": "raise SystemExit('an impostor was run')", "apex/auth.py": "", "apex/models.py": ""}


def clear() -> None:
    for probe in PROBES:
        probe.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No apex that an earlier test or the machine has brought."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("apex", "amp_C", "fused_layer_norm_cuda"):
            monkeypatch.delitem(sys.modules, name)
    clear()
    yield
    clear()
    for name in list(sys.modules):
        if name.partition(".")[0] in ("apex", "amp_C", "fused_layer_norm_cuda"):
            del sys.modules[name]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if neither triton nor anything of apex were installed, whatever the machine has."""
    find = importlib.util.find_spec
    hidden = ("apex", "amp_C", "fused_layer_norm_cuda", "triton")
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None if name in hidden else find(name))


@pytest.mark.quick
def test_without_apex_and_triton_torch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    assert not choice.has_triton()
    assert not any(map(apex_has, KERNELS))
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    assert torch.equal(rms_norm(CUDA)(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.equal(layer_norm(CUDA)(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias, 1e-5))
    optimizer = adamw([{"params": [weight]}], CPU, 1e-3, (0.9, 0.95), 1e-8)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]


@pytest.mark.quick
def test_an_impostor_is_recognised_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, IMPOSTOR)
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    with pytest.warns(ApexImpostor, match=rf"'apex' at {tmp_path}.* is not NVIDIA apex .*Pyramid"):
        assert not apex_has("FusedLayerNorm")
    with pytest.warns(ApexImpostor):
        norm = rms_norm(CUDA)
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))


def test_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, IMPOSTOR)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [apex_has("FusedRMSNorm") for _ in range(3)] == [False] * 3
    assert len(said) == 1


def test_apex_without_its_compiled_modules_is_not_an_impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python-only build: torch's kernels, and no warning."""
    install(tmp_path, monkeypatch, NVIDIA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(map(apex_has, KERNELS))


@pytest.mark.quick
def test_nvidia_apex_is_chosen_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, NVIDIA | {"fused_layer_norm_cuda.py": ""})
    assert all(map(apex_has, KERNELS))
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    rms, layer = rms_norm(CUDA), layer_norm(CUDA)
    chosen: tuple[object, object] = rms(x, weight, 1e-5), layer(x, weight, bias, 1e-6)
    assert chosen == (("apex rms", (8,), 1e-5), ("apex layer", (8,), 1e-6))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # who cannot look into a kernel
    assert torch.equal(rms(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.equal(layer(x, weight, bias, 1e-6), F.layer_norm(x, (8,), weight, bias, 1e-6))


def test_nvidia_apex_has_no_offset_and_wants_a_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, NVIDIA | {"fused_layer_norm_cuda.py": ""})
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    torch.testing.assert_close(rms_norm(CUDA, 1.0)(x, weight, 1e-5), F.rms_norm(x, (8,), weight + 1, 1e-5))
    want = F.layer_norm(x, (8,), weight + 1, bias, 1e-6)
    torch.testing.assert_close(layer_norm(CUDA, 1.0)(x, weight, bias, 1e-6), want)
    found = layer_norm(CUDA, bias=False)(x, weight, None, 1e-6)
    assert torch.equal(found, F.layer_norm(x, (8,), weight, None, 1e-6))


def test_no_optimizer_is_chosen_that_asks_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex's, whatever is installed: whether it steps is for the host to say."""
    install(tmp_path, monkeypatch, NVIDIA | {"amp_C.py": "", "apex/optimizers/__init__.py": "FusedAdam = None"})
    monkeypatch.setattr(torch, "zeros", lambda *size, device, dtype: torch.empty(*size, dtype=dtype))  # there is no GPU
    optimizer = adamw([{"params": [torch.randn(8)]}], CUDA, 1e-3, (0.9, 0.95), 1e-8)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]


def test_apex_is_not_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, NVIDIA | {"fused_layer_norm_cuda.py": ""})
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(CPU)(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))


@pytest.mark.parametrize("go", [True, False])
def test_step_if_skips_without_asking_the_host(go: bool) -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = adamw([{"params": [p], "weight_decay": 0.0}], CPU, 0.1, (0.9, 0.95), 1e-8)
    p.grad = torch.ones(4)
    step_if(optimizer, torch.tensor(go))
    assert torch.allclose(p, torch.full((4,), 0.9)) if go else torch.equal(p, torch.ones(4))
    assert updates(optimizer) == go  # a step that is left out does not count in the correction of the bias


def test_a_count_of_updates_is_where_the_kernel_looks() -> None:
    """The first update is corrected as the first, whatever was there: from zero moments it moves by the whole rate."""
    moved = []
    for before in (0, 1000):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer = adamw([{"params": [p], "weight_decay": 0.0}], CPU, 0.1, (0.9, 0.95), 1e-8)
        set_updates(optimizer, before)
        p.grad = torch.ones(4)
        optimizer.step()
        assert updates(optimizer) == before + 1
        moved.append(1 - p[0].item())
    assert moved[0] == pytest.approx(0.1, rel=1e-5)
    assert moved[1] == pytest.approx(0.1 * 0.1 / 0.05**0.5, rel=1e-5)


# -- which flash attention

FLASH_3 = {"flash_attn_interface.py": ""}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    sys.modules.pop("flash_attn_interface", None)
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def flash() -> str | None:
    return torch.nn.attention.current_flash_attention_impl()


def test_flash_attention_3_is_taken_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    take_flash_attention(CUDA, dropout=False)
    assert flash() is None and "by FA2" in chosen(CUDA, False, torch.bfloat16)
    install(tmp_path, monkeypatch, FLASH_3)
    kernels = torch.library.Library("flash_attn_3", "FRAGMENT")
    kernels.define("fwd(Tensor q) -> Tensor")
    kernels.define("bwd(Tensor q) -> Tensor")
    take_flash_attention(CPU, dropout=False)
    take_flash_attention(CUDA, dropout=True)  # which it does not know
    assert flash() is None
    take_flash_attention(CUDA, dropout=False)
    assert flash() == "FA3" and "by FA3" in chosen(CUDA, False, torch.bfloat16)
    torch.nn.attention.restore_flash_attention_impl()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    take_flash_attention(CUDA, dropout=False)
    assert flash() is None


def test_a_flash_attention_3_that_does_not_serve_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hopper: None
) -> None:
    install(tmp_path, monkeypatch, {"flash_attn_interface.py": "raise ImportError('libcudart.so.12 is not there')"})
    with pytest.warns(UserWarning, match=r"flash_attn_interface .*libcudart.so.12.*FlashAttention-2"):
        take_flash_attention(CUDA, dropout=False)
    assert flash() is None


def test_what_was_chosen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(CPU, False, torch.float32) == ""
    monkeypatch.setattr(choice, "_triton_serves", lambda device: True)
    assert chosen(CUDA, True, torch.bfloat16) == "Kernels: attention by FA2, blocks by torch's compiler, loss by Triton"
    monkeypatch.setattr(choice, "_triton_serves", lambda device: False)
    without = "Kernels: attention by FA2, norms by torch, the other fused ones by torch"
    assert chosen(CUDA, False, torch.bfloat16) == without
