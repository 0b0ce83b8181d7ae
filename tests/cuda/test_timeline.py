"""Logs of ranks in time, and `megacore plan --trace`: what runs when, what is exposed, and what the plan says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pool import forkserver
from test_trace import in_a_process, pytestmark

from megacore.devices import DEVICES
from megacore.models.registry import configure
from megacore.parallel.weights.layout import MeshShape
from megacore.planning import efficiency
from megacore.planning.costs import ALL_GATHER, REDUCE_SCATTER, MatMul
from megacore.planning.recipe_setting import setting_of
from megacore.planning.run_plan import cluster_of, plan
from megacore.planning.setting import Setting
from megacore.planning.step_time import Cluster, estimate
from megacore.planning.trace.log import HOST, Entry, Launch, NcclMessage, RecordEvent, Wait
from megacore.planning.trace.run import TracedRank, _stage, between_records, trace, trace_rank, trace_ranks
from megacore.planning.trace.simulated_gpu import FusedKernel
from megacore.planning.trace.timeline import Costs, StepTimeline, beside, covered, length, play
from megacore.recipe import load
from megacore.tools.main import main

__all__ = ["pytestmark"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that trace have imported everything; a trace beside the plan has those that a user has."""
    context = forkserver()
    monkeypatch.setattr("megacore.planning.trace.run.multiprocessing.get_context", lambda method: context)


H100 = Cluster(DEVICES["h100-80"], 989.4)
COSTS = Costs(H100, MeshShape(dp=2))
MS = int(H100.device.bandwidth * efficiency.MEMORY * 1e-3)
"""Bytes that take a kernel a millisecond."""
START, HOST_S = efficiency.KERNEL_S, efficiency.LAUNCH_S


def kernel(stream: str = "main", moved: int = MS) -> Launch:
    return Launch(stream, "use", "here", moved=moved)


def gather(key: str = "a #1", size: int = 360_000_000) -> Launch:
    return Launch("nccl", "gather", "here", message=NcclMessage("a", [(key, (0, 1))], "", ALL_GATHER, size))


def times(timeline: StepTimeline, rank: int = 0) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in timeline.ran[rank]]


def near(values: Sequence[tuple[float, float]]) -> list[object]:
    return [pytest.approx(each, rel=1e-9) for each in values]


def test_what_is_on_a_stream_runs_in_turn_and_no_sooner_than_it_is_launched() -> None:
    one, ms = HOST_S, 1e-3 + START
    assert times(play({0: [kernel(), kernel()]}, COSTS)) == near([(one, one + ms), (one + ms, one + 2 * ms)])
    assert times(play({0: [kernel(moved=0)] * 2}, COSTS)) == near([(one, one + START), (2 * one, 2 * one + START)])


def test_streams_run_beside_each_other_unless_one_waits_for_an_event() -> None:
    ordered: list[Entry] = [kernel(), RecordEvent(1, "main"), Wait("beside", 1), kernel("beside")]
    (_, first), (second, _) = times(play({0: ordered}, COSTS))
    assert second == first
    (_, first), (second, _) = times(play({0: [ordered[0], ordered[3]]}, COSTS))
    assert second == pytest.approx(2 * HOST_S) and second < first
    host: list[Entry] = [kernel(), RecordEvent(1, "main"), Wait(HOST, 1), kernel("beside")]
    (_, first), (second, _) = times(play({0: host}, COSTS))
    assert second == pytest.approx(first + 2 * HOST_S), "what the host waits for, and then launches"


def test_a_message_begins_when_the_last_rank_has_come() -> None:
    late: list[Entry] = [kernel("nccl"), gather()]
    both = play({0: [gather()], 1: late}, COSTS)
    assert times(both, 0)[0] == times(both, 1)[1]
    assert times(both, 0)[0][0] == pytest.approx(HOST_S + 1e-3 + START)
    assert times(play({0: [gather()]}, COSTS))[0][0] == HOST_S, "the other one is not there"
    link = H100.device.link * efficiency.LINKS
    assert length(times(both, 0)) == pytest.approx(360e6 / 2 / link + efficiency.ring_s(1, 0))
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 .* wait for ever"):
        play({0: [gather()], 1: [gather("b #1")]}, COSTS)


