"""Nodes come, leave and are lost: who takes part, and what becomes of the state, in every order of events."""

from __future__ import annotations

import membership
import pytest
from explorer import Violation, explore, seed
from membership import Cluster, Membership

from megacore.recovery import protocol
from megacore.recovery.generations import Generations
from megacore.recovery.protocol import ProtocolError, Status

PASSED = ("passed",)
CLUSTERS = {
    "comes": Cluster((1, 1), comes=(2,)),
    "comes and ends": Cluster((2,), comes=(1,), ends=True),
    "comes with a fault": Cluster((1,), comes=(1,), faults=1),
    "leaves with a fault": Cluster((1, 1), leaves=(1,), faults=1, steps=1),
    "leaves with the only state": Cluster((1, 1), leaves=(1,), faults=1, steps=1, replicated=False),
    "is late to leave": Cluster((1, 1), leaves=(1,), faults=1, kinds=PASSED, steps=1, replicated=False),
    "one for another": Cluster((1, 1), comes=(2,), leaves=(1,), steps=3, replicated=False, ends=True),
    "grows late": Cluster((1,), comes=(1,), faults=1, kinds=PASSED, steps=1, replicated=False),
    "two come": Cluster((1,), comes=(1, 2), steps=1),
    "is lost": Cluster((1, 1), lost=(1,), faults=1, steps=1),
    "is lost while another comes": Cluster((1,), comes=(1, 2), lost=(1,), steps=3, ends=True),
}
"""Few nodes, one change or two, and a fault."""
MORE = {
    "one for another, late": Cluster(
        (1, 1), comes=(2,), leaves=(1,), faults=1, kinds=PASSED, steps=1, replicated=False
    ),
    "one for another, with a death": Cluster((1, 1), comes=(2,), leaves=(1,), faults=1, steps=1),
    "one of three leaves, with a death": Cluster((1, 1, 1), leaves=(2,), faults=1, steps=1),
    "one of three leaves with its state": Cluster((1, 1, 1), leaves=(2,), faults=1, steps=1, replicated=False),
    "one of three is lost, with a death": Cluster((1, 1, 1), lost=(2,), faults=1, steps=1),
    "two of three are lost": Cluster((1, 1, 1), lost=(1, 2), steps=1),
    "two of three leave, or are lost": Cluster((1, 1, 1), leaves=(1, 2), lost=(1, 2), steps=1),
    "two come, one leaves, the other is lost": Cluster((1,), comes=(1, 2), leaves=(1,), lost=(2,), steps=1),
    "nodes of two": Cluster((2, 2), comes=(2,), leaves=(1,), processes=2, steps=1),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_order_of_changes_and_faults_tears_or_sticks(name: str) -> None:
    walked = explore(Membership(CLUSTERS[name]))
    assert walked.worlds > 100 and walked.done


@pytest.mark.grid
@pytest.mark.parametrize("name", MORE)
def test_no_order_of_changes_among_more_nodes_tears_or_sticks(name: str) -> None:
    walked = explore(Membership(MORE[name]))
    print(name, walked)
    assert walked.done


TWO_LATE = Cluster((1, 1), leaves=(1,), faults=2, kinds=PASSED, steps=1, replicated=False)
BUGS: dict[str, tuple[Cluster, str, str, str]] = {
    # Generations
    "who leaves is not waited for": (TWO_LATE, "_is_awaited", "or process.generation > 0", ""),
    "who has the only state is left out after a fault": (
        CLUSTERS["is late to leave"],
        "_can_begin",
        "holders - set(to.values()) <= self._spared and",
        "",
    ),
    "a fault does not undo that all have paused": (
        CLUSTERS["is late to leave"],
        "_blame",
        "self._spared = frozenset()",
        "pass",
    ),
    "pauses before who is new is ready": (CLUSTERS["comes"], "_pause", 'state != "ready"', 'state == "die"'),
    "who is new is kept when the run ends": (CLUSTERS["one for another"], "_act", '"done", None', '"done", self.to'),
    "who has left is kept": (CLUSTERS["leaves with the only state"], "_go", ".generation > 0", ".generation < 0"),
    "who is new and not wanted any more is kept": (
        CLUSTERS["is lost while another comes"],
        "_dismiss",
        "process.generation == 0 or",
        "",
    ),
    "the first change counts": (
        CLUSTERS["two come"],
        "change",
        "self.to = dict(sorted(new.items()))",
        "self.to = self.to or dict(sorted(new.items()))",
    ),
    "a pause is a fault": (
        CLUSTERS["leaves with the only state"],
        "_hear",
        'process.state in ("recover", "train")',
        "process.state in _IN",
    ),
    "who is replaced stays in the world to come": (
        CLUSTERS["comes with a fault"],
        "_replace",
        "(self.world, self.to or {})",
        "(self.world,)",
    ),
    # the state
    "a world counts before all have theirs": (
        CLUSTERS["grows late"],
        "that_count",
        "(known.world for known, _ in said if known is not None)",
        "(each.world for both in said for each in both if each is not None)",
    ),
    "a world does not count where not all know of it": (
        CLUSTERS["grows late"],
        "that_count",
        "for each in both if",
        "for each in both[:1] if",
    ),
    "copies are no source": (
        CLUSTERS["leaves with the only state"],
        "_sources",
        "if version in status.copies.get(image, ())",
        "if False",
    ),
    # what the ranks owe to it
    "the old state goes before all have the new": (
        CLUSTERS["is late to leave"],
        "_go_on",
        "known=taken[0]",
        "known=None",
    ),
    "who leaves hands over to nobody": (
        CLUSTERS["leaves with the only state"],
        "_handed",
        "not self.cluster.replicated",
        "False",
    ),
    "the end is not agreed upon": (CLUSTERS["comes"], "_is_last", "all(may", "any(may"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_of_a_change_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, *change = BUGS[bug]
    seed(monkeypatch, (Generations, Status, Membership, protocol), *change)
    for name in ("that_count", "sources", "resolve"):
        monkeypatch.setattr(membership, name, getattr(protocol, name))
    with pytest.raises((Violation, ProtocolError, KeyError)) as caught:
        explore(Membership(cluster))
    print(bug, "|", repr(caught.value)[:110], "|", caught.value.__notes__[0][:40])
