"""A rank that waits for others while a generation ends is freed, whatever it waits for."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from megacore.recovery import channel
from megacore.recovery.channel import cut


@pytest.mark.quick
def test_who_waits_to_be_called_is_called_and_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's rank that listens for one that has died: there is no connection to cut."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with socket.socket() as old, socket.socket() as new:
        old.bind(("127.0.0.1", 0))
        old.listen()
        before = frozenset(channel._connections().values()) - {_name(new)}
        new.bind(("127.0.0.1", 0))
        new.listen()
        cut(before)
        for each in (old, new):
            each.settimeout(0.2)
        calls = [new.accept()[0] for _ in range(3)]
        assert [struct.unpack("=q", call.recv(8))[0] for call in calls] == [0, 1, 2]
        assert all(call.recv(8) == b"" for call in calls)
        for call in calls:
            call.close()
        with pytest.raises(TimeoutError):
            old.accept()


def _name(end: socket.socket) -> str:
    status = os.fstat(end.fileno())
    return f"{status.st_dev}:{status.st_ino}"
