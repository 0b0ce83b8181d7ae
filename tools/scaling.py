"""What becomes of a step on other ranks: of two runs (`megacore diagnose --against`), or by the plan (`megacore plan
--world 16,128`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacore.config import Config
from megacore.models.config import parameters_in_words
from megacore.planning.run_plan import Plan
from megacore.recipe import ConfigError
from megacore.tools.tables import table


class RunScale(NamedTuple):
    """The ranks of a run, and the tokens and the seconds of a step of all of them."""

    ranks: int
    tokens: int
    seconds: float


def told(one: RunScale, other: RunScale) -> str:
    """Return how a run differs in scale from another one, and what became of the speed of a rank."""
    speed = one.tokens / other.tokens * other.seconds / one.seconds * other.ranks / one.ranks
    numbers = ((one.ranks, other.ranks, "ranks"), (one.tokens, other.tokens, "tokens a step"))
    of = "; ".join(f"{here:,} {what}" + f", not {there:,}" * (here != there) for here, there, what in numbers)
    if one.ranks == other.ranks:
        kind = "The same number of ranks"
    elif one.tokens == other.tokens:
        kind = "Strong scaling, the same batch on other ranks"
    elif one.tokens * other.ranks == other.tokens * one.ranks:
        kind = "Weak scaling, the same batch of each rank"
    else:
        kind = "Neither strong nor weak scaling"
    return f"{kind} ({of}): a rank does {speed:.1%} of the tokens per second"


def on_each(config: Config, worlds: Sequence[int], weak: bool) -> Iterator[Config]:
    """Yield a recipe for each number of ranks, with as much dp as they have; ``weak``: its batch grows with them, and
    is the recipe's own on the first number. Raises ConfigError: it would be no whole number."""
    own = config.batch.global_size
    for world in worlds:
        size, left = divmod(own * world, worlds[0]) if weak else (own, 0)
        if left:
            raise ConfigError(
                [
                    f"--weak: batch.global_size ({own}) on {worlds[0]} ranks is no whole number of them on {world}: "
                    f"choose a multiple of {worlds[0]}"
                ]
            )
        yield replace(config, mesh=replace(config.mesh, dp=None), batch=replace(config.batch, global_size=size))


def show(plans: Sequence[Plan], name: str) -> str:
    """Return a table of the plans of a recipe on several numbers of ranks, and how each differs in scale from the
    first."""
    s = plans[0].setting
    mesh = " x ".join(f"{dim}={s.layout.mesh[dim]}" for dim in ("pp", "cp", "ep", "tp") if s.layout.mesh[dim] > 1)
    lines = [f"{s.model.family} of {parameters_in_words(s.model, s.tuning)} on {name}" + f" as {mesh}" * bool(mesh)]
    scales = [RunScale(each.setting.layout.mesh.world, each.setting.global_tokens, each.time.total) for each in plans]
    lines += [told(each, scales[0]) for each in scales[1:]]
    head = ("of a step", *(f"{each.ranks:,} ranks" for each in scales), "what is other")
    return "\n".join([*lines, table(head, [*_rows(plans)])])


def _rows(plans: Sequence[Plan]) -> Iterator[tuple[str, ...]]:
    times = [each.time for each in plans]
    batch = _other(plans, "microbatches"), _other(plans, "tokens of a microbatch")
    yield "ms", *(f"{1e3 * time.total:,.1f}" for time in times), ""
    yield "MFU", *(f"{x.time.tflops_per_device / x.cluster.tflops:.1%}" for x in plans), ""
    reasons = {
        "products": batch,
        "recomputation": batch,
        "bubble": batch[:1],
        "messages of tp": (_groups(plans, "tp"), *batch),
        "messages of ep": (_groups(plans, "ep"), *batch),
        "messages of cp": (_groups(plans, "cp"), *batch),
        "messages of dp": (_groups(plans, "dp"), *batch[:1]),
        "optimizer": (_groups(plans, "dp"),),
    }
    for part in times[0].spent:
        seconds = [time.spent[part] for time in times]
        if any(seconds):
            shown = (f"{1e3 * each:,.1f} ({each / time.total:.0%})" for each, time in zip(seconds, times, strict=True))
            yield part, *shown, "; ".join(filter(None, reasons.get(part, ())))
    yield "GB at the peak", *(f"{each.fullest.peak / 1e9:,.2f}" for each in plans), ""


def _other(plans: Sequence[Plan], what: str) -> str:
    """Return a number of a rank where it is not the same in all plans."""
    found = [each.setting.microbatches if what == "microbatches" else each.setting.tokens for each in plans]
    return f"{what}: {', '.join(f'{each:,}' for each in found)}" if len({*found}) > 1 else ""


def _groups(plans: Sequence[Plan], axis: str) -> str:
    """Return the ranks of a group along an axis, and the nodes that it lies on, where these are not the same in all."""
    said = []
    for plan in plans:
        ranks, per_node = plan.setting.layout.mesh.along(0, axis), plan.cluster.device.per_node
        nodes = len({rank // per_node for rank in ranks})
        said.append(f"{len(ranks):,} on {nodes:,} node{'s' * (nodes > 1)}")
    return f"ranks of {axis}: {', '.join(said)}" if len({*said}) > 1 else ""
