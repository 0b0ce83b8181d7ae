"""No order of events tears or loses a checkpoint that is written while later steps are done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from background_saves import BackgroundExplorer
from explorer import Setting, Violation, explore, seed

DP2 = Setting({0: (0, 1), 1: (0, 1)}, 1, 1, 2, (1,), late=False, kinds=("kill", "cut"))
"""Two steps, of which the first is saved: it may be published before the second is done, or at the end."""
TWO_FAULTS = replace(DP2, faults=2)


@pytest.mark.quick
@pytest.mark.parametrize("saves", [(1,), (1, 2)])
def test_no_order_of_events_tears_or_loses_a_save_in_the_background(saves: tuple[int, ...]) -> None:
    walked = explore(BackgroundExplorer(replace(DP2, saves=saves)))
    assert walked.worlds > 4_000 and walked.done


@pytest.mark.grid
@pytest.mark.parametrize("setting", [TWO_FAULTS, replace(DP2, late=True, kinds=Setting.kinds)])
def test_no_delay_nor_second_fault_tears_or_loses_it(setting: Setting) -> None:
    walked = explore(BackgroundExplorer(setting))
    print(walked)
    assert walked.done


BUGS: dict[str, tuple[Setting, str, str, str]] = {
    "it is published while a rank writes": (DP2, "_go_on", "or any(busy for busy, _ in told)", ""),
    "what was given up is not done again": (DP2, "_abandons", "unsaved=not known", "unsaved=False"),
    "who is new is not told that it was given up": (TWO_FAULTS, "_go_on", "proc.unsaved or groups.unsaved", "False"),
    "it goes on over a fault": (DP2, "_abandons", "saving=None, ", ""),
    "the run ends before it is published": (DP2, "_next", '"join" if proc.saving else "ended"', '"ended"'),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, *change = BUGS[bug]
    seed(monkeypatch, (BackgroundExplorer,), *change)
    with pytest.raises(Violation) as caught:
        explore(BackgroundExplorer(setting))
    print(bug, "|", caught.value)
