"""Layers that predict further tokens: their loss and every gradient against transformers' modules in float64, put
together by the formulas of the paper (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2)."""

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import drawn, in_float64, of_transformers
from test_transformers import Arrays, as_saved, close, move, theirs_of
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer

from megacore.data.batches import Batch, collate
from megacore.data.samples import Sample
from megacore.models.assemble import Model
from megacore.models.decoder import FurtherTokens, Losses, Microbatch
from megacore.models.mtp import FIELD, MtpConfig
from megacore.models.registry import configure, family
from megacore.models.stages import layout_of
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face, native

WEIGHT, LENGTH = 0.3, 11
DOCUMENTS = [[4, 1, 6], [11]]
"""The lengths of the documents of each row."""


class Reference:
    """transformers' model with its layers that predict further tokens, one behind the other, all weights random."""

    def __init__(self, name: str, depth: int, seed: int) -> None:
        own = {"sliding_window": 3} if name == "mimo_v2_flash" else {}
        plain = of_transformers(drawn(name, seed, layers=4, vocab=37, positions=32, tp=1, **own))
        config = family(name).config.from_hugging_face({**plain.to_dict(), FIELD: depth})
        assert isinstance(config, MtpConfig)
        self.config, self.main = config, theirs_of(plain, seed)
        self.base = self.main.get_decoder()
        at = config.mtp_block
        self.kind = plain.layer_types[at] if name == "mimo_v2_flash" else None
        if self.kind:  # of which the blocks that predict further tokens are the ones with a window and without experts
            assert self.kind == "sliding_attention"
            plain.mlp_layer_types = ["dense"] * 4
        kinds = type(self.base.layers[at]), type(self.base.norm)
        self.layers = nn.ModuleList(MtpLayer(plain, *kinds, at).double().eval() for _ in range(depth))
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for name, tensor in self.layers.state_dict(keep_vars=True).items():
                tensor.normal_(0.0, 0.3)
                if "correction" in name:
                    tensor.copy_(tensor.float())  # as it is here

    def losses(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, labels: [n], of one document -> the summed loss of the next tokens, and of all further ones."""
        n = len(tokens)
        h = self.base(input_ids=tokens[None], use_cache=False).last_hidden_state
        plain, further = self._loss(h, labels), torch.zeros((), dtype=torch.float64)
        positions = torch.arange(n)[None]
        rotations = self.base.rotary_emb(h, positions, *([self.kind] if self.kind else []))
        mask = torch.full((n, n), -torch.inf, dtype=h.dtype).triu(1)[None, None]
        if self.kind:
            mask = mask + torch.full((n, n), -torch.inf, dtype=h.dtype).tril(-3)
        for k, layer in enumerate(self.layers, 1):
            left = max(0, n - k)
            if left:  # h_i and the embedding of token i + k predict token i + k + 1
                turned = tuple(each[:, :left] for each in rotations)
                seen = mask[..., :left, :left], positions[:, :left]
                h = layer(self.base.embed_tokens(tokens[None, k:]), h[:, :left], turned, *seen, None)
                further = further + self._loss(h, labels[k:])
        return plain, further

    def _loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.main.lm_head(h)[0], labels, ignore_index=IGNORE, reduction="sum")

    def saved(self, of: Callable[[Tensor], Tensor]) -> Arrays:
        """What ``of`` says of each weight, by the names of a published folder."""
        names, first = self.config.mtp_names, self.config.num_hidden_layers
        own = {"enorm": names.embed_norm, "hnorm": names.hidden_norm, "eh_proj": names.proj, "post_norm": names.norm}
        found = {name: of(tensor) for name, tensor in self.main.state_dict(keep_vars=True).items()}
        for name, tensor in self.layers.state_dict(keep_vars=True).items():
            depth, part, rest = name.split(".", 2)
            template = names.block if part == "mtp_block" else f"{own[part]}."
            rest = rest.replace("post_attention", "pre_mlp") if self.kind else rest
            found[template.format(depth=depth, layer=first + int(depth)) + rest] = of(tensor)
        if self.config.tie_word_embeddings:
            del found["lm_head.weight"]
        return as_saved(self.main, found)


CASES = [
    ("deepseek_v3", 1, 0),
    ("deepseek_v3", 2, 3),
    ("glm4_moe", 1, 1),
    ("glm4_moe", 3, 2),
    ("qwen3_next", 1, 0),
    ("qwen3_next", 1, 4),
    ("mimo_v2_flash", 1, 1),
    ("mimo_v2_flash", 3, 6),
    ("qwen3_5_text", 1, 1),
    ("qwen3_5_moe_text", 1, 2),
]


@pytest.mark.parametrize(("name", "depth", "seed"), CASES)
def test_losses_and_gradients(name: str, depth: int, seed: int) -> None:
    theirs = Reference(name, depth, seed)
    config = theirs.config
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64, Losses(mtp=WEIGHT))
    state = theirs.saved(lambda tensor: tensor.detach())
    assert {stored.name for stored in hugging_face(config.schema)} == state.keys()
    for tensor, array in move(config.schema, state, hugging_face(config.schema), native(layout, [0])).items():
        ours.parameters[tensor].detach().copy_(torch.from_numpy(array))

    generator = np.random.default_rng(seed)
    samples = [sample(generator, config.vocab_size, lengths) for lengths in DOCUMENTS]
    got = ours.chunks[0](None, microbatch(collate(samples, separate_documents=True).looking(depth), config))
    got.sum().backward()

    plain = further = torch.zeros((), dtype=torch.float64)
    with in_float64():
        for row, lengths in zip(samples, DOCUMENTS, strict=True):
            for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
                labels = np.where(row.counted, row.tokens, IGNORE)[start + 1 : stop + 1]
                if stop < LENGTH:
                    labels[-1] = IGNORE  # which is of the next document
                found = theirs.losses(torch.from_numpy(row.tokens[start:stop]), torch.from_numpy(labels))
                plain, further = plain + found[0], further + found[1] * (WEIGHT / depth)
    (plain + further).backward()
    close(got[0].detach(), plain.detach(), "loss")
    close(got[1].detach(), further.detach(), "loss of further tokens")
    gradients = theirs.saved(lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    want: Mapping[str, np.ndarray] = move(config.schema, gradients, hugging_face(config.schema), native(layout, [0]))
    assert want.keys() == set(ours.parameters)
    for tensor, gradient in want.items():
        mine = ours.parameters[tensor].grad
        if mine is None:
            assert "correction" in tensor and not gradient.any()
        else:
            close(mine, torch.from_numpy(gradient), f"gradient of {tensor}")


def microbatch(batch: Batch, config: MtpConfig) -> Microbatch:
    def flat(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.ravel())

    ahead = tuple(FurtherTokens(flat(each.tokens), flat(each.labels)) for each in batch.ahead)
    tokens, labels, positions = map(flat, (batch.tokens, batch.labels, batch.positions))
    shape = tokens.numel(), config.hidden_size
    return Microbatch(tokens, labels, positions, len(batch.tokens), shape, batch.documents, ahead=ahead)


def sample(generator: np.random.Generator, vocab: int, lengths: list[int]) -> Sample:
    tokens, documents = generator.integers(0, vocab, LENGTH + 1), np.repeat(np.arange(len(lengths)), lengths)
    numbers = np.append(documents, documents[-1]).astype(np.int32)
    return Sample(tokens, numbers, generator.random(LENGTH + 1) < 0.8, None)


def test_the_published_number_of_weights() -> None:
    """As the hub counts the tensors of DeepSeek-V3, those of bf16 and of fp8, which store embedding and head twice."""
    schema = configure({"preset": "deepseek-v3", FIELD: 1}).schema
    again = sum(schema.numel(param) * len(param.hf_copies) for param in schema.params)
    assert schema.parameters + again == 3_918_786_560 + 680_571_043_840
