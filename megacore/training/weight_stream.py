"""Weights of a run, whole and by their Hugging Face names, from the shards of all ranks: what an engine of inference
takes between two steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.models.lora import factors, in_full, peft_problems, targets
from megacore.parallel.collectives import broadcast_
from megacore.parallel.parameters import view
from megacore.parallel.weights.transfer import Copy, Stored, hugging_face, native, plan, whole_name
from megacore.store.conversions.adapters import computed_in, merge
from megacore.store.io.errors import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.hugging_face_files import named
from megacore.training.save import NAMES, Contents

_Filled = tuple[Stored, Sequence[Copy]]
"""A tensor, and what fills it."""


class TensorInfo(NamedTuple):
    """A tensor that is to come, as vLLM's ``ParamMeta`` has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream:
    """Yields (name, tensor on the device), bit for bit those of an export after the same step, over and over anew.

    All ranks iterate, to the end and between two steps. Beside the shards a rank holds one whole tensor, what it has
    itself of the parameter that this is made of where ZeRO splits parameters, and for parts that are no rows one of
    them. It keeps none that it has yielded.

    Args:
        contents: What a checkpoint of the run would hold.
        merged: Of a run of adapters, yield all weights with these added to them, computed on the host as in an export;
            else what is trained alone, by the names of the peft library. Of other runs there are only weights.
        everywhere: Whether all ranks get the tensors; else rank 0 does, and the others tensors on torch's meta device.

    Raises:
        StoreError: adapters are to be merged into weights that are held quantised, or to be streamed alone and the peft
            library would not find their places.
    """

    def __init__(self, contents: Contents, merged: bool = False, everywhere: bool = False) -> None:
        self._parameters, self._optimizer = contents.parameters, contents.optimizer
        self._gets = everywhere or self._parameters.mesh.rank == self._optimizer.replica == 0
        self._everywhere, layout = everywhere, self._parameters.layout
        self._lora = contents.adapters.lora if contents.adapters is not None and merged else None
        if self._lora is not None and self._lora.base_dtype is not None:
            raise StoreError(
                f"weights that are held in {self._lora.base_dtype} are not merged between steps: stream the adapters "
                "alone, or merge a checkpoint by `megacore convert --to hf --base`"
            )
        if contents.adapters is None:
            wanted = [[each] for each in named(layout.schema, contents.raw, contents.naming)]
        elif not merged:
            whole = None if contents.naming is None else contents.adapters.base
            found = targets(layout.schema, contents.adapters.lora.targets)
            chosen = [each for each in found if each.param.name not in contents.layout.schema.by_name]
            for problem in peft_problems(contents.raw["model_type"], chosen, whole):
                raise StoreError(f"adapters cannot be streamed alone: {problem}: stream all weights, by merged=True")
            wanted = [[each] for each in hugging_face(contents.layout.schema)]
        else:
            adapters = contents.layout.schema
            names = named(layout.schema, contents.raw, contents.naming)
            own = adapters.by_name.keys() - in_full(adapters)
            weights = (each for each in names if each.param not in own)
            wanted = [[each, *factors(adapters, each)] for each in weights]
        # Of ranks that hold the same, plan() takes the last.
        sources = native(layout, reversed(layout.mesh.ranks(dp=(0,), cp=(0,))))
        planned = plan(layout.schema, sources, itertools.chain.from_iterable(wanted))
        made: list[list[_Filled]] = [[*itertools.islice(planned, len(each))] for each in wanted]
        # Tensors of one parameter follow each other, so that it is put together once.
        self._made = dict[str, list[list[_Filled]]]()
        for each in made:
            self._made.setdefault(whole_name(layout.schema, each[0][0]), []).append(each)

    def metadata(self) -> list[TensorInfo]:
        """Return what is to come, in this order; no message is sent for it."""
        return [
            TensorInfo(stored.name, self._dtype(stored), stored.shape)
            for made in self._made.values()
            for (stored, _), *_ in made
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for made in self._made.values():
            names = dict.fromkeys(copy.source.name for each in made for _, copies in each for copy in copies)
            held = {name: self._optimizer.weight(name) for name in names if name in self._parameters}
            for (stored, copies), *added in made:
                yield stored.name, self._with(self._gathered(stored, copies, held), added, held)

    def _dtype(self, stored: Stored) -> torch.dtype:
        is_buffer = self._parameters.layout.schema[stored.param].buffer
        return torch.float32 if is_buffer else self._parameters.dtype

    def _gathered(self, stored: Stored, copies: Sequence[Copy], held: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor, put together from what ranks hold of it, where this rank gets it."""
        mesh, dtype = self._parameters.mesh, self._dtype(stored)
        made = torch.empty(stored.shape, dtype=dtype, device=mesh.device if self._gets else "meta")
        for copy in copies:
            source = copy.source.where
            assert isinstance(source, int)
            sends = self._everywhere or source != 0
            if not sends and not self._gets:
                continue
            # In the order in which they lie in the target, so that rows are sent from and to where they are.
            order = sorted(range(len(copy.target_view.shape)), key=lambda i: -copy.target_view.strides[i])
            here = view(made, copy.target_view).permute(order)
            if source == mesh.rank:
                part = view(held[copy.source.name], copy.source_view).permute(order)
                part = part.contiguous() if sends else part
            elif self._gets and here.is_contiguous():
                part = here
            else:
                part = torch.empty(here.shape, dtype=dtype, device=mesh.device)
            if sends:
                broadcast_(part, mesh.world, source)
            if self._gets and part is not here:
                here.copy_(part)
        return made

    def _with(self, weight: Tensor, added: Sequence[_Filled], held: Mapping[str, Tensor]) -> Tensor:
        """Return a weight with its adapters, if it has some, added to it."""
        pair = [self._gathered(stored, copies, held) for stored, copies in added]
        if not pair or self._lora is None or not self._gets:
            return weight
        dtype = NAMES[weight.dtype]
        wide = getattr(torch, FLOATS[computed_in(dtype)])
        both = [each.to(wide).cpu().numpy() for each in pair]
        bits = weight.cpu().view(getattr(torch, f"int{8 * weight.itemsize}")).numpy().view(f"u{weight.itemsize}")
        merged = merge(bits, dtype, both, self._lora, dtype)
        signed = torch.from_numpy(merged.view(f"i{merged.itemsize}"))
        return signed.view(weight.dtype).to(weight.device)