def test_kernels_beside_a_message_are_slower() -> None:
    message, beside_it = times(play({0: [gather(), kernel(moved=3 * MS)]}, COSTS))
    lost = (message[1] - beside_it[0]) * (1 - H100.overlap)
    assert beside_it[1] - beside_it[0] == pytest.approx(3e-3 + START + lost)
    far = Costs(replace(H100, device=replace(H100.device, per_node=1)), MeshShape(dp=2))
    message, beside_it = times(play({0: [gather(size=36_000_000), kernel(moved=3 * MS)]}, far))
    assert beside_it[1] - beside_it[0] == pytest.approx(3e-3 + START + (message[1] - beside_it[0]) * 0.3)


def test_what_kernels_cost() -> None:
    product = MatMul(8192, 4096, 4096)
    seconds, bound = COSTS.kernel(Launch("main", "mm", "", product=(product, 2)))
    assert bound == "products" and seconds == pytest.approx(2 * H100.multiplied_s(product, 989.4))
    assert COSTS.kernel(Launch("main", "copy_", "", moved=64_000_000, crosses=True)) == (1e-3, "copies")
    assert (
        COSTS.kernel(Launch("main", "attention", "", product=(replace(product, attention=True), 1)))[1] == "attention"
    )
    narrow, fp8 = replace(product, dtype="float8_e4m3fn"), Costs(replace(H100, tflops=1978.9), MeshShape())
    assert fp8.kernel(Launch("main", "mm", "", product=(narrow, 1)))[0] == pytest.approx(
        fp8.kernel(Launch("main", "mm", "", product=(product, 1)))[0] / 2, rel=1e-3
    )


def test_a_stage_is_made_of_its_kernels_exposed_messages_gaps_and_waits() -> None:
    log: list[Entry] = [gather(), Wait("main", 1), kernel(), RecordEvent(2, "main"), Wait(HOST, 2), kernel(moved=0)]
    step = play({0: log, 1: [gather(), kernel("nccl", 9 * MS)]}, COSTS)
    own = _stage(TracedRank((), 7), step, 0)
    assert own.launches == 3 and own.peak == 7
    assert own.own + own.waits == pytest.approx(step.seconds)
    message, *kernels = times(step)
    assert own.memory == pytest.approx(length(kernels))
    assert own.exposed == pytest.approx(length([message]) - beside(covered([message]), covered(kernels)))
    assert own.host == pytest.approx(3 * HOST_S) and own.waits > 6e-3


def linear(overrides: Sequence[str]) -> list[float]:
    """Seconds of steps of 1, 2 and 5 microbatches."""
    config = load({}, ["model.preset=llama-tiny", "data.train=none", "data.sequence_length=64", *overrides])
    traced = trace_rank(between_records(config), 1, 0, (1, 1, 2, 5))
    costs = Costs(cluster_of("h100-80", "bf16", None, {}), MeshShape())
    return [play({0: log}, costs).seconds for log in traced.logs[1:]]


def compiled(overrides: Sequence[str]) -> tuple[int, int]:
    """Launches of a step, and the bytes that those move which multiply nothing."""
    config = load({}, ["model.preset=llama-tiny", "data.train=none", "data.sequence_length=64", *overrides])
    (*_, log) = trace_rank(between_records(config), 1, 0, (1, 1)).logs
    kernels = [each for each in log if isinstance(each, Launch) and each.stream != HOST]
    return len(kernels), sum(each.moved for each in kernels if each.product is None)


@pytest.mark.in_turn(3, 2)
def test_a_compiled_step_has_fewer_launches_that_move_less() -> None:
    (eager, moved), (few, less) = (in_a_process(compiled, [f"train.compile={on}"]) for on in ("false", "true"))
    assert few < eager
    assert 0.5 * moved < less < moved


def test_a_compiled_kernel_reads_what_others_made_and_writes_what_is_left() -> None:
    x, kernel = torch.zeros(64, 32), FusedKernel("main")
    y = x * 2
    kernel.add([x], [y])
    z = y + x
    kernel.add([y, x], [z])
    assert kernel.moved == 3 * x.nbytes
    del y
    assert kernel.moved == 2 * x.nbytes
    rows, most = z.sum(1), z.amax()
    kernel.add([z], [rows])
    kernel.add([z], [most])
    assert kernel.moved == 2 * x.nbytes + rows.nbytes + most.nbytes
    assert kernel.takes("main", [z, rows]) and not kernel.takes("beside", [z])
    assert not kernel.takes("main", [most]), "all of it must have been read"


def test_microbatches_after_the_first_are_alike() -> None:
    one, two, five = in_a_process(linear, ["model.num_hidden_layers=1"])
    assert five == pytest.approx(two + 3 * (two - one), rel=0.01)


