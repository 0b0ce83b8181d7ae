"""Commands in processes of their own, as a user starts them, but forked from one that has imported everything."""

import contextlib
import importlib
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from pool import forkserver
from tqdm import tqdm

MEMORY, SECONDS = 4 << 30, 60
"""What SECURITY.md promises, beside what an idle process holds."""
COMPUTING = 1
"""Seconds of `megacore.data.guard` here, where nobody's tokenizer is slow: what explodes takes them all."""
SECRET, VARIABLE = "canary-of-the-environment-5f1d", "MEGACORE_CANARY"
MODULES = ("convert", "reshard", "inspect", "verify", "generate", "evaluate", "tokenize", "merge_tokens", "plan")


@dataclass(frozen=True)
class Done:
    """What became of a command: its exit status (below 0: the signal that ended it), and what it said."""

    status: int
    out: bytes
    error: bytes
    seconds: float


class Runner:
    """Runs commands: the name of one of `megacore`, or `pretrain`, and its arguments."""

    def __init__(self) -> None:
        context = forkserver()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, command: Sequence[str], folder: Path) -> Done:
        """Run a command in a folder, with the canary in its environment."""
        self._connection.send((tuple(command), str(folder)))
        done = self._connection.recv()
        assert isinstance(done, Done)
        return done

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    made = Runner()
    try:
        yield made
    finally:
        made.close()


# -- in the process that is forked from


def _serve(connection: Connection) -> None:
    from megacore.data.tokenizer import import_transformers
    from megacore.parallel import limits

    import_transformers()
    for name in MODULES:
        importlib.import_module(f"megacore.tools.{name}")
    for name in (
        "megacore.training.main",
        "megacore.inference.perplexity",
        "megacore.inference.model_loader",
        "megacore.inference.verification",
    ):
        importlib.import_module(name)
    limits.SECONDS = COMPUTING
    tqdm.set_lock(threading.RLock())  # not one of semaphores, which would count as leaked
    with contextlib.suppress(EOFError):
        while True:
            command, folder = connection.recv()
            connection.send(_run(command, Path(folder)))


def _run(command: Sequence[str], folder: Path) -> Done:
    said = [folder.parent / name for name in ("stdout", "stderr")]
    started = time.monotonic()
    process = os.fork()
    if not process:
        _child(command, folder, said)
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended and time.monotonic() - started < SECONDS:
        time.sleep(0.003)
        ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        os.killpg(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
    out, error = (each.read_bytes() for each in said)
    return Done(os.waitstatus_to_exitcode(status), out, error, time.monotonic() - started)


def _child(command: Sequence[str], folder: Path, said: Sequence[Path]) -> None:
    status: object = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ[VARIABLE] = SECRET
        for number, file in enumerate([Path(os.devnull), *said]):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, errors="backslashreplace")  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert held is not None
        resource.setrlimit(resource.RLIMIT_DATA, ((int(held[1]) << 10) + MEMORY,) * 2)
        name, *arguments = command
        module = "megacore.training.main" if name == "pretrain" else f"megacore.tools.{name}"
        status = importlib.import_module(module).main(arguments)
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
