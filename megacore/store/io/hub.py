"""Names of the Hugging Face hub in the place of paths: what is named is fetched into the hub's own cache.

huggingface_hub does it, with its cache, its token and its progress bars; it is imported where a name is met.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from megacore.store.io.errors import StoreError

NEVER = ("*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Patterns of files that are never fetched: code, and pickles, which are code."""

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"((?:{_PART}/)?{_PART})(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A repository of the hub and one of its revisions, a branch, a tag or a commit: ``OWNER/NAME@REVISION``."""

    repository: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @classmethod
    def parse(cls, text: str, kind: Literal["model", "dataset"] = "model") -> HubName | None:
        """Return the name that a text spells, whatever lies on the disk; None if it spells none."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(found[1], found[2], kind)

    @classmethod
    def of(cls, path: str | Path, kind: Literal["model", "dataset"] = "model") -> HubName | None:
        """Return the name that is given in the place of a path; None where a path is meant. A path is meant where
        something of this name is there, and where no revision is named and the folder around it is there: then it is
        one that was mistyped, and nobody else is asked about it."""
        text = str(path)
        name = cls.parse(text, kind)
        if name is None or os.path.lexists(text):
            return None
        return None if name.revision is None and os.path.lexists(os.path.dirname(text) or ".") else name

    @property
    def is_pinned(self) -> bool:
        """Whether it is the same files for ever: its revision is the hash of a commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, snapshot: Path) -> HubName:
        """Return the name of what :func:`fetch` has fetched."""
        return replace(self, revision=snapshot.name)


def fetch(name: HubName, patterns: Sequence[str], shown: bool = False, cached: bool = False) -> Path:
    """Bring the files of a repository that match patterns into the hub's cache, those that are not there yet -> the
    folder that has them, which bears the hash of the commit.

    Where the hub cannot be asked, what the cache has of the revision will do, if it is all of these files. ``shown``:
    whether progress is shown, if somebody watches; ``cached``: whether only the cache is looked at. Raises StoreError:
    there is no such repository or revision, it is not for this user, or it cannot be fetched.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def take(cached: bool) -> str:
        return snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(NEVER),
            local_files_only=cached,
        )

    with _in_words(name), _without_bars(shown), _interruptible(name):
        if name.is_pinned and not cached:
            try:
                take(cached=True)
            except LocalEntryNotFoundError:
                # Where nobody answers, this says so at once; the files of a commit would be asked for half a minute.
                HfApi().repo_info(name.repository, repo_type=name.kind, revision=name.revision)
        found = take(cached)
    return Path(found)


def push_problems(text: str) -> Iterator[str]:
    """Yield why nothing can be uploaded to a repository, as far as this machine alone tells."""
    from huggingface_hub import constants, get_token

    name = HubName.parse(text)
    if name is None or "/" not in name.repository or name.revision is not None:
        yield f"is no OWNER/NAME of the hub ({constants.ENDPOINT})"
    if constants.HF_HUB_OFFLINE:
        yield "cannot be uploaded to while HF_HUB_OFFLINE is set: unset it"
    if get_token() is None:
        yield "needs a token that may write there, and none is set here: log in by `hf auth login`, or set HF_TOKEN"


def push(repository: str, folder: Path) -> str:
    """Upload a folder to a repository of the hub, which is made, private, where there is none -> the address of the
    commit. Files that are there already are not sent again. Raises StoreError: it is not uploaded; it stays as it is,
    and the message has the command that uploads it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with _without_bars(shown=True):
            HfApi().create_repo(repository, private=True, exist_ok=True)
            made = HfApi().upload_folder(
                repo_id=repository, folder_path=folder, commit_message="Upload what Megacore has trained"
            )
    except Exception as error:  # as in _in_words
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        why = ": the token that is set here may not write there" if status in (401, 403) else ""
        raise StoreError(
            f"{folder} is whole, and was not uploaded to {repository} ({_reason(error)}{why}): "
            f"`hf upload {repository} {folder} --private` does it"
        ) from error
    return str(made.commit_url)


def license_of(name: HubName) -> str | None:
    """Return the licence that a repository names; None where it names none, or cannot be asked."""
    from huggingface_hub import HfApi

    try:
        card = HfApi().model_info(name.repository, revision=name.revision).card_data
    except Exception:  # whatever is wrong is said by what needs the hub
        return None
    known = None if card is None else card.get("license")
    return known if isinstance(known, str) and re.fullmatch(r"[\w.-]{1,60}", known, re.ASCII) else None


def files_of(name: HubName) -> Mapping[str, int]:
    """Return {file: bytes} of a repository, which the hub is asked for. Raises StoreError: as :func:`fetch`."""
    from huggingface_hub import HfApi

    with _in_words(name):
        about = HfApi().model_info if name.kind == "model" else HfApi().dataset_info
        found = about(name.repository, revision=name.revision, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in found.siblings or ()}


@contextmanager
def _in_words(name: HubName) -> Iterator[None]:
    """Make a StoreError of whatever the library raises in this block."""
    try:
        yield
    except Exception as error:  # those of the network are of another package, which has changed
        raise StoreError(_problem(name, error)) from error


def _problem(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    is_model = name.kind == "model"
    here, there = ("a folder", "a model") if is_model else ("a file", "a data set")
    page = f"{constants.ENDPOINT}/{'' if is_model else 'datasets/'}{name.repository}"
    fetching = f"`megacore inspect {name}` fetches it" if is_model else "the start of a run fetches it"
    log_in = "by `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: ask for access at {page}, and log in {log_in}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status == 401 and "credentials" in str(error).lower():
        return f"the hub ({constants.ENDPOINT}) refuses the token that is set here: log in anew {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision}: take a branch, tag or commit of {page}/commits/main"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return (
            f"there is neither {here} {name} here nor, for this user, {there} {name.repository} on the hub ({page}): "
            f"check the name; if it is private, log in {log_in}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"{name} is neither {here} nor a name of the hub: {_first_line(error)}"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"{name} cannot be kept in the hub's cache, {constants.HF_HUB_CACHE}: {error.strerror}"
    return (
        f"{name} is not, or not all, in the hub's cache ({constants.HF_HUB_CACHE}), and was not fetched "
        f"({_reason(error)}): {fetching}, with what is there already, where the hub answers"
    )


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(cause, errors.HfHubHTTPError):
        return f"the hub answers {cause.response.status_code}"
    return "nobody was asked" if cause is None else _first_line(cause)


def _first_line(error: BaseException) -> str:
    """Return the beginning of a message, without what an address may have of signatures."""
    return re.sub(r"\?\S*", "", str(error).strip().partition("\n")[0]) or type(error).__name__


@contextmanager
def _without_bars(shown: bool) -> Iterator[None]:
    """Let the library show nothing in this block, unless it is to."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if (shown and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    with warnings.catch_warnings():  # where the environment asks for bars whatever is done
        warnings.simplefilter("ignore")
        disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _interruptible(name: HubName) -> Iterator[None]:
    """Let a signal end this process at once while files are fetched, where it would only be noted. As an exception it
    would wait for threads that fetch files of gigabytes. What has come is kept."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"interrupted while {name} was fetched: what has come stays in the hub's cache\n".encode())
        os._exit(128 + number)

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    plain = (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler, None)
    here = threading.current_thread() is threading.main_thread()
    noted = [number for number in ends if here and signal.getsignal(number) not in plain]
    before = {number: signal.signal(number, end) for number in noted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
