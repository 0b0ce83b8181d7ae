"""Layers that predict further tokens: their loss and every gradient against transformers' modules in float64, put
together by the formulas of the paper (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import drawn, in_float64, of_transformers
from test_transformers import as_saved, close, move, saved_buffers, theirs_of
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from megacore.data.batches import collate
from megacore.data.samples import Sample
from megacore.models.assemble import Model
from megacore.models.decoder import FurtherTokens, Losses, Microbatch
from megacore.models.registry import family
from megacore.models.stages import layout_of
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face, native

FIELD, WEIGHT, LENGTH = "num_nextn_predict_layers", 0.3, 11
DOCUMENTS = [[4, 1, 6], [11]]
"""The lengths of the documents of each row."""


class Reference:
    """transformers' model with its layers that predict further tokens, one behind the other, all weights random."""

    def __init__(self, name: str, depth: int, seed: int) -> None:
        section = drawn(name, seed, layers=4, vocab=37, positions=32, tp=1)
        plain = of_transformers(section)
        self.config = family(name).config.from_hugging_face({**plain.to_dict(), FIELD: depth})
        self.main = theirs_of(plain, seed)
        base = self.main.get_decoder()
        at = self.config.mtp_block
        norm = type(base.norm)
        made = [MtpLayer(plain, type(base.layers[at]), norm, at).double().eval() for _ in range(depth)]
        self.layers = torch.nn.ModuleList(made)
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.normal_(0.0, 0.3)
            for tensor in (*self.buffers.values(),):
                tensor.copy_(torch.randn_like(tensor).mul(0.3).float())

    @property
    def buffers(self) -> dict[str, Tensor]:
        kept = self.layers.state_dict().keys() - dict(self.layers.named_parameters()).keys()
        return {name: buffer for name, buffer in self.layers.named_buffers() if name in kept}

    def losses(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The summed loss of the next tokens of the rows of one document each, and that of each further one."""
        base = self.main.get_decoder()
        h = base(input_ids=tokens, use_cache=False).last_hidden_state
        plain = self._loss(h, labels)
        positions, further = torch.arange(tokens.shape[1])[None], []
        rotations = base.rotary_emb(h, position_ids=positions)
        n = tokens.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=h.dtype).triu(1)[None, None]
        for k, layer in enumerate(self.layers, 1):
            if k >= n:
                further.append(plain * 0)
                continue
            # h_i and the embedding of token i + k predict token i + k + 1.
            embedded = base.embed_tokens(tokens[:, k:])
            h = layer(
                embedded,
                h[:, : n - k],
                tuple(x[:, : n - k] for x in rotations),
                mask[..., : n - k, : n - k],
                positions[:, : n - k],
                None,
            )
            further.append(self._loss(h, labels[:, k:]))
        return plain, further

    def _loss(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.main.lm_head(h).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def saved(self, of: Any) -> dict[str, np.ndarray]:
        """What ``of`` says of each of their parameters, by the names of a published folder."""
        names, first = self.config.mtp_names, self.config.num_hidden_layers
        found = dict(of(self.main))
        for name, value in of(self.layers).items():
            depth, _, rest = name.partition(".")
            end = rest.rpartition(".")[2]
            parts = {
                "enorm": names.embed_norm,
                "hnorm": names.hidden_norm,
                "eh_proj": names.proj,
                "post_norm": names.norm,
            }
            template = parts.get(
                rest.partition(".")[0], names.block + rest.removeprefix("mtp_block.").removesuffix(f".{end}")
            )
            found[template.format(depth=depth, layer=first + int(depth)) + f".{end}"] = value
        return dict(as_saved(self.main, found))


CASES = [("deepseek_v3", 1, 0), ("deepseek_v3", 2, 3), ("glm4_moe", 1, 1), ("glm4_moe", 3, 2)]


@pytest.mark.parametrize(("name", "depth", "seed"), CASES)
def test_losses_and_gradients(name: str, depth: int, seed: int) -> None:
    theirs = Reference(name, depth, seed)
    config = theirs.config
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64, Losses(mtp=WEIGHT))
    state = theirs.saved(lambda module: {n: p.detach() for n, p in module.named_parameters()} | of_buffers(module))
    assert {stored.name for stored in hugging_face(config.schema)} == state.keys()
    for tensor, array in move(config.schema, state, hugging_face(config.schema), native(layout, [0])).items():
        ours.parameters[tensor].detach().copy_(torch.from_numpy(array))

    generator = np.random.default_rng(seed)
    samples = [sample(generator, config.vocab_size, lengths) for lengths in DOCUMENTS]
    batch = collate(samples, separate_documents=True).looking(depth)
    flat = (torch.from_numpy(each.ravel()) for each in (batch.tokens, batch.labels, batch.positions))
    ahead = tuple(
        FurtherTokens(*(torch.from_numpy(x.ravel()) for x in (each.tokens, each.labels))) for each in batch.ahead
    )
    shape = batch.tokens.size, config.sizes["embed"]
    microbatch = Microbatch(*flat, len(samples), shape, batch.documents, ahead=ahead)
    got = ours.chunks[0](None, microbatch)
    got.sum().backward()

    plain, further = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with in_float64():
        for row, of in zip(samples, DOCUMENTS, strict=True):
            starts = np.cumsum([0, *of])
            for start, stop in itertools.pairwise(starts):
                tokens = torch.from_numpy(row.tokens[start:stop])
                labels = torch.from_numpy(np.where(row.counted, row.tokens, IGNORE)[start + 1 : stop + 1])
                if stop < LENGTH:
                    labels[-1] = IGNORE  # which is of the next document
                one, others = theirs.losses(tokens[None], labels[None])
                plain, further = plain + one, further + torch.stack(others).sum() * WEIGHT / depth
    (plain + further).backward()
    close(got[0].detach(), plain.detach(), "loss")
    close(got[1].detach(), further.detach(), "loss of further tokens")
    gradients = theirs.saved(
        lambda module: (
            {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            | {n: torch.zeros_like(b) for n, b in of_buffers(module).items()}
        )
    )
    want = move(config.schema, gradients, hugging_face(config.schema), native(layout, [0]))
    assert want.keys() == set(ours.parameters)
    for tensor, gradient in want.items():
        found = ours.parameters[tensor].grad
        if found is not None:
            close(found, torch.from_numpy(gradient), f"gradient of {tensor}")
        assert found is not None or not gradient.any()


def of_buffers(module: Any) -> dict[str, Tensor]:
    if isinstance(module, PreTrainedModel):
        return saved_buffers(module)
    kept = module.state_dict().keys() - dict(module.named_parameters()).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def sample(generator: np.random.Generator, vocab: int, lengths: list[int]) -> Sample:
    tokens = generator.integers(0, vocab, LENGTH + 1)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Sample(tokens, np.append(documents, documents[-1]), generator.random(LENGTH + 1) < 0.8, None)
