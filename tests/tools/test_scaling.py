"""`megacore plan --world 16,128`: the plans of several numbers of ranks beside each other."""

import pytest

from megacore.planning.run_plan import plan
from megacore.tools.plan import main

RECIPE, LAYOUT = "llama-3.1-8b", ["mesh.tp=8", "zero.shard=parameters"]


@pytest.mark.parametrize(
    ("options", "sizes", "says"),
    [
        ([], (512, 512), "Strong scaling, the same batch on other ranks (128 ranks, not 16;"),
        (["--weak"], (512, 4096), "Weak scaling, the same batch of each rank (128 ranks, not 16;"),
    ],
)
def test_each_is_the_plan_of_its_ranks(
    options: list[str], sizes: tuple[int, int], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([RECIPE, *LAYOUT, "batch.global_size=512", "--world", "16,128", *options]) == 0
    said = capsys.readouterr().out
    rows = {line[2:18].strip(): line[18:] for line in said.splitlines()}
    both = zip((16, 128), sizes, strict=True)
    found = [plan(RECIPE, [*LAYOUT, "mesh.dp=null", f"batch.global_size={size}"], world=world) for world, size in both]
    assert says in said
    assert rows["ms"].split() == [f"{1e3 * each['time']['total']:,.1f}" for each in found]
    assert rows["MFU"].split() == [f"{each['time']['mfu']:.1%}" for each in found]
    speeds = [each["time"]["tokens_per_second"] / world for each, world in zip(found, (16, 128), strict=True)]
    assert f"a rank does {speeds[1] / speeds[0]:.1%} of the tokens per second" in said
    assert "ranks of dp: 2 on 2 nodes, 16 on 16 nodes" in rows["messages of dp"]
    microbatches = ", ".join(str(each["microbatches"]) for each in found)
    assert (f"microbatches: {microbatches}" in rows["products"]) == (not options)
    assert "messages of ep" not in rows and "ranks of tp" not in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--weak"], "--weak is about several numbers of ranks"),
        (["--world", "16,128", "--trace"], "several numbers shows plans alone"),
        (["--world", "16,128", "--gpu", "cpu"], "give one --world"),
        (["--world", "16,20", "--weak", "mesh.tp=2", "batch.global_size=6"], "no whole number of them on 20"),
        (["--world", "16,20"], "cannot divide 20 ranks"),
    ],
)
def test_what_is_not_put_beside_each_other(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RECIPE, "mesh.tp=8", *options]) == 2 and says in capsys.readouterr().err
