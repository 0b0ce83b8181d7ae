"""A template: what it forks is its agent's child, and runs the module as a process of its own would."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacore.recovery.children import Children
from megacore.recovery.template import Forked, RankTemplate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts")

IMPORTED = """
import os, pathlib, time
while os.path.exists("{wait}"):
    time.sleep(0.005)
"""
MODULE = """
import imported, json, os, signal, socket, sys
if __name__ == "__main__":
    with socket.socket(fileno=int(os.environ.pop("END"))) as end:
        told = sys.argv[1:], os.getppid(), os.environ.get("OLD"), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        end.sendall(json.dumps(told).encode())
        if end.recv(1):
            sys.exit(7)
"""


@pytest.fixture
def template(tmp_path: Path) -> Iterator[RankTemplate]:
    """A template that imports until there is no file "wait"."""
    (tmp_path / "imported.py").write_text(IMPORTED.format(wait=tmp_path / "wait"))
    (tmp_path / "run.py").write_text(MODULE)
    (tmp_path / "wait").touch()
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    made = RankTemplate(("run",), {**os.environ, "PYTHONPATH": paths, "OLD": "1"})
    yield made
    made.end()


def fork(template: RankTemplate, folder: Path, *arguments: str) -> tuple[Forked | None, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with theirs:
        environment = {"END": str(theirs.fileno()), "PATH": os.environ["PATH"]}
        started = [str(folder), str(os.getpid()), "run", *arguments]
        return template.fork(started, environment, theirs.fileno(), {signal.SIGHUP}), ours


def ready(template: RankTemplate, folder: Path, *arguments: str) -> tuple[Forked, socket.socket]:
    """Fork as soon as all is imported."""
    (folder / "wait").unlink(missing_ok=True)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        process, end = fork(template, folder, *arguments)
        if process is not None:
            return process, end
        end.close()
        time.sleep(0.01)
    raise TimeoutError


def test_what_it_forks(template: RankTemplate, tmp_path: Path) -> None:
    assert fork(template, tmp_path)[0] is None  # it is importing
    first, end = ready(template, tmp_path, "recipe.yaml", "out=x")
    second, other = fork(template, tmp_path, "other.yaml")
    assert second is not None and second.pid != first.pid
    arguments, parent, old, blocked = json.loads(end.recv(4096))
    assert (arguments, parent, old, blocked) == (["recipe.yaml", "out=x"], os.getpid(), None, [signal.SIGHUP])
    assert json.loads(other.recv(4096))[0] == ["other.yaml"]
    assert first.poll() is None and first.returncode is None
    end.sendall(b"1")
    assert first.wait() == first.poll() == first.returncode == 7
    template.end()
    assert second.poll() is None  # it outlives the template
    second.kill()
    assert second.wait() == -signal.SIGKILL
    second.send_signal(signal.SIGTERM)  # nobody: its number may be another's
    assert fork(template, tmp_path)[0] is None


def test_the_ranks_of_every_launch_wait_for_it_and_come_from_it(template: RankTemplate, tmp_path: Path) -> None:
    threading.Timer(0.1, (tmp_path / "wait").unlink).start()
    for _ in range(2):
        children = Children(tmp_path, "run", [], {}, template=template)
        children.start(1, 0, {})
        assert isinstance(children.living[1].process, Forked)
        children.kill()


def test_a_template_that_is_gone_makes_nothing(template: RankTemplate, tmp_path: Path) -> None:
    process, end = ready(template, tmp_path)
    process.kill()
    process.wait()
    end.close()
    os.kill(template._process.pid, signal.SIGKILL)
    template._process.wait()
    assert fork(template, tmp_path)[0] is None
