"""What a stage holds at most in each schedule, by hand: chunks of microbatches whose gradients are still to come."""

from megacore.parallel.enum_errors import V_SHAPED

ONE_CHUNK = ("1f1b", "zb-h1")
"""The schedules that take one chunk a stage."""


def takes(name: str, chunks: int) -> bool:
    """Return whether a schedule takes so many chunks."""
    return chunks == 1 if name in ONE_CHUNK else chunks == 2 if name in V_SHAPED else True


def in_flight(name: str, stages: int, chunks: int, microbatches: int, group: int | None = None) -> tuple[int, ...]:
    """Of each stage; the numbers are reached. Where the backward is split, stage s is s weight gradients behind."""
    total, groups = chunks * microbatches, max(1, min(microbatches // stages, -(-microbatches // (group or stages))))
    largest = -(-microbatches // groups)
    if name == "gpipe":
        return (total,) * stages
    if name in V_SHAPED:
        most = 2 * stages + (name == "dualpipe-v")
        return tuple(min(most, 2 * microbatches, microbatches + 1 + stage) for stage in range(stages))
    hops = 1 if chunks == 1 and name != "overlapped" else 2
    ahead = [(chunks - 1) * largest + hops * (stages - 1 - stage) + (name == "overlapped") for stage in range(stages)]
    if name.startswith("zb-"):
        ahead = [before + stage for stage, before in enumerate(ahead)]
    return tuple(min(before + 1, total) for before in ahead)
