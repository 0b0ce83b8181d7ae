"""Pickles of torch's own files, read as inert records: no class is imported, nothing is called, whatever they say.

A pickle is a program for a small machine that may import and call anything. The one here has no such power: what a
pickle names is a :class:`Name`, what it would call is written down as a :class:`Call`, and only known names are taken.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megacore.store.io.strict_json import StoreError, short

PERSISTENT = "persistent"
"""What a :class:`Call` of something that the pickle says lies elsewhere is of."""

_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ORDERED = "collections.OrderedDict"


@dataclass(frozen=True)
class Name:
    """Something of a module that a pickle names: ``torch.float32``."""

    name: str


@dataclass(eq=False)
class Call:
    """A call that a pickle asks for, and that is not made: of what, with which arguments, and the state that it would
    give to what comes of it."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes, where: object, known: Collection[str] | None) -> Any:
    """Return what a pickle describes: values, lists, tuples, dicts, :class:`Name` and :class:`Call`. ``where``: the
    file, in words; ``known``: the names that it may hold, None: any, where only what is beside them is asked for.
    Raises StoreError: it is none, holds another name, or asks for what no file of torch's own does."""
    try:
        return _read(data, where, known)
    except StoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise StoreError(f"{where} is no pickle that torch writes, or is damaged: {short(str(error))}") from error


def _read(data: bytes, where: object, known: Collection[str] | None) -> Any:
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()

    def since_mark() -> list[Any]:
        at = marks.pop()
        found = stack[at:]
        del stack[at:]
        return found

    def named(name: str) -> Name:
        if known is not None and name not in known:
            raise StoreError(
                f"{where} names {short(name)}, which is nothing that such a file needs: it is not read, and nothing of "
                "it has been run"
            )
        return Name(name)

    for code, value, _ in pickletools.genops(data):
        match code.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                (made,) = stack
                return made
            case "MARK":
                marks.append(len(stack))
            case name if name in _VALUES:
                stack.append(_VALUES[name])
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case name if name in _LITERALS:
                stack.append(value)
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[_number(value)])
            case "BINPUT" | "LONG_BINPUT":
                memo[_number(value)] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case name if name in _TUPLES:
                count = _TUPLES[name]
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND":
                item = stack.pop()
                _list(stack[-1]).append(item)
            case "APPENDS":
                items = since_mark()
                _list(stack[-1]).extend(items)
            case "SETITEM":
                key, item = stack.pop(-2), stack.pop()
                _dict(stack[-1])[_key(key)] = item
            case "SETITEMS":
                items = since_mark()
                _dict(stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
            case "GLOBAL":
                stack.append(named(str(value).replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                module, attribute = stack.pop(-2), stack.pop()
                if not isinstance(module, str) or not isinstance(attribute, str):
                    raise ValueError(f"it names {short(attribute)} of {short(module)}")
                stack.append(named(f"{module}.{attribute}"))
            case "REDUCE" | "NEWOBJ":
                of, arguments = stack.pop(-2), stack.pop()
                if not isinstance(of, Name) or not isinstance(arguments, tuple):
                    raise ValueError(f"it calls {short(of)}")
                stack.append({} if of.name == _ORDERED and not arguments else Call(of.name, arguments))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], Call):
                    raise ValueError(f"it gives a state to {short(stack[-1])}")
                stack[-1].state = state
            case "BINPERSID":
                stack.append(Call(PERSISTENT, (stack.pop(),)))
            case other:
                raise ValueError(f"it has the instruction {other}")
    raise ValueError("it does not end")


def _number(value: object) -> int:
    assert isinstance(value, int)  # as pickletools has it of these instructions
    return value


def _key(value: Any) -> Any:
    # Tuples of tuples that are few in the file may be more than could ever be hashed.
    if isinstance(value, tuple):
        raise ValueError(f"it has the key {short(value)}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"it appends to {short(value)}")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it sets items of {short(value)}")
    return value
