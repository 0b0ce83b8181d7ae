"""Loads tensors of folders into the shards of the ranks, and verifies them while they are read.

A checkpoint's index holds the fingerprint of every piece as it was written. Each rank takes those of the boxes that it
reads, from the bits that it goes on with: no byte is read twice. Fingerprints add up over boxes, so that together the
ranks know whether they hold what was written, whatever the layout was then and is now. A Hugging Face folder has no
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megacore.control import Control
from megacore.resume import Start
from megacore.store import audit
from megacore.store.accounting import summary
from megacore.store.adapted import Adapted, Whole, source_of
from megacore.store.checkpoint import Checkpoint, listed
from megacore.store.dtypes import FLOATS
from megacore.store.folder import Folder
from megacore.store.hugging_face import HuggingFace
from megacore.store.index import MASTER, MOMENTS, on_disk
from megacore.store.stream import assemble
from megacore.store.strict_json import StoreError
from parallel.fingerprint import Logical, ReplicasDiffer, add_up, spell
from parallel.parameters import Parameters
from parallel.transfer import native, plan, whole_name

if TYPE_CHECKING:  # what computes with a model needs none
    from megacore.optimizer import Optimizer

_Found = dict[str, dict[str, int]]
"""{tensor: {label: fingerprint}}"""

_JOBS = 2


@dataclass(frozen=True)
class _Read:
    """What this rank has read of one state."""

    source: Whole
    state: str
    found: _Found


class Loader:
    """Reads the tensors that this rank holds; all ranks make the same calls in one order.

    Args:
        parameters: Of this rank: their layout says what it holds.
        control: How the ranks talk.
    """

    def __init__(self, parameters: Parameters, control: Control) -> None:
        self._parameters, self._control = parameters, control
        self._reads: list[_Read] = []

    def tensors(self, source: Whole, state: str, names: Set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor of the shape that this rank holds) of each parameter, or of those that are named, in the
        source's dtype; padding is zero. They count as sound only after :meth:`verify`."""
        layout, found = self._parameters.layout, _Found()
        self._reads.append(_Read(source, state, found))
        wanted = (s for s in native(layout, [self._parameters.mesh.rank]) if names is None or s.name in names)
        if targets := list(wanted):  # else the source need not have the state
            held_by = source_of(source, state)
            for target, copies in plan(layout.schema, held_by.stored, targets):
                held = {held_by.dtype(copy.source) for copy in copies}
                # Pieces of several dtypes: the widest holds all of their numbers (fp16 and bf16 are both within fp32).
                dtype = held.pop() if len(held) == 1 else "F64" if "F64" in held else "F32"
                taken = None if held_by.fingerprints is None else found.setdefault(target.name, {})
                yield target.name, _tensor(dtype, assemble(target, copies, held_by.read, dtype, taken))

    def verify(self) -> None:
        """Compare what all ranks have read with what was written.

        Raises:
            audit.DamageError: a checkpoint is damaged; it names the files and the tensors.
            StoreError: ranks have read something else than the disk holds now.
        """
        gathered = self._control.gather([read.found for read in self._reads])
        damaged, problems = None, list[str]()
        for read, *of_ranks in zip(self._reads, *gathered, strict=True) if gathered else ():  # on rank 0
            if (wrong := self._wrong(read, of_ranks)) and damaged is None:
                damaged, found = _located(read, wrong)
                problems += found
        damaged, problems = self._control.tell([damaged, problems])
        if damaged is not None:
            raise audit.DamageError(Path(damaged), problems)
        if problems:
            raise StoreError("\n".join(problems))

    def _wrong(self, read: _Read, of_ranks: Sequence[_Found]) -> set[Logical]:
        """The pieces of a state that the ranks do not hold as they were written."""
        written = source_of(read.source, read.state).fingerprints if any(of_ranks) else None
        if written is None:
            return set()
        layout = on_disk(self._parameters.layout)
        # Data parallel ranks hold the same boxes: one of them is added up, the others must equal it.
        first, differ = dict[int, _Found](), set[Logical]()
        for rank, found in enumerate(of_ranks):
            place = replace(self._parameters.layout.mesh.place(rank), dp=0, cp=0)
            same = first.setdefault(layout.mesh.rank(place), found)
            differ |= {(name, label) for name, of in found.items() for label in of if of[label] != same[name][label]}
        boxes = ((s, found[s.name]) for rank, found in first.items() for s in native(layout, [rank]) if s.name in found)
        try:
            made = add_up(layout.schema, boxes)
        except ReplicasDiffer as error:
            return {*differ, *error.pieces}
        return differ | {piece for piece, value in made.items() if value != written.get(piece, value)}


def _located(read: _Read, wrong: set[Logical]) -> tuple[str | None, list[str]]:
    """(the damaged checkpoint, which of its files hold the pieces and how that shows); None if none is damaged now."""
    names = {name for name, _ in wrong}
    folders = (read.source.adapters, read.source.base) if isinstance(read.source, Adapted) else (read.source,)
    for folder in folders:
        if isinstance(folder, Checkpoint) and (damage := audit.check(folder, _JOBS, tensors={read.state: names})):
            return str(folder.path), listed(damage)
    pieces = ", ".join(summary(sorted(map(spell, wrong))))
    return None, [
        f"{read.source.path}: ranks have read other {read.state} than were written, and on the disk they now are what "
        f"they were ({pieces}): memory, a disk or a network on the way is at fault. Start again, or on other machines"
    ]


def _tensor(dtype: str, bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, FLOATS[dtype]))


# -- a run


def load(start: Start, parameters: Parameters, optimizer: Optimizer, seed: int, control: Control) -> None:
    """Fill this rank's parameters, and of a run that goes on the optimizer, one tensor at a time.

    Masters, where a checkpoint has them, are what the weights that are trained are rounded from, in whatever precision
    they are now. What no folder has is drawn.

    Raises:
        DamageError, StoreError: as of :meth:`Loader.verify`; on every rank.
    """
    loader = Loader(parameters, control)
    left = set(parameters)
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}

    def fill() -> None:
        for folder in (start.adapters, start.source):
            for state, names in ((MASTER, trained), ("weights", left)):
                if folder is not None:
                    for name, tensor in loader.tensors(folder, state, names & left & _names(folder, state)):
                        optimizer.load_weight(name, tensor)
                        left.discard(name)
        for name in sorted(left):
            optimizer.load_weight(name, parameters.drawn(name, seed))
        if start.trainer is not None:
            going_on = start.adapters or start.source
            assert going_on is not None  # it has said how far it is
            for state in MOMENTS:
                for name, tensor in loader.tensors(going_on, state, trained & _names(going_on, state)):
                    optimizer.load_from(state, name, tensor)
            optimizer.updates = start.progress.updates

    control.attempt(fill)
    loader.verify()


def _names(folder: Folder, state: str) -> Set[str]:
    """The tensors that have a state in a folder."""
    if isinstance(folder, HuggingFace):
        stored = folder.stored() if state == "weights" else ()
    else:
        stored = folder.stored(state) if state in folder.index.states else ()
    return {whole_name(folder.schema, each) for each in stored}
