"""An agent that is killed leaves its folder to the next one to remove."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megacore.recovery.folders import HELD, temporary_folder


@pytest.mark.quick
def test_what_a_killed_agent_has_left_is_removed_and_that_of_a_live_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "megacore-strange").mkdir()  # just being made, or somebody's
    with temporary_folder() as live:
        if (pid := os.fork()) == 0:
            with temporary_folder() as mine:
                (mine / "beat-1").touch()
                os._exit(0)
        os.waitpid(pid, 0)
        assert len(list(tmp_path.glob(f"*/{HELD}"))) == 2
        with temporary_folder() as next_one:
            assert {path.parent for path in tmp_path.glob(f"*/{HELD}")} == {live, next_one}
    assert [path.name for path in tmp_path.iterdir()] == ["megacore-strange"]
