"""A headless Chromium, told what to do through a pipe by its DevTools protocol: it takes no library."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell"


def found() -> str | None:
    """The program: what ``MEGACORE_CHROMIUM`` names, or one that is on PATH."""
    return os.environ.get("MEGACORE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab, and all that it has told of itself."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._last, self._session = send, receive, b"", 0, {}
        self.events = list[dict[str, Any]]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        asked = {"id": self._last, "method": method, "params": parameters, **self._session}
        os.write(self._send, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._receive, 1 << 20) or _ended()
            text, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(text)
            if told.get("id") == self._last:
                assert "error" not in told, told
                return told["result"]
            self.events.append(told)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript gives."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """What has happened of these kinds."""
        return [each for each in self.events if each["method"] in methods]

    def open(self, file: Path, until: str) -> None:
        """Go to a file, and wait until an expression is true."""
        self.call("Page.navigate", url=file.as_uri())
        self.wait(until)

    def wait(self, until: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.value(until):
            assert time.monotonic() < end, f"{until} is not true within {seconds} s: {self.events[-5:]}"
            time.sleep(0.05)


def _ended() -> bytes:
    raise EOFError("the browser has ended")


@contextmanager
def page(program: str, folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own, whose files are in a folder."""
    (theirs, send), (receive, back) = os.pipe(), os.pipe()
    command = [program, "--headless", "--remote-debugging-pipe", "--disable-gpu", f"--user-data-dir={folder}"]
    # It reads from 3 and writes to 4.
    shell = f'exec "$@" 3<&{theirs} 4>&{back}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command, *["--no-sandbox"] * (os.geteuid() == 0)],
        pass_fds=(theirs, back),
        stderr=(folder / "stderr").open("wb"),
    )
    os.close(theirs)
    os.close(back)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        process.wait()
