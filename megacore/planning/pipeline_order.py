"""Files with an order for the actions of a pipeline's schedule: written by `megacore schedule --search`, and named by
recipes in `pipeline.order`. Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megacore.config import Config
from megacore.data.batches import filled_up
from megacore.parallel.enum_errors import Placement
from megacore.parallel.pipeline.schedules import SCHEDULES, Action, B, F, I, Schedule, ScheduleError, W, check_order
from megacore.recipe import ConfigError, named_json
from megacore.say import brief

_ACTION = re.compile(r"([FBIW])\(([0-9]{1,6}),([0-9]{1,6})\)")
_MADE = {"F": F, "B": B, "I": I, "W": W}
_KEYS: Mapping[str, type] = {"schedule": str, "stages": int, "chunks": int, "microbatches": int, "rows": list}


def order_text(schedule: str, order: Schedule) -> bytes:
    """Return the file of an order, each of whose rows has the actions of the schedule with this name."""
    chunks, microbatches = (1 + max(getattr(each, name) for each in order[0]) for name in ("chunk", "microbatch"))
    rows = [" ".join(map(repr, row)) for row in order]
    data = dict(zip(_KEYS, (schedule, len(order), chunks, microbatches, rows), strict=True))
    return json.dumps(data, indent=1).encode() + b"\n"


def order_of(config: Config, world: int) -> Schedule | None:
    """Return the order that a recipe names, on so many ranks; None where it names none.

    Raises:
        ConfigError: the file cannot be read, is for another schedule or for other sizes, or no pipeline can run it.
    """
    section = config.pipeline
    if section.order is None:
        return None
    mesh, micro = config.mesh.shape(world), config.batch.micro_size
    microbatches = filled_up(config.batch.global_size, micro, mesh.data) // (micro * mesh.data)
    sizes = {"stages": mesh.pp, "chunks": section.chunks, "microbatches": microbatches}
    data = named_json("pipeline.order", section.order)
    wrong = [*_wrong(data)] or [*_unlike(data, {"schedule": section.schedule, **sizes})]
    try:
        if not wrong:
            return _read(data, section.placement)
    except ScheduleError as error:
        wrong = [str(error)]
    raise ConfigError([f"pipeline.order ({section.order}): {each}" for each in wrong])


def _wrong(data: Any) -> Iterator[str]:
    """Yield what a file lacks of an order, and what it has beside one."""
    if not isinstance(data, dict):
        yield "it is no order of a schedule: make one with `megacore schedule --search`"
        return
    for key, kind in _KEYS.items():
        if type(data.get(key)) is not kind:
            yield f"{key} is {brief(data.get(key))}, and is to be {_WORDS[kind]}"
    if more := data.keys() - _KEYS.keys():
        yield f"nothing is known of {', '.join(map(brief, sorted(more)))}"


_WORDS = {str: "a text", int: "a whole number", list: "a list of texts"}


def _unlike(data: Mapping[str, Any], wanted: Mapping[str, object]) -> Iterator[str]:
    for key, value in wanted.items():
        if data[key] != value:
            yield (
                f"it is for {key} {brief(data[key])}, and the recipe has {value}: make one for it with `megacore "
                "schedule --search`, or set pipeline.order=null"
            )


def _read(data: Mapping[str, Any], placement: Placement) -> Schedule:
    rows = []
    if len(data["rows"]) != data["stages"]:
        raise ScheduleError(f"it has {len(data['rows'])} rows for {data['stages']} stages")
    for stage, row in enumerate(data["rows"]):
        actions = list[Action]()
        for at, word in enumerate(row.split() if isinstance(row, str) else [row]):
            match = _ACTION.fullmatch(word) if isinstance(word, str) else None
            if match is None:
                raise ScheduleError(
                    f"stage {stage}, action {at}: {brief(word)} is none of F, B, I, W (chunk,microbatch)"
                )
            actions.append(_MADE[match[1]](int(match[2]), int(match[3])))
        rows.append(tuple(actions))
    own = SCHEDULES[data["schedule"]](data["stages"], data["chunks"], data["microbatches"])
    order = tuple(rows)
    check_order(order, own, placement)
    return order
