"""A decoder-only transformer, one pipeline chunk at a time: the shape that all families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.anatomy import Anatomy
from megacore.models.context import Context
from megacore.models.names import PROJECTOR
from megacore.models.positions import Waves
from megacore.models.rope import Rotary
from megacore.parallel.balance import RoutedTokens
from megacore.parallel.collectives import all_gather
from megacore.parallel.context_split import ContextParallel, ContextSplit
from megacore.parallel.enum_errors import Score
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.documents import Documents, image_mask
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.kernels.spans import Spans
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.context_attention import ContextAttention
from megacore.parallel.layers.embedding import VocabParallelEmbedding
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.head_loss import head_loss, head_losses
from megacore.parallel.layers.indexed import Indexed, IndexedTokens
from megacore.parallel.layers.linear import column_linear
from megacore.parallel.layers.loss import Finish, Objective
from megacore.parallel.layers.product import DENSE, Product
from megacore.parallel.layers.scores import token_scores
from megacore.parallel.layers.states import ContextStates, States
from megacore.parallel.layers.whole_attention import (
    CausalAttention,
    DocumentAttention,
    ImageAttention,
    MaskedAttention,
)
from megacore.parallel.memory.recompute import PLAIN, Runner
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import Parameters, WeightGradient
from megacore.parallel.preference import MicrobatchPairs, PairLoss
from megacore.parallel.random import key
from megacore.parallel.rank_sets import inner_ranks
from megacore.parallel.token_loss import LossTokens, TokenLoss, own_rows, token_loss


@dataclass(frozen=True)
class FurtherTokens:
    """The tokens k further on, [t], and theirs labels, [t], of which none is beyond the end of a token's document;
    wanted: as of :class:`Microbatch`."""

    tokens: Tensor
    labels: Tensor
    wanted: Tensor | None = None


@dataclass(frozen=True)
class MicrobatchImage:
    """An image of which a rank holds tokens: ``inputs`` of a tower, whose ``features``, [n] of them, stand for the
    ``places`` [n] of this rank's tokens, [t/tp]; ``file``: what it was read from; ``tokens``: those of all of it."""

    file: str
    tokens: int
    inputs: Mapping[str, Tensor]
    features: Tensor
    places: Tensor


