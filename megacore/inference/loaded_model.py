"""The Python door to a model: :func:`load_model`, and :func:`generate`, which loads one for some prompts.

What is wrong is found before the weights are read, and before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.inference.answers import Answer, Decoding, Prompts
from megacore.inference.placement import check_mesh, device_kind, live, sizes
from megacore.inference.texts import Texts
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.schema import split_of
from megacore.rank import RankPlace
from megacore.store.conversions.formats import open_model
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.folder import WeightFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megacore.models.assemble import Model
    from megacore.parallel.mesh import Mesh


@dataclass(frozen=True)
class ModelSetup:
    """A model that has been checked and not been loaded: its folder, and where and in which dtype it is computed."""

    folder: WeightFolder
    here: RankPlace
    shape: MeshShape
    device: str
    dtype: str | None
    etp: int
    exchange: ContextExchange
    mesh: Mesh | None = None

    @classmethod
    def check(
        cls,
        folder: str | Path,
        *,
        base: str | Path | None = None,
        dtype: str | torch.dtype | None = None,
        device: str = "auto",
        mesh: MeshShape | Mesh | None = None,
        etp: int = 1,
        exchange: ContextExchange = "auto",
    ) -> ModelSetup:
        """Return what the arguments of :func:`load_model` describe; it raises as that does."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        if name not in (None, *FLOATS.values()):
            raise StoreError(f"`dtype={name}`: choose from {', '.join(FLOATS.values())}")
        opened = open_model(Path(folder), None if base is None else Path(base))
        made = None if mesh is None or isinstance(mesh, MeshShape) else mesh
        shape = MeshShape() if mesh is None else mesh if isinstance(mesh, MeshShape) else mesh.shape
        here = RankPlace.of_environment() if made is None else RankPlace(made.rank, shape.world, 0, shape.world, True)
        check_mesh(opened.config, shape, here, etp, exchange, opened.index.tuning)
        kind = device_kind(device, here, shape.world) if made is None else made.device.type
        return cls(opened, here, shape, kind, name, etp, exchange, made)

    @property
    def lacks_ranks(self) -> bool:
        """Whether its ranks are to be started yet: this process is none of them."""
        return self.shape.world > 1 and not self.here.launched

    def load(self) -> LoadedModel:
        """Load this rank's part; all ranks of the mesh do so. Raises StoreError: this process is alone, and the mesh
        takes several; or the weights cannot be read, on all ranks."""
        if self.lacks_ranks:
            world = self.shape.world
            raise StoreError(
                f"this process is alone, and {sizes(self.shape)} takes {world}: start it by "
                f"`torchrun --nproc-per-node {world}`"
            )
        import torch

        from megacore.inference.model_loader import model_from

        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        with ExitStack() as stack:
            found = nullcontext(self.mesh) if self.mesh is not None else live(self.shape, self.here, self.device)
            mesh = stack.enter_context(found)
            model = model_from(self.folder, mesh, dtype, split=split_of(self.etp), exchange=self.exchange)
            return LoadedModel(self.folder, model, stack.pop_all())


@dataclass
class LoadedModel:
    """A model that computes: this rank's part of it, dropout off. Every rank of its mesh calls the same methods.

    Within `with`, or until :meth:`close`, its ranks stay in one process group. ``folder``: that of its weights, whose
    ``config`` is the model's.
    """

    folder: WeightFolder
    model: Model
    _held: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._held.__exit__(*error)

    def close(self) -> None:
        """Leave the other ranks, on all of them; of one process there is nothing to leave."""
        self._held.close()

    @cached_property
    def texts(self) -> Texts:
        """The tokenizer among the folder's files: ``texts.encode(text)`` and ``texts.decode(tokens)``.

        Raises:
            StoreError: there is none, or it cannot be used.
        """
        return Texts.of(self.folder)

    def answers(self, prompts: Prompts, how: Decoding = Decoding()) -> list[Answer]:  # noqa: B008
        """Return the answers to prompts that are tokens already, with their own tokens; the same on all ranks."""
        how.check(self.folder, self.model.parameters.mesh.shape.cp)
        answers = prompts.answers()
        for _ in how.answer(self.model, answers):
            pass
        return answers

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        batch: int = 8,
        draft: int = 0,
    ) -> list[str]:
        """Return what the model says after each prompt, the prompt left out; the same texts on all ranks.

        The arguments, the defaults and the errors are those of :func:`generate`.
        """
        how = Decoding(max_new_tokens, temperature, top_k, top_p, seed, batch, draft)
        return [a.text for a in self.answers(Prompts.of(self.folder, prompts, chat=chat, system=system), how)]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """tokens: [n], the ids of one text -> logits: [n, vocab] in the model's dtype, on its device, on all ranks.

        Row i is of the token that follows ``tokens[i]``.

        Raises:
            StoreError: there are no tokens, or some that the model does not know, or more than it has positions.
        """
        from megacore.inference.model_loader import logits_of

        vocabulary, longest = self.folder.config.vocab_size, self.folder.config.max_positions
        if not len(tokens):
            raise StoreError("there are no tokens to compute the logits of")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise StoreError(
                f"tokens from {min(tokens)} to {max(tokens)}: the model's vocabulary goes from 0 to {vocabulary - 1}"
            )
        if longest is not None and len(tokens) > longest:
            raise StoreError(f"{len(tokens):,} tokens, and the model has {longest:,} positions: give up to those")
        return logits_of(self.model, tokens)


