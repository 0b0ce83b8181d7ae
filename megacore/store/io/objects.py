"""Object stores, through fsspec: a `Path` whose files are objects, ``s3://bucket/prefix/name``.

An object appears all at once or not at all, is never changed, and cannot be renamed. Credentials and endpoints are what
the backends of fsspec find in the environment; no URL may hold any.
"""

from __future__ import annotations

import errno
import io
import random
import re
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import Any, TypeVar

from megacore.store.io.errors import StoreError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Scheme:
    """A kind of store. ``package``: the package beside fsspec that knows it, and the extra of ours that brings it, if
    there must be one; ``credentials``: the places where that looks for credentials."""

    package: tuple[str, str] | None = None
    credentials: str = ""
    options: tuple[tuple[str, bool], ...] = (("use_listings_cache", False),)


SCHEMES = {
    "s3": Scheme(("s3fs", "s3"), "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the machine's role"),
    "gs": Scheme(("gcsfs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS, gcloud's login or the machine's role"),
    "file": Scheme(options=(("auto_mkdir", True),)),
    "memory": Scheme(),
}
"""{start of a URL: the kind of store}; files serve where a bucket is mounted, memory serves tests."""

PIECE = 16 << 20
"""Bytes that are asked for at once; the pieces of a range come beside each other."""
_HEAD = 1 << 20  # bytes of an object's beginning that are read ahead: the header of most tensor files
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each new try of what a store has refused, on top of those of its own package."""

_URL = re.compile(r"(\w+)://(/?[^/@?#:]+(?:/[^?#]*)?)")
_FINAL = (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENAMETOOLONG)
# Classes of errors, by their names: their packages are not imported here.
_NO_CREDENTIALS = re.compile(r"\w*(Credential|Profile|Auth|Token)\w*")


class NoObject(StoreError):
    """There is no such object."""


def place(text: str | Path) -> Path:
    """Return the path that a user's text names: of objects where it is a URL, else of files. Raises StoreError: it is a
    URL that names no store, or holds more than a name."""
    if "://" not in str(text):
        return Path(text)
    found = _URL.fullmatch(str(text))
    if found is None or found[1] not in SCHEMES or "::" in str(text):
        # Not what it says: it may hold a password.
        raise StoreError(
            f"{str(text).partition('://')[0]}://... is no URL of a store: name one as s3://bucket/prefix, gs:// or "
            "file:///folder, without keys, ports or options, which come from the environment"
        )
    return ObjectPath(text)


class ObjectPath(PosixPath):
    """The URL of an object, or of all those whose names begin with it: a folder. What touches the store raises a
    StoreError that names the URL, once it has been tried again for a while."""

    __slots__ = ()

    def __str__(self) -> str:
        plain = super().__str__()
        scheme, colon, rest = plain.partition(":/")
        return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}" if colon else plain

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.parts[0].removesuffix(":")]

    def store(self) -> tuple[Any, str]:
        """Return (the file system, this path in it)."""
        try:
            from fsspec.core import url_to_fs

            system, key = url_to_fs(str(self), **dict(self.scheme.options))
        except ImportError as error:
            package, extra = self.scheme.package or ("fsspec", "s3")
            raise StoreError(f"{self} needs the package {package}: pip install 'megacore[{extra}]'") from error
        return system, str(key)

    def ask(self, do: Callable[[Any, str], Made]) -> Made:
        """Do something with (file system, path in it); what may pass is tried again, longer and longer apart. Raises
        NoObject: there is none; StoreError: the store refuses, or still fails."""
        system, key = self.store()
        for wait in (*WAITS_S, None):
            try:
                return do(system, key)
            except StoreError:
                raise
            except FileNotFoundError as error:
                raise NoObject(f"{self}: there is no such object, or no such bucket") from error
            except Exception as error:  # each package has its own
                if wait is None or _is_final(error):
                    raise StoreError(f"{self}: {self._words(error)}") from error
                time.sleep(wait * random.uniform(0.5, 1))
        raise AssertionError

    def _words(self, error: Exception) -> str:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        if isinstance(error, PermissionError) or _NO_CREDENTIALS.fullmatch(type(error).__name__):
            return f"{said}: give credentials that may do so by {self.scheme.credentials or 'its permissions'}"
        return f"{said} (tried {len(WAITS_S) + 1} times)" if not _is_final(error) else said

    # -- what readers ask of a path

    def exists(self, **_: Any) -> bool:
        try:
            return bool(self.ask(lambda system, key: system.info(key)))
        except NoObject:
            return False

    is_file = exists

    def is_dir(self, **_: Any) -> bool:
        return bool(self.objects())

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder is there with its first object."""

    def iterdir(self) -> Generator[ObjectPath, None, None]:
        yield from (self / name for name in dict.fromkeys(name.partition("/")[0] for name in self.objects()))

    def glob(self, pattern: str, *_: Any, **__: Any) -> Generator[ObjectPath, None, None]:
        yield from (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def objects(self) -> dict[str, int]:
        """Return {name within this folder: bytes} of all objects, however deep."""
        try:
            found, key = self.ask(lambda system, key: (system.find(key, detail=True), key))
        except NoObject:
            return {}
        prefix = key.rstrip("/") + "/"
        named = ((name.removeprefix(prefix), info) for name, info in found.items() if name.startswith(prefix))
        return {name: info["size"] for name, info in sorted(named) if name and not name.endswith("/")}

    def unlink(self, missing_ok: bool = False) -> None:
        self.remove()

    # -- reading

    def open(self, *_: Any, **__: Any) -> io.BufferedReader:  # type: ignore[override]
        return io.BufferedReader(_Reader(self), _HEAD)

    def fill(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes of the object from ``start`` on."""
        ends = [(at, min(at + PIECE, len(memory))) for at in range(0, len(memory), PIECE)]

        def read(system: Any, key: str) -> None:
            first, last = ([start + end[n] for end in ends] for n in (0, 1))
            for (at, end), data in zip(
                ends, system.cat_ranges([key] * len(ends), first, last, on_error="raise"), strict=True
            ):
                if len(data) != end - at:
                    raise OSError(errno.EIO, f"bytes {start + at} to {start + end} were asked for, {len(data)} came")
                memory[at:end] = data

        if ends:
            self.ask(read)

    # -- writing

    def write(self, data: bytes) -> None:
        """Write the object, small enough for one message."""
        self.ask(lambda system, key: system.pipe_file(key, data))

    def stream(self, pieces: Callable[[], Iterable[Any]], size: int) -> None:
        """Write the object piece by piece: it appears with the last of them. Where it fails it is begun anew.
        ``pieces``: makes them, in order: bytes or what is like them."""
        # No store takes more than 10,000 parts, and some want them in whole MiB.
        part = max(PIECE, -(-size // (9000 << 20)) << 20)

        def put(system: Any, key: str) -> None:
            file = system.open(key, "wb", autocommit=False, block_size=part)
            try:
                with file:
                    for piece in pieces():
                        file.write(piece)
                file.commit()
            except BaseException:
                file.discard()
                raise

        self.ask(put)

    def abort_uploads(self) -> int:
        """Abort the uploads below this folder that a killed process has left behind -> how many there were. S3 keeps
        their parts until then, which no listing shows and somebody pays for; other stores drop them by themselves."""
        if self.scheme.package is None or self.scheme.package[0] != "s3fs":
            return 0

        def abort(system: Any, key: str) -> int:
            bucket, _, prefix = key.partition("/")
            found, start = list[Any](), dict[str, str]()
            while True:
                page = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **start)
                found += page.get("Uploads", ())
                if not page.get("IsTruncated"):
                    break
                start = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
            for each in found:
                with suppress(FileNotFoundError):  # of a try before this one
                    system.call_s3("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
            return len(found)

        return self.ask(abort)

    def remove(self) -> None:
        """Remove the object, or all of the folder; nothing if there is none."""
        with suppress(NoObject):
            self.ask(lambda system, key: system.rm(key, recursive=True))


class _Reader(io.RawIOBase):
    """An object as a file that is read."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._at = path, 0
        self._size: int = path.ask(lambda system, key: system.info(key))["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        count = max(0, min(len(memory), self._size - self._at))
        self._path.fill(memory[:count], self._at)
        self._at += count
        return count


def _is_final(error: Exception) -> bool:
    """Return whether another try would be refused likewise; of errors that nobody has heard of, one may pass."""
    if isinstance(error, OSError):
        return error.errno in _FINAL or isinstance(error, PermissionError | FileExistsError | IsADirectoryError)
    code = getattr(error, "code", None)  # of gcsfs
    if isinstance(code, int):
        return 400 <= code < 500 and code not in (408, 429)
    return isinstance(error, TypeError | ValueError | NotImplementedError) or bool(
        _NO_CREDENTIALS.fullmatch(type(error).__name__)
    )