@dataclass(frozen=True)
class Microbatch:
    """Some sequences, flattened: t = sequences * sequence length.

    Args:
        tokens: [t].
        labels: [t], the next tokens; ``labels.IGNORE`` where there is nothing to predict.
        positions: [t], each token's position in its sequence.
        sequences: The number of sequences.
        activation: Shape of what travels between stages: (t/tp, embed).
        documents: Lengths of the documents one after the other, none in two sequences, if attention must not cross
            from one into another.
        seed: That of the dropout masks.
        replica: The number along dp of the ranks whose dropout masks they are; None: this rank's.
        lengths: Lengths of the whole sequences that the documents are the ends of, where rotary frequencies are to go
            by it rather than by the sequence length.
        attention: The attention of the tokens, if it is not that of sequences and documents.
        states: What their layers with a state are handed, if it is not that.
        indexed: Their attention to tokens that indexers choose, if it is not that.
        compressed: Their attention to blocks of tokens, if it is not that.
        padding: [t], true where a token is padding, which routers need not balance; None: nowhere.
        number: Its place in a training step; None where none is under way.
        wanted: [n], the tokens whose losses or logits are asked for; None for all. Losses are shared out over tp, so
            that n divides by it, and every token that has a label is among them.
        split: The split of the tokens over cp: t, above, is then what this rank holds of them, while ``documents`` and
            ``lengths`` are those of all; None: they are not.
        rows: [t], the sequence that each token is of; None where they are all tokens of the sequences, in their order.
        blank: The number of sequences that only fill it up: their tokens have no label, and are all padding.
        pairs: The pairs of documents of preferences; None where there are none.
        ahead: What layers behind the model are to predict, the first of them first; empty: nothing.
        images: Those of which this rank holds tokens, if it embeds.
        positions_3d: [3, t], each token's positions in time, height and width; None: each is that of ``positions``.
        image_of: [all tokens], the number of the image, or of the prompt with one, that each is of, below 0 of none,
            where layers look both ways within one; None: there is none.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    sequences: int
    activation: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    seed: int = 0
    replica: int | None = None
    lengths: tuple[int, ...] | None = None
    attention: MaskedAttention | None = None
    states: States | None = None
    indexed: Indexed | None = None
    compressed: CompressedTokens | None = None
    wanted: Tensor | None = None
    padding: Tensor | None = None
    number: int | None = None
    split: ContextSplit | None = None
    rows: Tensor | None = None
    blank: int = 0
    pairs: MicrobatchPairs | None = None
    ahead: tuple[FurtherTokens, ...] = ()
    images: tuple[MicrobatchImage, ...] = ()
    positions_3d: Tensor | None = None
    image_of: Tensor | None = None

    @property
    def sequence_length(self) -> int:
        return (len(self.tokens) if self.split is None else self.split.tokens) // self.sequences

    @property
    def parts(self) -> tuple[int, ...]:
        """The lengths of the documents, or of the sequences where there are none."""
        return self.documents or (self.sequence_length,) * self.sequences


class Projector(nn.Module):
    """What connects a tower to the model, which the tower calls. It puts features in the place of the embeddings of the
    tokens that stand for images, and those behind them that layers add. (x: [tokens/tp, embed], images, tower) ->
    [tokens/tp + n * places, embed].

    Args:
        parameters: Its weights, by their names; there may be none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names, self.weights = (*parameters,), nn.ParameterList(parameters.values())

    def forward(
        self, x: Tensor, images: Sequence[MicrobatchImage], tower: Callable[[MicrobatchImage], Tensor] | None
    ) -> Tensor:
        features, places = list[Tensor](), [each.places for each in images]
        for each in images:
            assert tower is not None  # where the data has images
            features.append(tower(each)[:, each.features])
        # Ranks without an image have gradients of it too, of zeros, or only some would go through a backward.
        if nothing := [weight.flatten()[:0] for weight in self.weights]:
            depths = len(features[0]) if features else 1
            features.append(torch.cat(nothing).view(1, 0, 1).expand(depths, 0, x.shape[-1]))
            places.append(torch.empty(0, dtype=torch.int64, device=x.device))
        if not features:
            return x
        first, *deeper = torch.cat(features, 1)
        return torch.cat([x.index_copy(0, torch.cat(places), first), *deeper])


@dataclass(frozen=True)
class Losses:
    """The loss beyond plain cross entropy, computed ``chunk`` tokens at a time, or all at once; ``function``, or
    ``of_pairs`` of documents, takes the place of all of it. ``mtp`` is the weight of the mean loss of the layers that
    predict further tokens; 0: they do not."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int | None = None
    function: TokenLoss | None = None
    of_pairs: PairLoss | None = None
    mtp: float = 0.0


class TokenEmbedding(nn.Module):
    """microbatch -> [tokens/tp, embed]; the row of ``padding_idx`` gets no gradient from being looked up.

    Args:
        name: That of the table.
        vocab: Size of the vocabulary without padding.
        padding_idx: That of :class:`~parallel.layers.embedding.VocabParallelEmbedding`.
        scale: Factor of the embeddings.
        round_scale: Whether the scale is rounded first, to fp32 and then to the table's dtype, as transformers does it
            for Gemma.
        dropout: Probability of dropping an element of the embeddings.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        vocab: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        round_scale: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        table = parameters[name]
        self.tokens = VocabParallelEmbedding.of(table, vocab, parameters.mesh, padding_idx)
        self.scale = rounded(scale, table.dtype) if round_scale else scale
        self.dropout = nn.Dropout(dropout)

    def forward(self, microbatch: Microbatch) -> Tensor:
        x: Tensor = self.dropout(self.tokens(microbatch.tokens))
        return x if self.scale == 1 else x * self.scale


def rounded(scale: float, dtype: torch.dtype) -> float:
    """Return a factor as transformers keeps it for Gemma: rounded to fp32 and then to a dtype."""
    return torch.tensor(scale, dtype=torch.float32, device="cpu").to(dtype).item()


