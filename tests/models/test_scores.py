"""Heads that score sequences: the loss of pairs and every gradient against transformers' classes in float64."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from families import drawn, in_float64, of_transformers
from test_transformers import Arrays, as_saved, close, move, saved_buffers, theirs_of
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as THEIRS

from megacore.data.batches import Batch, collate
from megacore.data.samples import Sample
from megacore.models import scores
from megacore.models.assemble import Model
from megacore.models.config import ModelConfigError
from megacore.models.decoder import Losses, Microbatch
from megacore.models.registry import FAMILIES, family
from megacore.models.stages import layout_of
from megacore.parallel.mesh import Mesh
from megacore.parallel.preference import MicrobatchPairs, PairLoss, Preference
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face, native

LENGTH, VOCAB = 13, 37
DOCUMENTS = [[3, 1, 4, 2], [6, 7]]
"""The lengths of the documents of each row, a chosen and a rejected one by turns; the second row is full."""
OTHERWISE_NAMED = ("ctrl", "modernbert-decoder")
"""Whose class has another name for such a head, or for what stands before it."""
CASES = [pytest.param(name, marks=pytest.mark.in_turn(15, -n)) for n, name in enumerate(sorted(scores.FAMILIES))]


def test_families_are_those_that_transformers_can_load() -> None:
    for name in FAMILIES:
        kind = family(name).config
        if name in scores.FAMILIES:
            assert kind.scoring_architecture() == THEIRS[name]
        else:
            assert name not in THEIRS or name in OTHERWISE_NAMED
            with pytest.raises(ModelConfigError, match="transformers has no ForSequenceClassification of this family"):
                kind.scoring_architecture()


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_pairs_and_its_gradients(name: str) -> None:
    """Of documents that are packed here, and one after the other there."""
    positions = LENGTH if "position" in family(name).config.axes or name == "mpt" else 32
    seed = Random(name).randrange(99)
    config_there = of_transformers(drawn(name, seed, layers=3, vocab=VOCAB, positions=positions, tp=1))
    config_there.num_labels = 1
    theirs = theirs_of(config_there, seed, AutoModelForSequenceClassification)
    config = family(name).config.from_hugging_face(config_there.to_dict()).scoring(1)
    layout, mesh = layout_of(config, MeshShape()), Mesh.single()
    loss = PairLoss(Preference("bradley_terry", 1.0), mesh.along("cp", "tp"), scores=True)
    ours = Model.create(config, layout, mesh, torch.float64, Losses(of_pairs=loss))
    ours.train(False)  # without dropout

    def moved(arrays: Arrays) -> dict[str, Tensor]:
        assert {stored.name for stored in hugging_face(config.schema)} == arrays.keys()
        found = move(config.schema, arrays, hugging_face(config.schema), native(layout, [0]))
        return {tensor: torch.from_numpy(array) for tensor, array in found.items()}

    for tensor, value in moved(saved(theirs, Tensor.detach)).items():
        ours.parameters[tensor].detach().copy_(value)
    generator = np.random.default_rng(seed)
    samples = [sample(generator, lengths) for lengths in DOCUMENTS]
    told = ours.chunks[0](None, microbatch(collate(samples, True, scores=True), config.sizes["embed"]))
    told[0].backward()

    with in_float64():
        found = [theirs(input_ids=text[None], use_cache=False).logits[0, 0] for each in samples for text in texts(each)]
    rewards = torch.stack(found).view(-1, 2)
    want = -logsigmoid(rewards[:, 0] - rewards[:, 1]).sum()
    want.backward()
    more = *rewards.detach().sum(0), (rewards[:, 0] > rewards[:, 1]).sum()
    close(told.detach(), torch.stack([want.detach(), *more]), "the loss")
    for tensor, gradient in moved(
        saved(theirs, lambda each: torch.zeros_like(each) if each.grad is None else each.grad)
    ).items():
        mine = ours.parameters[tensor].grad
        if mine is None or not gradient.any():
            assert not gradient.any() and (mine is None or mine.abs().max() < 1e-12), tensor
        else:
            close(mine, gradient, f"the gradient of {tensor}")


def saved(model: PreTrainedModel, of: Callable[[Tensor], Tensor]) -> Arrays:
    tensors = {**dict(model.named_parameters()), **saved_buffers(model)}
    return as_saved(model, {name: of(tensor) for name, tensor in tensors.items()})


def sample(generator: np.random.Generator, lengths: list[int]) -> Sample:
    sizes = [*lengths, LENGTH + 1 - sum(lengths)]
    tokens = generator.integers(6, VOCAB, LENGTH + 1)
    documents = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    return Sample(tokens, documents, np.zeros(LENGTH + 1, np.bool_), sum(lengths), np.zeros((len(lengths) // 2, 2)))


def texts(row: Sample) -> list[Tensor]:
    return [torch.from_numpy(row.tokens[row.documents == number]) for number in range(row.documents.max())]


def microbatch(batch: Batch, embed: int) -> Microbatch:
    tokens, labels, positions = (torch.from_numpy(x.ravel()) for x in (batch.tokens, batch.labels, batch.positions))
    assert batch.pairs is not None
    places, counted, reference = map(torch.from_numpy, (batch.pairs.places, batch.pairs.counted, batch.pairs.reference))
    pairs, shape = MicrobatchPairs(places.ravel(), counted, reference), (len(tokens), embed)
    rotated = batch.documents  # rotary frequencies go by the documents, as there
    return Microbatch(
        tokens, labels, positions, len(batch.tokens), shape, batch.documents, lengths=rotated, pairs=pairs
    )
