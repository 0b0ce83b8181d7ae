"""What CI installs by hash is what constraints.txt names, and everything of it has a hash."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lock_of_ci_has_the_tested_versions_and_their_hashes() -> None:
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    locked = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        text := (ROOT / ".ci/requirements.txt").read_text(),
        re.MULTILINE,
    )
    del constraints["torch"]  # its builds differ between indices: the lock says so
    assert {name: version for name, version, _ in locked} == constraints
    assert len(locked) == len(re.findall(r"^\w", text, re.MULTILINE))