class PositionEmbedding(nn.Module):
    """microbatch -> [tokens/tp, embed]: tokens plus positions, each rank's own.

    Args:
        positions: The table of those that are learned, or what gives those that are not, [t] -> [t, embed].
        vocab: Size of the vocabulary without padding.
        anatomy: It has the padding, the row where a sequence begins, the factor of the tokens and the dropout.
    """

    def __init__(self, parameters: Parameters, positions: nn.Parameter | Waves, vocab: int, anatomy: Anatomy) -> None:
        super().__init__()
        table = parameters["embed.weight"]
        self.tokens = VocabParallelEmbedding.of(table, vocab, parameters.mesh, anatomy.padding_idx)
        self.positions = positions
        self.offset, self.scale = anatomy.position_offset, anatomy.embedding_scale
        self.dropout = nn.Dropout(anatomy.embedding_dropout)
        self.group = parameters.mesh.tp

    def forward(self, microbatch: Microbatch) -> Tensor:
        own = microbatch.positions.chunk(self.group.size)[self.group.index]
        own = own + self.offset if self.offset else own
        tokens = self.tokens(microbatch.tokens)
        tokens = tokens if self.scale == 1 else tokens * self.scale
        where = self.positions(own) if isinstance(self.positions, Waves) else F.embedding(own, self.positions)
        return self.dropout(tokens + where.to(tokens.dtype))