@pytest.mark.in_turn(3, 1)
def test_a_trace_and_the_plan_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two layers at their real size, over two ranks; what is printed fits 100 columns, and the file has it all."""
    small = ["model.num_hidden_layers=2", "mesh.dp=2", "zero.shard=parameters", "batch.global_size=8"]
    file = tmp_path / "trace.json"
    assert main(["plan", "llama-3.2-1b", *small, "--trace", "--perfetto", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Simulated, not measured: llama on 2 x h100-80 as dp=2\n")
    assert max(map(len, said.splitlines())) <= 100
    found = re.search(r"of 4 microbatches: ([\d.]+) s \(([\d.]+) s by the plan\)", said)
    assert found and float(found[1]) == pytest.approx(float(found[2]), rel=0.1)
    planned = plan("llama-3.2-1b", small)
    row = re.search(r"^ +0 .* ([\d.]+)$", said, re.M)
    assert row and float(row[1]) == pytest.approx(planned["memory"][0]["peak"] / 1e9, rel=0.05)
    events = json.loads(file.read_text())["traceEvents"]
    assert {"all-gather", "reduce-scatter"} <= set(re.findall(r"all-gather|reduce-scatter", said))
    assert {each["args"]["name"] for each in events if each["ph"] == "M"} > {"rank 0, simulated", "main"}
    ran = [each for each in events if each["ph"] == "X"]
    assert {each["cat"] for each in ran} >= {"products", "attention", "memory", "messages"}
    assert all(each["dur"] > 0 and each["ts"] >= 0 for each in ran)


@pytest.mark.usefixtures("forked")
@pytest.mark.in_turn(4, 1)
@pytest.mark.parametrize("preset", ["llama", "mixtral"])
@pytest.mark.parametrize("split", ["mesh.dp=1", "mesh.dp=2 zero.shard=parameters"])
def test_a_step_casts_to_fp8_what_the_plan_says(split: str, preset: str) -> None:
    """By bytes, of the one layer between the ends: weights once, whole or in slices, of which those that are gathered
    are turned in each microbatch; what they are multiplied with, and gradients, for each microbatch. Not those of the
    experts' own gradients."""
    sizes = "model.num_hidden_layers=3 data.train=none data.sequence_length=512 batch.micro_size=2"
    model = f"{preset}-tiny" + " model.hidden_size=256 model.intermediate_size=512" * (preset == "mixtral")
    said = f"model.preset={model} {sizes} batch.global_size=4 train.precision=fp8 {split}"
    config = load({}, said.split())
    (traced,) = trace_ranks(between_records(config), config.mesh.dp or 1, [0], (1, 1, 3)).values()
    made = setting_of(config, configure(config.model), config.mesh.dp or 1, "cuda")

    def passes(made: Setting) -> float:
        """The bytes that pass through memory: the seconds of the compute that do with its speed."""
        cluster = cluster_of("h100-80", "fp8" if made.fp8 else "bf16", None, {})
        half = replace(cluster, device=replace(cluster.device, bandwidth=cluster.device.bandwidth / 2))
        return (estimate(made, half).compute - estimate(made, cluster).compute) * cluster.device.bandwidth

    for log, microbatches in zip(traced.logs[1:], (1, 3), strict=True):
        places = "cast_transpose.py", "fp8.py", "fp8_experts.py", "zero.py:FlatParameters._cast"
        casts = [each for each in log if isinstance(each, Launch) and any(place in each.place for place in places)]
        each = replace(made, microbatches=microbatches)
        want = passes(each) - passes(replace(each, fp8=False))
        assert sum(cast.moved for cast in casts if cast.product is None) == pytest.approx(want, rel=0.01)


@pytest.mark.usefixtures("forked")
@pytest.mark.in_turn(4)
def test_fp8_keeps_less_than_bf16_by_as_much_as_the_plan_says() -> None:
    sizes = "model.hidden_size=256 model.num_hidden_layers=4 data.train=none data.sequence_length=512"
    said = f"model.preset=llama-tiny {sizes} batch.global_size=16 batch.micro_size=16 mesh.tp=2".split()
    config = {precision: load({}, [*said, f"train.precision={precision}"]) for precision in ("bf16", "fp8")}
    traced, planned = (
        saved["bf16"] - saved["fp8"]
        for saved in (
            {key: trace(each, cluster_of("h100-80", key, None, {})).stages[0].peak for key, each in config.items()},
            {key: plan(each)["memory"][0]["peak"] for key, each in config.items()},
        )
    )
    assert traced == pytest.approx(planned, rel=0.01) and traced > 2 << 20


