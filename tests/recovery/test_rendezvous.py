"""Two launchers that meet: nodes that die, come, leave and stand still, and a state that only they may write."""

import os
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from toy import notes

from megacore import exits, incidents
from megacore.launcher.node import Node
from megacore.recipe import ConfigError
from megacore.recovery.rendezvous import ForgedError, OneNode, RunEndedError, SeveralNodes, SignedBackend, secret_of

HERE = Path(__file__).parent
LONG = ["9999", "0.02"]


class Launchers:
    """The launchers of a run on this machine.

    Args:
        folder: The folder of the run.
        nodes: The number of them, as NNODES says it.
        arguments: The arguments of the toy.
    """

    def __init__(self, folder: Path, nodes: str, arguments: list[str]) -> None:
        self.folder, self.arguments = folder, arguments
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        self.environment = {**os.environ, "PYTHONPATH": path, "NNODES": nodes, "MASTER_PORT": str(port)}
        self.all = list[subprocess.Popen[bytes]]()

    def start(self, index: int, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "toy", str(self.folder), "1", *self.arguments]
        self.all.append(subprocess.Popen(command, env={**self.environment, "NODE_RANK": str(index), **variables}))
        return self.all[-1]

    def until(self, line: str, seconds: float = 40) -> None:
        """Wait until a line stands in the notes of the run that was not there when the last one was found."""
        self.waits(lambda: any(each.startswith(line) for each in notes(self.folder)), seconds)

    def waits(self, condition: Callable[[], bool], seconds: float = 40) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, notes(self.folder)[-3:]
            time.sleep(0.02)

    @property
    def step(self) -> int:
        return max((int(each.split()[1]) for each in notes(self.folder) if each.startswith("step")), default=0)

    def steps_on(self) -> None:
        """Wait for five more steps."""
        now = self.step
        self.waits(lambda: self.step >= now + 5)

    @property
    def starts(self) -> list[str]:
        return [each.split()[1] for each in notes(self.folder) if each.startswith("start")]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Callable[..., Launchers]]:
    made = list[Launchers]()

    def make(nodes: str, arguments: list[str]) -> Launchers:
        made.append(Launchers(tmp_path, nodes, arguments))
        return made[0]

    yield make
    for each in made[0].all:
        each.kill()
        each.wait()


@pytest.mark.in_turn(12, 8)
def test_a_rank_and_nodes_are_killed_and_started_again(launchers: Callable[..., Launchers], tmp_path: Path) -> None:
    """A rank of the second node, that node, then the one that the others meet at; launchers that stand still meanwhile
    lose nothing."""
    run = launchers("2", [*LONG, "5:1:kill"])
    first, second = run.start(0), run.start(1)
    run.waits(lambda: len(run.starts) == 2)
    run.steps_on()
    assert [(each.kind, each.rank, each.node) for each in incidents.read(tmp_path)] == [("killed", 1, 1)]
    second.send_signal(signal.SIGSTOP)
    run.steps_on()
    second.kill()
    second.wait()
    second = run.start(1)
    run.waits(lambda: len(run.starts) == 3)
    run.steps_on()
    first.kill()
    first.wait()
    first = run.start(0)
    run.waits(lambda: len(run.starts) == 4)
    run.steps_on()
    second.send_signal(signal.SIGTERM)
    assert [first.wait(40), second.wait(40)] == [143, 143]
    assert run.starts == ["world=2"] * 4


@pytest.mark.in_turn(12, 6)
def test_nodes_come_die_and_leave(launchers: Callable[..., Launchers], tmp_path: Path) -> None:
    run = launchers("1:2", LONG)
    first = run.start(0)
    run.until("start world=1")
    run.steps_on()
    second = run.start(1)
    run.until("start world=2")
    run.steps_on()
    second.send_signal(signal.SIGTERM)
    assert second.wait(40) == 143
    run.waits(lambda: len(run.starts) == 3)
    run.steps_on()
    second = run.start(1)
    run.waits(lambda: len(run.starts) == 4)
    run.steps_on()
    second.kill()
    run.waits(lambda: len(run.starts) == 5)
    run.steps_on()
    first.send_signal(signal.SIGTERM)
    assert first.wait(40) == 143
    assert run.starts == ["world=1", "world=2"] * 2 + ["world=1"]
    steps = [int(each.split()[1]) for each in notes(tmp_path) if each.startswith("step")]
    assert steps == sorted(set(steps)), "a pause loses no step"
    kinds = [each.kind for each in incidents.read(tmp_path)]
    assert kinds == ["node_joins", "node_leaves", "node_joins", "lost_contact"]


