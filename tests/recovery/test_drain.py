"""A file in the folder of a run asks one node to leave, until it has."""

from __future__ import annotations

from pathlib import Path

from megacore.recovery import drain


def test_a_node_is_asked_by_its_name_until_it_has_left(tmp_path: Path) -> None:
    assert not drain.asked(tmp_path, "a")
    drain.file_of(tmp_path, "a").write_text("")
    assert (tmp_path / "drain-a").exists()
    assert drain.asked(tmp_path, "a") and not drain.asked(tmp_path, "b")
    drain.done(tmp_path, "a")
    drain.done(tmp_path, "b")
    assert not drain.asked(tmp_path, "a") and not list(tmp_path.iterdir())


def test_a_folder_that_does_not_answer_asks_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not drain.asked(tmp_path / "file" / "out", "a")
    drain.done(tmp_path / "file" / "out", "a")
