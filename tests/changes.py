"""Changes of sound folders into what is to be refused: files cut, replaced or linked away, other JSON trees.

The tables of bad folders (`bad_folders`) and of hostile ones (`hostile/cases`) are made of them. Names are paths within
the folder that a change is given.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def write(name: str, content: bytes | str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return change


def raw(name: str, how: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(how((folder / name).read_bytes()))

    return change


def swap(name: str, old: str, new: str) -> Change:
    """Other text in the place of some that is there."""

    def how(content: bytes) -> bytes:
        assert old.encode() in content, old
        return content.replace(old.encode(), new.encode(), 1)

    return raw(name, how)


def edit(name: str, how: Callable[[Any], object]) -> Change:
    """Change a JSON file in place."""

    def change(folder: Path) -> None:
        tree = json.loads((folder / name).read_text())
        how(tree)
        (folder / name).write_text(json.dumps(tree))

    return change


def edit_config(folder: Path, **fields: Any) -> None:
    """Let the ``config.json`` of a folder say these, too."""
    edit("config.json", lambda tree: tree.update(fields))(folder)


def inside(how: Callable[[Any, Any], object], *keys: str | int) -> Callable[[Any], None]:
    """Change what is at the end of a way of keys: ``how`` is given its container and the last key."""

    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        how(tree, keys[-1])

    return change


def put(name: str, value: object, *keys: str | int) -> Change:
    return edit(name, inside(lambda tree, key: tree.__setitem__(key, value), *keys))


def drop(name: str, *keys: str | int) -> Change:
    return edit(name, inside(lambda tree, key: tree.__delitem__(key), *keys))


def header(name: str, how: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of a safetensors file; its data stays."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        tree = json.loads(content[8 : 8 + length])
        how(tree)
        return headed(json.dumps(tree).encode()) + content[8 + length :]

    return raw(name, changed)


def headed(made: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(made) if length is None else length) + made


def tensors(name: str, how: Callable[[Any], object]) -> Change:
    """Change the tensors of a safetensors file."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        held = load_file(folder / name)
        how(held)
        save_file({each: t.contiguous().clone() for each, t in held.items()}, folder / name, {"format": "pt"})

    return change


def gone(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Something else in the place of a file, which may not be there."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        instead(name, lambda path: path.symlink_to(target))(folder)

    return change


def led_out(name: str) -> Change:
    """A file, or a folder, is moved out of its folder, and a link there leads to it."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        if not (folder / name).exists():
            (folder / name).touch()
        (folder / name).rename(folder / "secret")
        (folder / name).symlink_to(folder / "secret")

    return change


def exchange(one: str, two: str) -> Change:
    def change(folder: Path) -> None:
        (folder / one).rename(folder / "middle")
        (folder / two).rename(folder / one)
        (folder / "middle").rename(folder / two)

    return change


def huge(file: Path) -> None:
    """A file of a TiB, all of it a hole."""
    file.touch()
    os.truncate(file, 1 << 40)
