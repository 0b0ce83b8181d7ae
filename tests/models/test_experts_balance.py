"""Each layer's balance of experts beside that of transformers."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from families import drawn, in_float64, of_transformers
from test_transformers import SEQUENCES, as_saved, close, move, theirs_of

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import FAMILIES, configure
from megacore.models.stages import layout_of
from megacore.parallel.balance import Coefficients
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face, native

MIXTURES = [name for name in FAMILIES if name in ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.grid] * (seed > 0)) for seed in range(14)])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_layers_balance_is_that_of_transformers_over_k(name: str, seed: int) -> None:
    """Theirs of one layer at a time: of several, they average counts and scores before they multiply them."""
    section = drawn(name, seed, layers=3, vocab=17, positions=32, tp=1)
    hf_config = of_transformers(section)
    theirs = theirs_of(hf_config, seed)
    config = configure(section)
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64, coefficients=Coefficients(batch=1.0))
    ours.train(False)
    state = as_saved(theirs, {name: p.detach() for name, p in theirs.named_parameters()})
    with torch.no_grad():
        for key, array in move(config.schema, state, hugging_face(config.schema), native(layout, [0])).items():
            ours.parameters[key].copy_(torch.from_numpy(array))

    # A power of two tokens: theirs divides by their number in fp32.
    count = SEQUENCES * 16
    tokens = torch.randint(config.vocab_size, (SEQUENCES, 16), generator=torch.Generator().manual_seed(seed))
    modeling, routing = import_module(type(theirs).__module__), config.anatomy.routing
    assert routing is not None
    with in_float64():
        out = theirs(input_ids=tokens, use_cache=False, output_router_logits=True)
        balances = [
            modeling.load_balancing_loss_func((logits,), routing.experts, routing.top_k) / routing.top_k
            for logits in out.router_logits
        ]
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    (loss + sum(balances)).backward()

    positions = torch.arange(16).repeat(SEQUENCES)
    flat, shape = tokens.flatten(), (count, config.sizes["embed"])
    batch = Microbatch(flat, flat, positions, SEQUENCES, shape, number=0)
    assert ours.balance is not None
    ours.balance.begin(1, torch.tensor(2.0), torch.tensor(float(count)), torch.tensor(1.0))
    ours.chunks[0](None, batch).backward()
    read = ours.balance.read(config.sizes["layer"])
    torch.testing.assert_close(read.balance, torch.stack(balances).detach(), rtol=1e-12, atol=0)
    gradients = as_saved(theirs, {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    for key, gradient in move(config.schema, gradients, hugging_face(config.schema), native(layout, [0])).items():
        found = ours.parameters[key].grad
        assert found is not None
        close(found, torch.from_numpy(gradient), f"gradient of {key}")