def load_model(
    folder: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    mesh: MeshShape | Mesh | None = None,
    etp: int = 1,
    exchange: ContextExchange = "auto",
) -> LoadedModel:
    """Load a model to generate, to take logits of, or to evaluate: as `megacore generate` and `evaluate` do.

    One process loads all of it; under torchrun every process calls this and loads its part. Where there is more than
    one, use it by ``with load_model(...) as model:``, so that they leave each other in order.

    Args:
        folder: A Hugging Face folder, a checkpoint of any layout, the folder of a run (its newest checkpoint), or a
            checkpoint of adapters.
        base: The model that adapters were trained on; None for the one that they name.
        dtype: The dtype to compute in, as "bfloat16"; None for that of the weights.
        device: "cpu", "cuda", or "auto" for GPUs if there are any.
        mesh: The sizes of the mesh, as ``MeshShape(tp=2, pp=2)``, whatever the checkpoint's layout; or a live one of
            this process; None for one process.
        etp: Parts of each expert, 1 or as many as tp.
        exchange: The way in which ranks of cp meet each other's keys (docs/config.md, context.exchange).

    Raises:
        DamageError: bytes of a checkpoint are not those that were written.
        StoreError: there is no such model, or it cannot be split so, with all reasons; on every rank.
    """
    setup = ModelSetup.check(folder, base=base, dtype=dtype, device=device, mesh=mesh, etp=etp, exchange=exchange)
    return setup.load()


def generate(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    batch: int = 8,
    draft: int = 0,
    base: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    mesh: MeshShape | Mesh | None = None,
    etp: int = 1,
) -> list[str]:
    """Load a model and return what it says after each prompt, the prompt left out, as `megacore generate` does.

    Whoever asks more than once loads it once, by :func:`load_model`.

    Args:
        folder, base, dtype, device, mesh, etp: Those of :func:`load_model`.
        prompts: Texts to go on with.
        max_new_tokens: The most tokens after each prompt.
        temperature: The divisor of the logits, where tokens are drawn at random; None for the most likely token.
        top_k: Draw among so many of the most likely tokens; None for all.
        top_p: Draw among the fewest likely tokens that have this probability together; None for all.
        seed: Seed of the random numbers, which go by (seed, prompt, token) and not by the layout or the batch.
        chat: Whether each prompt is a question, put by the model's chat template.
        system: What the system message of a chat says.
        batch: Prompts that are computed at a time.
        draft: Tokens that the model's layers for further ones draft at a time: the same texts, greedy ones to the
            letter and sampled ones by the same probabilities, by fewer forwards of the model; 0 for none.

    Raises:
        StoreError: as :func:`load_model`, or prompts or numbers are wrong, with all reasons and before the weights are
            read; on every rank.
    """
    setup = ModelSetup.check(folder, base=base, dtype=dtype, device=device, mesh=mesh, etp=etp)
    how = Decoding(max_new_tokens, temperature, top_k, top_p, seed, batch, draft)
    how.check(setup.folder, setup.shape.cp)
    asked = Prompts.of(setup.folder, prompts, chat=chat, system=system)
    with setup.load() as model:
        return [answer.text for answer in model.answers(asked, how)]
