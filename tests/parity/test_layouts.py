"""Any layout, the same numbers: loss, gradients, norm, updated weights, counts and biases of experts against one
process, in float64, whatever is trained, kept, offloaded or exchanged."""

import numpy as np
import pytest
from extended_family import extended
from layouts import BUILT, CASES, DRAWN, STARVED, TUNED, UNEVEN, UNEVEN_OTHERS, UNEVEN_RUNGS, parameters
from oracle import Case, Run, check, deep, measured, one_process, relative
from pool import Pool


@pytest.mark.parametrize(("case", "run"), parameters())
def test_layout_computes_what_one_process_computes(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = deep(case, sum(run.layers) if run.layers else max(3, run.mesh.pp * run.chunks + 1))
        # A tensor that is scaled as a whole is that of a microbatch.
        one = one_process(pool, case, run.micro if case.fp8 else case.sequences)
        check(case, run, one, pool.run(run.mesh.world, measured, case, run))


# -- that equal numbers prove something


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("case", [*CASES, *BUILT, *(plain for plain, _ in DRAWN[::6])], ids=lambda case: case.name)
def test_two_steps_learn_something(pool: Pool, case: Case) -> None:
    one = one_process(pool, case)
    assert all(relative(one.final[name], one.initial[name]) > 1e-3 for name in one.initial)
    assert all(np.linalg.norm(gradient) > 0 for gradient in one.gradients.values())
    assert case not in BUILT or any("sinks" in name for name in one.gradients)


@pytest.mark.parametrize("case", TUNED, ids=lambda case: case.name)
def test_what_is_trained_learns_and_what_is_frozen_stays(pool: Pool, case: Case) -> None:
    case = deep(case, 3)
    one, frozen = one_process(pool, case), case.tuning.frozen(case.config.schema)
    assert frozen and frozen < one.initial.keys()
    for name, before in one.initial.items():
        if name in frozen:
            assert np.array_equal(one.final[name], before) and not one.gradients[name].any(), name
        else:
            assert relative(one.final[name], before) > 1e-3 and one.gradients[name].any(), name


def test_an_expert_without_tokens_has_a_gradient_of_zeros(pool: Pool) -> None:
    """And the others learn something."""
    with extended():
        found = one_process(pool, deep(STARVED, 3))
    assert found.loads[0].layers == (0, 2)
    for counts in found.loads[0].counts:
        assert counts[-1] == 0 < counts[:-1].min()
    for name, gradient in found.gradients.items():
        assert relative(found.final[name], found.initial[name]) > 1e-3
        assert gradient.any()
        if "experts" in name:
            assert not gradient[-1].any() and np.all(np.any(gradient[:-1], axis=(1, 2)))


def test_no_uneven_case_shares_out_evenly() -> None:
    assert all(case.sequences % (run.mesh.data * run.micro) for case, run in UNEVEN + UNEVEN_RUNGS + UNEVEN_OTHERS)
