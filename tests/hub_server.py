"""A server on localhost that answers as the Hugging Face hub does, as far as huggingface_hub asks it, and commands that
ask it."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BRANCH = "main"
TOKEN = "hf_thistokenissecret"


@dataclass
class Hub:
    """Repositories and what was asked of them.

    Args:
        files: {repository: {commit: {file: content}}}; that of a data set begins with ``datasets/``.
        branches: {repository: {branch or tag: commit}}.
        closed: {repository: (status, error code) for those without the token}.
        stalls: The files that stop in the middle, while this is set.
        asked: (method, path, whether the token was given) of every request.
        licences: {repository: the licence of its card}.
        private: The repositories that were made private.
        full: Whether no commit is taken any more.
    """

    token: str = TOKEN
    files: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    closed: dict[str, tuple[int, str]] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, bool]] = field(default_factory=list)
    licences: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    full: bool = False
    url: str = ""

    def push(self, repository: str, files: Mapping[str, bytes] | Path, branch: str = BRANCH) -> str:
        """Make a commit of a branch -> its hash."""
        if isinstance(files, Path):
            files = {str(p.relative_to(files)): p.read_bytes() for p in sorted(files.rglob("*")) if p.is_file()}
        text = repr(sorted((name, hashlib.sha1(content).hexdigest()) for name, content in files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.files.setdefault(repository, {})[commit] = dict(files)
        self.branches.setdefault(repository, {})[branch] = commit
        return commit

    @property
    def fetched(self) -> list[str]:
        """The files that were asked for, in the order in which they were."""
        return [path.partition("/resolve/")[2].partition("/")[2] for how, path, _ in self.asked if how == "GET"
                and "/resolve/" in path]  # fmt: skip

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Serve in this block -> the address, which is that of an earlier block if its port is given."""
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self.url
        finally:
            server.shutdown()
            server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers["Content-Length"]))
            given = self.headers.get("Authorization") == f"Bearer {hub.token}"
            hub.asked.append((self.command, path, given))
            repository, _, what = path.removeprefix("/api/models/").partition("/preupload/")
            if not given:
                self._say(401, {})
            elif path == "/api/repos/create":
                self._create(json.loads(body))
            elif path == "/api/validate-yaml":
                self._say(200, {}, b'{"errors": [], "warnings": []}')
            elif what:
                modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                         for each in json.loads(body)["files"]]  # fmt: skip
                self._say(200, {}, json.dumps({"files": modes}).encode())
            elif hub.full:
                self._say(507, {})
            else:
                self._commit(repository.partition("/commit/")[0], body)

        def _create(self, asked: dict[str, Any]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.files:
                self._say(409, {}, json.dumps({"url": f"{hub.url}/{name}"}).encode())
                return
            hub.push(name, {})
            if asked.get("visibility") == "private" or asked.get("private"):
                hub.private.add(name)
            self._say(200, {}, json.dumps({"url": f"{hub.url}/{name}"}).encode())

        def _commit(self, repository: str, body: bytes) -> None:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {each["value"]["path"]: base64.b64decode(each["value"]["content"])
                     for each in lines if each["key"] == "file"}  # fmt: skip
            before = hub.files[repository][hub.branches[repository][BRANCH]]
            commit = hub.push(repository, before | files)
            url = f"{hub.url}/{repository}/commit/{commit}"
            self._say(200, {}, json.dumps({"commitUrl": url, "commitOid": commit}).encode())

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            given = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if path != "/api/agent-harnesses":  # which the library asks for where a program of that kind runs it
                hub.asked.append((self.command, path, given))
            if path.startswith("/api/models/"):
                self._about(path.removeprefix("/api/models/"), given)
            elif path.startswith("/api/datasets/"):
                self._about(path.removeprefix("/api/"), given)
            elif "/resolve/" in path:
                repository, _, rest = path[1:].partition("/resolve/")
                revision, _, name = rest.partition("/")
                self._file(repository, revision, name, given)
            else:
                self._say(404, {})

        def _about(self, path: str, given: bool) -> None:
            repository, what, rest = path, "", ""
            for each in ("/revision/", "/tree/"):
                if each in path:
                    repository, what, rest = *path.partition(each)[:2], path.partition(each)[2]
            if repository not in hub.files or (hub.closed.get(repository, (0, ""))[1] == "private" and not given):
                self._say(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
                return
            revision = rest.split("/")[0] or BRANCH
            commit = hub.branches[repository].get(revision, revision)
            if commit not in hub.files[repository]:
                self._say(404, {"X-Error-Code": "RevisionNotFound"})
                return
            files = hub.files[repository][commit]
            if what == "/tree/":
                listed = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                self._say(200, {}, json.dumps(listed).encode())
                return
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            about: dict[str, Any] = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
            if repository in hub.licences:
                about["cardData"] = {"license": hub.licences[repository]}
            self._say(200, {}, json.dumps(about).encode())

        def _file(self, repository: str, revision: str, name: str, given: bool) -> None:
            commit = hub.branches.get(repository, {}).get(revision, revision)
            files = hub.files.get(repository, {}).get(commit)
            status, code = hub.closed.get(repository, (0, ""))
            if status and not given:
                self._say(status, {"X-Error-Code": code})
            elif files is None or name not in files:
                self._say(404, {"X-Error-Code": "EntryNotFound"})
            else:
                content = files[name]
                etag = hashlib.sha1(content).hexdigest()
                self._say(200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, content, name in hub.stalls)

        def _say(self, status: int, headers: Mapping[str, str], content: bytes = b"", stalls: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(content[: len(content) // 2] if stalls else content)
            self.wfile.flush()
            while stalls and hub.stalls:
                time.sleep(0.05)

    return Handler


@dataclass
class World:
    """A hub, and commands that have it for theirs."""

    folder: Path
    hub: Hub = field(default_factory=Hub)

    def environment(self, **more: str) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSF"))}
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        return {**ours, "PYTHONPATH": path, "HF_HOME": str(self.folder / "hf"), "HF_ENDPOINT": self.hub.url, **more}

    def start(self, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megacore.tools.main", *map(str, arguments)]
        environment = self.environment(**variables)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.folder, env=environment)

    def run(self, *arguments: str | Path, **variables: str) -> tuple[int, str]:
        """Run a command -> its exit status, and all that it said."""
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=100)
        return process.returncode, out + err

    def cached(self, name: str, kind: str = "models") -> set[str]:
        """The files of a repository that are in the cache."""
        snapshots = self.folder / "hf/hub" / f"{kind}--{name.replace('/', '--')}" / "snapshots"
        return {str(path.relative_to(snapshots).relative_to(path.relative_to(snapshots).parts[0]))
                for path in snapshots.rglob("*") if path.is_file()}  # fmt: skip