@pytest.mark.in_turn(4, 3)
def test_nodes_with_another_secret_are_told_so(launchers: Callable[..., Launchers], tmp_path: Path) -> None:
    run = launchers("2", LONG)
    first = run.start(0, MEGACORE_SECRET="ours")
    time.sleep(1)
    second = run.start(1, MEGACORE_SECRET="theirs")
    assert exits.FAILED in (second.wait(40), first.poll())
    assert not run.starts


# -- the state


def test_a_forged_state_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = OneNode().next_rendezvous().store
    ours = SignedBackend(store, "round", b"secret")
    assert ours.get_state() is None
    state, token, done = ours.set_state(b"first") or (b"", b"", False)
    assert (state, done) == (b"first", True) and ours.get_state() == (b"first", token)
    assert (ours.set_state(b"second") or ())[::2] == (b"first", False)  # without its token
    assert (ours.set_state(b"second", token) or ())[::2] == (b"second", True)
    assert (ours.set_state(b"third", token) or ())[::2] == (b"second", False)
    for key, name in (b"other", "round"), (b"secret", "another round"):
        there = SignedBackend(store, name, key)
        there._key = ours._key
        with pytest.raises(ForgedError, match="not signed with the secret"):
            there.get_state()
    bomb = f"cos\nmkdir\n(V{tmp_path / 'boom'}\ntR.".encode()  # a pickle that makes a folder where it is read
    for forged in (b64encode(b"x" * 32 + bomb).decode(), "no base64", ""):
        store.set(ours._key, forged)
        with pytest.raises(ForgedError):
            ours.get_state()
        with pytest.raises(ForgedError):
            ours.set_state(b"fourth", token)
    assert not (tmp_path / "boom").exists()


def test_a_store_that_does_not_answer_is_told_in_the_words_of_its_connection(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = mock.Mock(side_effect=RuntimeError("reset by peer"))
    monkeypatch.setattr(SeveralNodes, "_client", lost)
    meeting = SeveralNodes(Node(1, 2, 1, ("node", 1)), b"secret", 0, lambda: None)
    backend = SignedBackend(mock.Mock(get=lost), "round", b"secret")
    monkeypatch.setattr(meeting, "_join", lambda until: backend.get_state())
    with pytest.raises(RunEndedError):
        meeting.next_rendezvous()
    meeting.shutdown()
    assert "no answer of the rendezvous at node:1 (reset by peer): it is tried again" in capsys.readouterr().err


def test_a_store_of_one_node_listens_on_loopback_alone() -> None:
    meeting = OneNode()
    port = f"{int(meeting.place.split(':')[-1].split('/')[0]):04X}"
    listening = [line.split()[1] for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines() if line.split()[3] == "0A"]  # fmt: skip  # noqa: E501
    assert [each for each in listening if each.endswith(f":{port}")] == [f"0100007F:{port}"]
    first = meeting.place
    meeting.next_rendezvous()
    assert meeting.place != first


def test_the_secret_of_a_run_is_made_once_and_nobody_else_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = secret_of(tmp_path / "run")
    path = tmp_path / "run" / "rendezvous.secret"
    assert len(made) == 64 and secret_of(tmp_path / "run") == made and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="only this user may read"):
        secret_of(tmp_path / "run")
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError):
        secret_of(tmp_path / "run")
    path.unlink()
    (tmp_path / "mine").write_text("mine\n")
    (tmp_path / "mine").chmod(0o400)
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError):
        secret_of(tmp_path / "run")
    monkeypatch.setenv("MEGACORE_SECRET_FILE", str(path))
    assert secret_of(tmp_path / "run") == b"mine"
    monkeypatch.setenv("MEGACORE_SECRET", "known")
    assert secret_of(tmp_path / "run") == b"known"