@pytest.mark.usefixtures("forked")
@pytest.mark.in_turn(3)
def test_messages_of_experts_are_exposed_in_what_has_nothing_beside_it_alone() -> None:
    """The first forward and the last backward: of four microbatches a quarter. The plan says so too, of time and of
    memory; and nothing is launched more."""
    sizes = ["data.train=none", "data.sequence_length=2048", "mesh.ep=8", "batch.global_size=32", "batch.micro_size=1"]
    common = ["model.preset=qwen3-30b-a3b", "model.num_hidden_layers=2", *sizes]
    configs = [load({}, [*common, f"pipeline.schedule={name}"]) for name in ("1f1b", "overlapped")]
    plain, turned = (trace(config, cluster_of("h100-80", "bf16", None, {}), 8) for config in configs)
    planned, planned_turned = map(plan, configs)
    before, after = (each.messages["ep", "all-to-all"] for each in (plain, turned))
    assert after.count == before.count and after.size == before.size
    assert after.exposed < 0.4 * before.exposed
    assert plain.stages[0].launches == turned.stages[0].launches
    saved = planned["time"]["total"] - planned_turned["time"]["total"]
    assert plain.seconds - turned.seconds == pytest.approx(saved, rel=0.25)
    assert turned.stages[0].peak == pytest.approx(planned_turned["memory"][0]["peak"], rel=0.05)


@pytest.mark.usefixtures("forked")
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("loss", ["simpo", "bradley_terry"])
def test_pairs_are_traced(loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.num_hidden_layers=1", "mesh.tp=2", "batch.global_size=2", "data.sequence_length=64"]
    assert main(["plan", "llama-3.2-1b", *small, f"preference.loss={loss}", "data.train=a.jsonl", "--trace"]) == 0
    assert ("all-to-all" in capsys.readouterr().out) is (loss == "bradley_terry")  # of the scores


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--perfetto", "x.json"], "--perfetto belongs to --trace"),
        (["--trace", "--fit", "GPU=h200"], "--trace does not go with --fit"),
        (["--trace", "--gpu", "cpu"], "--trace does not go with --gpu cpu"),
    ],
)
def test_what_a_trace_does_not_go_with(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.2-1b", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ALL_GATHER, REDUCE_SCATTER])
@pytest.mark.parametrize("size", [8 << 20, 8 << 30])
def test_a_product_that_sends_takes_as_long_as_the_longer_of_both(kind: str, size: int) -> None:
    """Of four ranks: a product of a quarter of the rows stands before the copies of the others, or behind them."""
    costs, ranks = Costs(H100, MeshShape(tp=4)), (0, 1, 2, 3)
    whole = MatMul(8192, 4096, 4096)
    launch = Launch("main", "", "", NcclMessage("a", [("a #1", ranks)], "", kind, size), product=(whole, 1))
    two = H100.multiplied_s(replace(whole, m=4096), 989.4)
    sent, _ = costs.message(NcclMessage("b", [("b #1", ranks)], "", kind, size))
    passes = 1.25 * size if kind == REDUCE_SCATTER else 0.5 * size
    copies = passes / (H100.device.bandwidth * efficiency.MEMORY) + 3 * START
    product, message, after = play({rank: [launch, kernel()] for rank in ranks}, costs).ran[0]
    assert (product.kind, message.kind) == ("products", "messages") and message.axis == "tp"
    assert product.seconds == pytest.approx(2 * two + copies)
    assert product.start == HOST_S and after.start == max(message.end, 9 * HOST_S)
    assert message.end - HOST_S == pytest.approx(max(2 * two, two / 2 + sent) + copies)
    assert message.seconds == pytest.approx(min(sent, message.end - HOST_S))


@pytest.mark.usefixtures("forked")
@pytest.mark.in_turn(3)
def test_products_that_send_expose_less() -> None:
    sizes = "model.num_hidden_layers=2 data.train=none data.sequence_length=8192 mesh.tp=8 batch.global_size=2"
    common = ["model.preset=llama-3.1-8b", *sizes.split(), "batch.micro_size=1"]
    configs = [load({}, [*common, f"train.async_tp={on}"]) for on in ("false", "true")]
    plain, turned = (trace(config, H100, 8) for config in configs)
    kinds = ALL_GATHER, REDUCE_SCATTER
    before, after = ([each.messages["tp", kind] for kind in kinds] for each in (plain, turned))
    assert [(each.count, each.size) for each in after] == [(each.count, each.size) for each in before]
    assert sum(each.exposed for each in after) < 0.5 * sum(each.exposed for each in before)
    assert turned.stages[0].products > plain.stages[0].products, "a quarter of the tokens at a time"
    assert turned.seconds < plain.seconds
