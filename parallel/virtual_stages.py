"""The stages of a pipeline that have the virtual stages of a model, and the chunks that these are there. No torch."""

from __future__ import annotations

from typing import TypeVar

from megacore.parallel.enum_errors import V_SHAPED, Placement

T = TypeVar("T")


def placement_of(schedule: str) -> Placement:
    """Return how a schedule places virtual stages."""
    return "v" if schedule in V_SHAPED else "loop"


def virtual_stage(stage: int, chunk: int, stages: int, placement: Placement) -> int:
    """Return the virtual stage that is a chunk of a stage: data visits 0, 1, 2, ... on its way forward.

    In a loop chunk c of stage s is c * stages + s. In a V the odd chunks run back: the last stage hands from chunk 0 to
    chunk 1 by itself, and the first stage has the end of the model beside its beginning.
    """
    return chunk * stages + (stages - 1 - stage if placement == "v" and chunk % 2 else stage)


def stage_of(virtual: int, stages: int, placement: Placement) -> int:
    """Return the stage that has a virtual stage, which is chunk ``virtual // stages`` there."""
    chunk, at = divmod(virtual, stages)
    return stages - 1 - at if placement == "v" and chunk % 2 else at


def of_stage(value: T | tuple[T, ...], stage: int) -> T:
    """Return what a stage has of a value that all stages share, or of those of each."""
    return value[stage] if isinstance(value, tuple) else value
