"""An agent that is killed leaves its folder to the next one to remove."""

import os
import tempfile
from pathlib import Path

import pytest

from megacore.launcher.temporary_folder import HELD, compiled, temporary_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"megacore-{os.getuid()}"


@pytest.mark.quick
def test_what_a_killed_agent_has_left_is_removed_and_that_of_a_live_one_is_not(temporary: Path) -> None:
    with temporary_folder() as live:
        (temporary / "strange").mkdir()  # just being made
        if (pid := os.fork()) == 0:
            with temporary_folder() as mine:
                (mine / "beat-1").touch()
                os._exit(0)
        os.waitpid(pid, 0)
        assert len(list(temporary.glob(f"*/{HELD}"))) == 2
        with temporary_folder() as next_one:
            assert {path.parent for path in temporary.glob(f"*/{HELD}")} == {live, next_one}
            assert live.stat().st_mode & 0o777 == temporary.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in temporary.iterdir()] == ["strange"]


@pytest.mark.quick
@pytest.mark.parametrize("what", ["fifo", "link", "others may enter", "fifo within"])
def test_what_others_have_made_is_not_opened(temporary: Path, tmp_path: Path, what: str) -> None:
    """A pipe that nobody writes to would be waited for."""
    if what == "fifo":
        os.mkfifo(temporary)
    elif what == "link":
        (tmp_path / "theirs").mkdir()
        temporary.symlink_to(tmp_path / "theirs")
    else:
        (temporary / "x").mkdir(parents=True)
        os.mkfifo(temporary / "x" / HELD)
        temporary.chmod(0o777 if what == "others may enter" else 0o700)
    with temporary_folder() as made:
        assert (made.parent == temporary) == (what == "fifo within") and made.stat().st_mode & 0o777 == 0o700
        kept = compiled(tmp_path / "out")
        assert kept.parent == (temporary if what == "fifo within" else tmp_path / "out")
    assert what != "link" or not list((tmp_path / "theirs").iterdir())


def test_what_torch_compiled_stays(temporary: Path, tmp_path: Path) -> None:
    """It is no agent's, and serves the next run."""
    kept = compiled(tmp_path / "out")
    kept.mkdir()
    with temporary_folder():
        assert kept.is_dir() and kept.parent == temporary and temporary.stat().st_mode & 0o777 == 0o700