class NormedEmbedding(nn.Module):
    """microbatch -> [tokens/tp, embed]: an embedding and a norm of it."""

    def __init__(self, embedding: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, norm

    def forward(self, microbatch: Microbatch) -> Tensor:
        return self.norm(self.embedding(microbatch))


class DenseHead(nn.Module):
    """The final norm, and behind it a linear, an activation and another norm. x: [tokens/tp, embed] -> same.

    Args:
        norm, last_norm: The norms.
        linear: The linear between.
        activation: The name of a function of :data:`parallel.kernels.activation.FUNCTIONS`.
    """

    def __init__(self, norm: nn.Module, linear: nn.Module, activation: str, last_norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear, self.activation, self.last_norm = norm, linear, FUNCTIONS[activation].of, last_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.last_norm(self.activation(self.linear(self.norm(x))))


class Prediction(nn.Module):
    """A layer behind the model, which predicts a token one further ahead than the layer before it (DeepSeek-AI 2024,
    arXiv 2412.19437, section 2.2). x: [tokens/tp, embed], normalised for the head -> same.

    Args:
        proj: Makes one of the embedding of the tokens ahead and the hidden states, side by side.
        block: The transformer block.
        embed_norm, hidden_norm: The norms of what ``proj`` is given.
        norm: The norm in front of the head.
    """

    def __init__(
        self,
        embedding: nn.Module,
        proj: nn.Module,
        block: nn.Module,
        embed_norm: nn.Module,
        hidden_norm: nn.Module,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding, self.proj, self.block = embedding, proj, block
        self.embed_norm, self.hidden_norm, self.norm = embed_norm, hidden_norm, norm

    def forward(self, x: Tensor, microbatch: Microbatch, context: Context, run: Runner) -> Tensor:
        pair = self.embed_norm(self.embedding(microbatch)), self.hidden_norm(x)
        return self.norm(run([self.block], self.proj(torch.cat(pair, -1)), context))


@dataclass(frozen=True)
class Ahead:
    """A microbatch of which further tokens are predicted, what blocks are told of it, and what runs them."""

    microbatch: Microbatch
    context: Context
    run: Runner


Method = TypeVar("Method", bound=Callable[..., Any])


def within_hooks(method: Method) -> Method:
    """Have a method of a module run as its forward does: hooks of that bring weights that ranks split."""

    @wraps(method)
    def run(self: nn.Module, *arguments: Any) -> Any:
        self.forward = partial(method, self)
        try:
            return self(*arguments)
        finally:
            del self.forward

    return cast(Method, run)


class Head(nn.Module):
    """The final norm, the projection to the vocabulary and the loss; or to the scores of a sequence, whose labels stand
    for the tokens of a vocabulary.

    Args:
        norm: The norm of the last activations.
        weight: [padded vocab/tp, embed].
        vocab: Size of the vocabulary without padding.
        group: The tensor parallel group.
        bias: [padded vocab/tp], added to the products.
        scale: Factor of the products, their bias included.
        softcap: Bound of the logits, softcap * tanh(x / softcap), after the scale.
        predictions: The layers that predict further tokens by this very projection.
    """

    def __init__(
        self,
        norm: nn.Module,
        weight: nn.Parameter,
        vocab: int,
        group: Group,
        bias: nn.Parameter | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        predictions: Iterable[Prediction] = (),
    ) -> None:
        super().__init__()
        self.predictions = nn.ModuleList(predictions)
        self.norm, self.weight, self.bias, self.vocab, self.group = norm, weight, bias, vocab, group
        self.finish = Finish(scale, softcap)
        self.losses = Losses()
        self.product: Product = DENSE

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None,
        wanted: Tensor | None = None,
        inputs: Sequence[Tensor] = (),
        pairs: MicrobatchPairs | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """x: [tokens/tp, embed], labels: [tokens] -> the sum of the losses of this rank's tokens, a scalar; of pairs,
        what is told of them: [preference.TOLD]; with what is ``ahead``, that sum and the weighted one of further
        tokens: [2].

        Without labels -> the logits, [tokens, padded vocab/tp], or of n wanted tokens [n, padded vocab/tp]. A loss of
        somebody's own is told of the tokens and their positions, the ``inputs``, each [tokens].
        """
        if labels is None and wanted is not None:
            return self.logits_of(self.hidden(x, wanted))
        if labels is None:
            return self.finish(column_linear(self.norm(x), self.weight, self.bias, self.group))
        if ahead is not None:
            hidden = self.norm(x)
            chosen, labels = self._chosen(hidden, labels, wanted)
            return torch.stack([head_loss(chosen, self.weight, labels, *self._how), self._further(hidden, ahead)])
        x, labels = self._chosen(x, labels, wanted)
        if self.losses.function is not None:
            inputs = inputs if wanted is None else [each[wanted] for each in inputs]
            mine = (each.chunk(self.group.size)[self.group.index] for each in (inputs[0], labels, inputs[1]))
            products = column_linear(self.norm(x), self.weight, self.bias, self.group, product=self.product)
            how = self.losses.function, self.group, self.vocab, self.finish
            return token_loss(products, LossTokens.of(*mine), *how)
        if self.losses.of_pairs is not None:
            assert pairs is not None  # of whose documents the labels are
            places = pairs.places if wanted is None else pairs.places[wanted]
            values = self._scores(x, labels) if self.losses.of_pairs.scores else self._log_probabilities(x, labels)
            return self.losses.of_pairs(values, self._how[0].own(places), pairs)
        return head_loss(self.norm(x), self.weight, labels, *self._how)

    @within_hooks
    def hidden(self, x: Tensor, wanted: Tensor) -> Tensor:
        """x: [tokens/tp, embed], wanted: [n] -> [n, embed], normalised for the head, on all ranks of tp."""
        return all_gather(self.norm(x), self.group)[wanted]

    @within_hooks
    def logits_of(self, hidden: Tensor) -> Tensor:
        """hidden: [n, embed], normalised, the same on all ranks of tp -> [n, padded vocab/tp]."""
        return self.finish(column_linear(hidden, self.weight, self.bias, self.group, sequence=False))

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of the layers that predict further tokens."""
        return [each.block for each in self.predictions if isinstance(each, Prediction)]

    def _further(self, x: Tensor, ahead: Ahead) -> Tensor:
        """x: [tokens/tp, embed], normalised -> the weighted mean over the layers ahead of the sum of their losses."""
        losses = []
        for predict, further in zip(self.predictions, ahead.microbatch.ahead, strict=True):
            x = predict(x, replace(ahead.microbatch, tokens=further.tokens), ahead.context, ahead.run)
            chosen, labels = self._chosen(x, further.labels, further.wanted)
            losses.append(head_loss(chosen, self.weight, labels, *self._how))
        return torch.stack(losses).mean() * self.losses.mtp

    def _log_probabilities(self, x: Tensor, labels: Tensor) -> Tensor:
        """x: [n/tp, embed], labels: [n] -> those of this rank's labels, [n/tp], 0 where there is none."""
        return -head_losses(self.norm(x), self.weight, labels, *self._how)

    def _scores(self, x: Tensor, labels: Tensor) -> Tensor:
        """x: [n/tp, embed], labels: [n] -> the score of each of this rank's tokens, [n/tp], 0 where it has no label."""
        products = column_linear(self.norm(x), self.weight, self.bias, self.group, product=self.product)
        scores = own_rows(products, self.group, self.vocab, self.finish)
        return torch.where(self._how[0].own(labels) != IGNORE, scores[:, 0], 0)

    @property
    def _how(self) -> tuple[Objective, int | None, Tensor | None, Product]:
        """What the loss of hidden states goes by, beside the weight and the labels."""
        objective = Objective(self.group, self.vocab, self.losses.label_smoothing, self.losses.z_loss, self.finish)
        return objective, self.losses.chunk, self.bias, self.product

    def _chosen(self, x: Tensor, labels: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [tokens/tp, embed], labels: [tokens], wanted: [n] or None, all -> this rank's [n/tp, embed], and [n]."""
        if wanted is None:
            return x, labels
        own = wanted.chunk(self.group.size)[self.group.index]
        return all_gather(x, self.group).index_select(0, own), labels[wanted]

    @within_hooks
    def scores(self, x: Tensor, labels: Tensor, score: Score) -> Tensor:
        """x: [tokens/tp, embed], labels: [tokens] -> what ``score`` says of this rank's tokens: [tokens/tp]."""
        objective = Objective(self.group, self.vocab, finish=self.finish)
        return token_scores(self.norm(x), self.weight, labels, objective, score, self.bias)


class Decoder(nn.Module):
    """One pipeline chunk: some blocks, with the embedding before the first and the head after the last.

    (activations [tokens/tp, embed] or None, microbatch) -> activations, or the summed loss from the last chunk.
    """

    def __init__(
        self,
        embedding: nn.Module | None,
        blocks: dict[int, nn.Module],
        head: Head | None,
        dtype: torch.dtype,
        seed: tuple[int, ...],
        rotaries: Mapping[str, Rotary] | None = None,
        mesh: Mesh | None = None,
        told: int = 0,
        projector: Projector | None = None,
    ) -> None:
        super().__init__()
        # In the order in which they run: the parameters of one are gathered while the one before it computes.
        self.embedding, self.projector = embedding, projector
        self.layers = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        self.head, self.dtype = head, dtype
        self.run: Runner = PLAIN
        self.tower: Callable[[MicrobatchImage], Tensor] | None = None
        """An image to its features, [1 + n, features, embed]: the first take the place of embeddings, the others are
        added to what the first n layers give."""
        self.told = told
        """Numbers of each token's embedding that all blocks are told, which therefore travels with the activations."""
        self._rotaries, self._seed, self._mesh = dict(rotaries or {}), seed, mesh or Mesh.single()
        self.context_parallel = ContextParallel()

    @cached_property
    def _drops(self) -> bool:
        """Asked for when the chunk is complete, adapters and all."""
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.modules())

    @cached_property
    def _image_windows(self) -> set[tuple[int | None, str]]:
        """The windows of the layers that look both ways within an image, and how they do."""
        layers = (getattr(module, "scoring", None) for module in self.modules())
        return {(each.window, each.both_ways) for each in layers if isinstance(each, Scoring) and each.both_ways}

    @classmethod
    def chunk(
        cls,
        parameters: Parameters,
        chunk: int,
        *,
        embedding: Callable[[], nn.Module],
        block: Callable[[int], nn.Module],
        head: Callable[[], Head],
        rotaries: Mapping[str, Rotary] | None = None,
        told: int = 0,
    ) -> Self:
        """Return a chunk of this rank: only what its layout puts there is built. Blocks find their rope by its name."""
        layout, place = parameters.layout, parameters.mesh.place
        virtual = layout.virtual_stages(place.pp)[chunk]
        projector = {name: each for name, each in parameters.items() if name.startswith(PROJECTOR)}
        return cls(
            embedding() if virtual == 0 else None,
            {layer: block(layer) for layer in layout.chunk_layers(place.pp, chunk)},
            head() if virtual == len(layout.layers) - 1 else None,
            parameters.dtype,
            # Ranks that share tokens must not share masks, as each masks other tokens or other heads.
            (virtual, place.dp, place.ep, place.cp, place.tp),
            rotaries,
            parameters.mesh,
            told,
            Projector(projector) if virtual == 0 else None,
        )

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        if self.training and self._drops:
            # Dropout depends on what is computed, not on what was computed before: a run repeats bitwise.
            virtual, dp, *inner = self._seed
            dp = dp if microbatch.replica is None else microbatch.replica
            torch.manual_seed(key(microbatch.seed, virtual, dp, *inner) >> 1)
        context = self.context(microbatch)
        x = self.hidden(x, microbatch, context)
        if self.head is None:
            return x
        inputs, ahead = (microbatch.tokens, microbatch.positions), None
        if microbatch.ahead and self.head.losses.mtp and torch.is_grad_enabled():  # what is evaluated is the next token
            ahead = Ahead(microbatch, context, self.run)
        return self.head(x, microbatch.labels, microbatch.wanted, inputs, microbatch.pairs, ahead)

    def hand_weight_gradients(
        self, accept: Callable[[nn.Parameter, WeightGradient | Tensor], None], late: bool
    ) -> None:
        """Have experts hand their weights' gradients to whoever sums them, at once or later, and the head where it is
        later: at once a sum in fp32 would be there beside the logits. A head that is also the chunk's embedding, or is
        trained to predict further tokens, is left to autograd."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.hand, module.late = accept, late
        head, embedding = self.head, self.embedding
        own = set() if embedding is None else set(embedding.parameters())
        if not late or head is None or (head.predictions and head.losses.mtp):
            return
        if head.weight.requires_grad and head.weight not in own:
            head.product = head.product.handing(partial(accept, head.weight), late=True)

    def logits(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Do as :meth:`forward`, but the last chunk gives [tokens or those wanted, padded vocab/tp]."""
        x = self.hidden(x, microbatch)
        return x if self.head is None else self.head(x, None, microbatch.wanted)

    def normed(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Do as :meth:`forward`, but the last chunk gives [wanted tokens, embed], normalised for the head."""
        x = self.hidden(x, microbatch)
        assert microbatch.wanted is not None
        return x if self.head is None else self.head.hidden(x, microbatch.wanted)

    def scores(self, x: Tensor | None, microbatch: Microbatch, score: Score) -> Tensor:
        """Do as :meth:`forward`, but the last chunk gives the scores of this rank's tokens: [tokens/tp]."""
        x = self.hidden(x, microbatch)
        return x if self.head is None else self.head.scores(x, microbatch.labels, score)

    def hidden(self, x: Tensor | None, microbatch: Microbatch, context: Context | None = None) -> Tensor:
        """Return the activations after the blocks: [tokens/tp, embed]."""
        context = context or self.context(microbatch)
        layers = list(self.layers.values())
        if self.embedding is not None:
            assert self.projector is not None
            x = self.embedding(microbatch)
            found = self.projector(x, microbatch.images, self.tower)
            tokens, x = len(x), found
            if len(found) > tokens:  # a slice of all rows would cost its backward a copy
                places = torch.cat([each.places for each in microbatch.images])
                x, added = found[:tokens], found[tokens:].view(-1, len(places), found.shape[-1])
                for block, each in zip(layers, added, strict=False):
                    x = self.run([block], x, context).index_add(0, places, each)
                layers = layers[len(added) :]
            embedded = x[:, : self.told]  # of several streams the first
        assert x is not None  # the first chunk embeds, the others are given activations
        if not self.told:
            return self.run(layers, x, context)
        if self.embedding is None:
            x, embedded = x.split([x.shape[-1] - self.told, self.told], -1)
        x = self.run(layers, x, replace(context, tokens=microbatch.tokens, embedded=embedded))
        return x if self.head is not None else torch.cat([x, embedded], -1)

    def turn_by(self, axes: Sequence[int]) -> None:
        """Have each frequency of the ropes turn by one of a token's positions in time, height and width: 0, 1 or 2."""
        for rotary in self._rotaries.values():
            rotary.axes = torch.tensor(axes, device=self._mesh.device)

    @property
    def blocks(self) -> list[nn.Module]:
        """All that :attr:`run` runs: the blocks of the layers, and those that predict further tokens."""
        return [*self.layers.values(), *(() if self.head is None else self.head.blocks)]

    def context(self, microbatch: Microbatch) -> Context:
        """Return what the blocks are told of the microbatch's tokens."""
        rotations = {name: self._rotation(rotary, microbatch) for name, rotary in self._rotaries.items()}
        attention, states = microbatch.attention or self.attention(microbatch), microbatch.states
        indexed = microbatch.indexed or self.indexed(microbatch)
        states = states or self.states(microbatch)
        compressed = microbatch.compressed or self.compressed(microbatch)
        told = attention, microbatch.positions, rotations, self._routed(microbatch), states, indexed, compressed
        return Context(*told)

    def indexed(self, microbatch: Microbatch) -> IndexedTokens:
        """Return how the tokens of sequences and documents look at those that indexers choose."""
        return IndexedTokens({}, microbatch.parts, microbatch.split, self._mesh.cp, microbatch.tokens.device)

    def compressed(self, microbatch: Microbatch) -> CompressedTokens:
        """Return how the tokens of sequences and documents look at blocks of those before them."""
        device = microbatch.tokens.device
        return CompressedTokens(microbatch.parts, microbatch.split, self._mesh.cp, device, self.tables)

    def tables(self, rope: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [m] -> cos, sin: [m, turning/2], of a rope that no length changes."""
        return self._rotaries[rope].at(positions, 1, self.dtype)

    def states(self, microbatch: Microbatch, whole: bool = False) -> States:
        """Return what layers with a state are handed where documents begin, or parts of them; ``whole`` is that of
        :meth:`ContextStates.of`."""
        device = microbatch.tokens.device
        if microbatch.split is not None:
            return ContextStates.of(microbatch.split, self._mesh.cp, device, whole)
        return States(Spans(microbatch.parts, device))

    def attention(self, microbatch: Microbatch, context: ContextParallel | None = None) -> MaskedAttention:
        """Return how the tokens of sequences and documents look at each other; ``context`` has split them, or the
        model's."""
        whole: MaskedAttention = CausalAttention(microbatch.sequences)
        if microbatch.documents is not None:
            documents = Documents.of(microbatch.documents, microbatch.tokens.device)
            whole = DocumentAttention(documents, microbatch.sequences)
        if microbatch.image_of is not None:
            documents = Documents.of(microbatch.parts, microbatch.tokens.device)
            of_tokens = documents, microbatch.sequences, microbatch.image_of
            masks = {
                (window, looks): image_mask(*of_tokens, window, looks == "anywhere", self.dtype)
                for window, looks in self._image_windows
            }
            whole = ImageAttention(whole, masks)
        if microbatch.split is None:
            return whole
        mesh, context = self._mesh, context or self.context_parallel
        inner = mesh.group(inner_ranks(mesh.shape.along(mesh.rank, "cp"), mesh.cp.index, context.heads))
        return ContextAttention.of(microbatch.split, microbatch.sequence_length, context, mesh.cp, inner, whole)

    def _routed(self, microbatch: Microbatch) -> RoutedTokens:
        """Return what is known of this rank's own tokens."""
        group = self._mesh.tp
        padding, rows, tokens = (
            None if each is None else each.chunk(group.size)[group.index]
            for each in (microbatch.padding, microbatch.rows, microbatch.tokens)
        )
        return RoutedTokens(microbatch.sequences, padding, microbatch.number, rows, tokens)

    def _rotation(self, rotary: Rotary, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """cos, sin: [t, turning/2] at the microbatch's positions."""
        positions, in_three = microbatch.positions, microbatch.positions_3d
        positions = positions if in_three is None else rotary.of_three(in_three)
        if microbatch.lengths is not None:
            assert microbatch.documents is not None  # whose lengths they are
            documents, lengths = microbatch.documents, microbatch.lengths
            if microbatch.split is not None:
                documents, lengths = microbatch.split.of_documents(self._mesh.place.cp, lengths)
            return rotary.of_documents(positions, documents, lengths, self.dtype)
        if microbatch.split is not None or in_three is not None:
            return rotary.at(positions, microbatch.sequence_length, self.dtype)
        cos, sin = rotary(microbatch.sequence_length, self.dtype, positions.device)
        return cos[positions], sin[positions]
