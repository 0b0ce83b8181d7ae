"""The suite can fail: faults are where their texts say, and some of them are seeded (``sensitivity.py`` seeds all)."""

from __future__ import annotations

import pytest
from sensitivity import FAULTS, ROOT, Fault, Stale, check, seeded


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_every_fault_can_be_seeded(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    faulty = seeded(source, fault.edits, fault.file)
    assert faulty != source
    compile(faulty, fault.file, "exec")


def test_a_text_that_has_moved_is_no_fault() -> None:
    for source in ("", "a = 1\na = 1\n"):
        with pytest.raises(Stale, match="instead of once"):
            seeded(source, [("a = 1", "a = 2")], "somewhere")


@pytest.mark.slow
def test_some_faults_are_seeded_and_caught(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [fault for fault in FAULTS if fault.file in ("megacore/optimizer.py", "parallel/linear.py")][:3]
    assert check(chosen) == 0
    assert "3 of 3 faults are caught" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_that_no_test_sees_survives(capsys: pytest.CaptureFixture[str]) -> None:
    harmless = ("return F.silu(gate).mul_(up)", "return F.silu(gate).mul_(up)  # in place")
    unseen = Fault("a comment", "models/blocks.py", (harmless,), ("tests/models/test_feed_forward.py",))
    assert check([unseen]) == 1
    assert "SURVIVES" in capsys.readouterr().out
