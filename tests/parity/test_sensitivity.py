"""The suite can fail: faults are where the table says, and one of them is seeded (``sensitivity.py`` seeds all)."""

from collections.abc import Sequence

import pytest
import seeding
from seeding import TESTS, Edit, Fault, Stale, check, edited, find, node_id, seeded
from sensitivity import FAULTS

BY_NAME = {fault.name: fault for fault in FAULTS}


def test_every_fault_can_be_seeded() -> None:
    assert len(BY_NAME) == len(FAULTS)
    bad = [f"{fault.name}: {error}" for fault in FAULTS if (error := why_not(fault))]
    assert not bad, "\n".join(bad)


def why_not(fault: Fault) -> Exception | None:
    """Return what is wrong with a fault's places or its tests."""
    try:
        assert seeded(fault), "it has no place"
        assert fault.tests, "no test is to see it"
        for test in fault.tests:
            node_id(test)
    except (Stale, SyntaxError, AssertionError) as error:
        return error
    return None


# -- places


SOURCE = """
class Model:
    def loss(self, found):
        total = sum(found["all"]) / len(found["all"])
        if total:
            # What it was.
            self.last = total
            self.note(total)
        return total + 1

def note(total):
    return total + 1
"""


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("sum( found['all'] )", "0", "total = 0 / len(found['all'])"),
        ("sum(found['all']) / (\n len(found['all']))", "max(found)", "total = max(found)"),
        ("total + 1", "(total + 1) * 2", "return (total + 1) * 2"),
        ("self.note(total)", "self.note(0)", "self.note(0)"),
        ("self.note(total)", "self.note(0)\nself.note(1)", "self.note(1)"),
        ("self.last = total\nself.note(total)", "", "pass"),
        ("if total:\n  self.last = total\n  self.note(total)", "self.last = 2", "self.last = 2"),
    ],
)
def test_code_is_found_however_it_is_laid_out(before: str, after: str, line: str) -> None:
    made = edited(SOURCE, ("Model", "loss"), Edit("Model.loss", before, after))
    assert line in [each.strip() for each in made.splitlines()]
    compile(made, "made", "exec")
    assert made.endswith("def note(total):\n    return total + 1\n")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [("total + 1", "(total + 1)", "changes nothing"), ("return total + 1", "break", "outside loop")],
)
def test_what_changes_nothing_or_is_no_code_is_no_fault(before: str, after: str, says: str) -> None:
    with pytest.raises(Stale, match=f"note: .*{says}"):
        edited(SOURCE, ("note",), Edit("note", before, after))


@pytest.mark.parametrize(
    ("before", "count"),
    [("total - 1", 0), ("total", 4), ("self.note(total)\nself.last = total", 0), ("found['all']", 2)],
)
def test_what_is_not_there_exactly_once_is_no_fault(before: str, count: int) -> None:
    with pytest.raises(Stale, match=f"Model.loss: says {count} times instead of once: "):
        edited(SOURCE, ("Model", "loss"), Edit("Model.loss", before, "0"))


def test_a_name_leads_to_one_place_in_any_file() -> None:
    assert find("recompute.computed.add").inside == ("computed", "add")
    assert find("step.evaluate").file == "megacore/training/step.py"
    assert find("megacore.training.step").inside == ()
    with pytest.raises(Stale, match=r"evaluate: names .*megacore\.training\.step\.evaluate and "):
        find("evaluate")
    with pytest.raises(Stale, match="luate: names nothing in megacore, "):
        find("luate")
    assert node_id("test_sensitivity.test_a_name_leads_to_one_place_in_any_file[a.b]") == (
        "tests/parity/test_sensitivity.py::test_a_name_leads_to_one_place_in_any_file[a.b]"
    )
    assert node_id("parity.test_sensitivity") == find("parity.test_sensitivity", TESTS).file


# -- the copy


@pytest.mark.in_turn(6, 0)
def test_a_fault_is_seeded_and_caught(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([BY_NAME["the last sample of a global batch does not count"]]) == 0
    printed = capsys.readouterr().out
    assert "1 tests pass without a fault" in printed and "1 of 1 faults are caught" in printed
    assert "megacore/test_batches.py::test_a_microbatch_is_where_the_formula_says" in printed


def test_a_fault_that_no_test_sees_survives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "run_tests", lambda *_: (0, ""))
    assert check(FAULTS[:2]) == 2
    assert capsys.readouterr().out.count("SURVIVES") == 2


def test_ranks_with_a_fault_have_several_times_as_long_as_without() -> None:
    """Many cores are shared, and what is only slow has caught nothing."""
    told = (f"1 passed\n{said} call     tests/x.py::test\n" for said in ("0.12s", "20.5s", "70.00s"))
    assert [*map(seeding.patience, told)] == [15, 62, 120]
    assert seeding.patience("0.10s call a\n9.00s setup a\n") == 27 and seeding.patience("1 passed in 3 s") == 15


@pytest.mark.parametrize(("statuses", "message"), [([1], "without any fault"), ([0, 2], "pytest ended with status 2")])
def test_tests_that_cannot_tell_are_an_error(
    statuses: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail anyway, or cannot run."""
    left = iter(statuses)

    def run(folder: object, tests: Sequence[str], *options: str) -> tuple[int, str]:
        return next(left), "FAILED tests/test_x.py::test_x"

    monkeypatch.setattr(seeding, "run_tests", run)
    with pytest.raises(Stale, match=message):
        check(FAULTS[:1])
