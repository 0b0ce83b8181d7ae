"""Where the numbers of a run go: each record in every sink, a picture that is one."""

import errno
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engine
import pytest
from engine import LENGTH, of, train, trainer
from PIL import Image

from megacore.config import Config, LogConfig, TrainConfig
from megacore.models.config import flops_per_token
from megacore.models.registry import configure
from megacore.progress_bar import progress_bar
from megacore.store.io.strict_json import StoreError
from megacore.training import metrics
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.metrics import Log

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "seconds_per_step", "tokens_per_second", "tflops_per_device", "mfu",
    "peak_memory_gib", "skipped_steps", "time", "wall_seconds", "goodput",
}  # fmt: skip
TRAINED = {
    "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "seconds_per_step": 0.1, "tokens_per_second": 640.0,
    "tflops_per_device": 0.1, "mfu": None, "peak_memory_gib": 0.5, "skipped_steps": 0,
}  # fmt: skip


# -- the records of a run


def test_every_record_has_the_promised_numbers(recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", "train.steps=7", "log.every=3", "evaluate.every=2", "log.peak_tflops=0.5"]
    records = train(recipe, overrides).records
    training = [record for record in records if "loss" in record]
    validation = [record for record in records if "validation_loss" in record]
    assert len(training) + len(validation) == len(records)
    assert [record["step"] for record in training] == [3, 6, 7]
    assert [record["step"] for record in validation] == [2, 4, 6, 7]
    named = {"step", "validation_loss", "validation_perplexity", "evaluations_since_best"}
    assert all(record.keys() == named for record in validation)
    flops = flops_per_token(configure(engine.LLAMA), LENGTH)
    for record in training:
        assert record.keys() == KEYS
        values = {key: value for key, value in record.items() if value is not None}
        assert values.keys() == KEYS
        assert 0 < values["loss"] < 10 and values["grad_norm"] > 0 and values["lr"] > 0
        assert values["tokens"] == values["step"] * 8 * LENGTH
        assert values["tokens_per_second"] == pytest.approx(8 * LENGTH / values["seconds_per_step"])
        assert values["tflops_per_device"] == pytest.approx(values["tokens_per_second"] * flops / 1e12)
        assert values["mfu"] == pytest.approx(values["tflops_per_device"] / 0.5)
        assert 0.05 < values["peak_memory_gib"] < 64
        assert values["skipped_steps"] == 0


@pytest.mark.in_turn(2, 1)
def test_time_of_evaluation_is_not_counted(recipe: str, tmp_path: Path) -> None:
    """Slow evaluations, at steps with a record and at steps without one."""
    made = trainer(recipe, [f"out={tmp_path / 'run'}", "train.steps=4", "log.every=2", "evaluate.every=1"], log=True)
    started = time.perf_counter()

    def slow(run: engine.Trainer) -> list[float]:
        run.enter("evaluate")
        time.sleep(0.2)
        return [0.0]

    of(made, Evaluation).losses = slow  # type: ignore[method-assign]
    result = engine.result(made, made.fit())
    elapsed = time.perf_counter() - started
    counted = sum(2 * seconds for seconds in result.values("seconds_per_step"))
    assert 0 < counted < elapsed - 4 * 0.2


# -- the sinks


def test_lines_are_json_and_there_at_once(tmp_path: Path) -> None:
    sink = metrics.JsonLines(tmp_path / "metrics.jsonl")
    sink.write(1, TRAINED)
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1, **TRAINED}]
    sink.write(2, TRAINED | {"loss": float("nan"), "grad_norm": float("inf")})
    sink.close()
    second = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)
    assert second == {"step": 2, **TRAINED, "loss": None, "grad_norm": None}


class FullDisk:
    """A file on a disk with so many bytes of room."""

    closed = False

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = data[: self.room]
        self.room, self.content = self.room - len(taken), self.content + taken
        return len(taken)

    def close(self) -> None:
        self.closed = True


def test_a_full_disk_is_told_once_and_its_lines_follow_when_there_is_room(tmp_path: Path) -> None:
    told, disk = list[str](), FullDisk(300)
    sink = metrics.JsonLines(tmp_path / "metrics.jsonl", told.append)
    sink._file.close()
    sink._file = disk  # type: ignore[assignment]
    for step in (1, 2, 3):
        sink.write(step, TRAINED)
    assert len(disk.content) == 300
    why = f"{tmp_path / 'metrics.jsonl'}: No space left on device"
    assert told == [f"{why}: its lines are kept until they can be written; make room"]
    disk.room = 1 << 20
    sink.write(4, TRAINED)
    assert [json.loads(line)["step"] for line in disk.content.splitlines()] == [1, 2, 3, 4] and len(told) == 1
    disk.room = 0
    sink.write(5, TRAINED)
    sink.close()
    lost = len(json.dumps({"step": 5, **TRAINED})) + 1
    assert told[1:] == [told[0], f"{why}: the last {lost} bytes are lost"] and disk.closed


def test_a_run_goes_back_on_a_full_disk(tmp_path: Path) -> None:
    """What waits for room follows when there is some; of a step that stands twice the last line and its time count."""
    config = Config(out=str(tmp_path), train=TrainConfig(steps=9))
    with closing(Log(config)) as log:
        sink, useful = log._sinks[0], dict[int, float]()
        assert isinstance(sink, metrics.JsonLines)
        for step in (1, 2, 3):
            log.write(step, TRAINED)
        file, sink._file = sink._file, FullDisk(100)  # type: ignore[assignment]
        for step in (4, 5, 6):
            log.write(step, TRAINED | {"seconds_per_step": 0.1 * step})
            useful[step] = log._clock.useful
        file.write(sink._file.content)  # type: ignore[attr-defined]
        sink._file = file
        log.go_back(4)
        assert log._clock.useful == useful[4] == pytest.approx(0.3 + 0.4)
        for step in (5, 6, 7):
            log.write(step, TRAINED | {"loss": 1.5})
        assert log._clock.useful == pytest.approx(useful[4] + 3 * 0.1)
    losses = metrics.curve(metrics.read(tmp_path / "metrics.jsonl"), "loss")
    assert losses == [*((step, 2.5) for step in range(1, 5)), *((step, 1.5) for step in range(5, 8))]


def test_a_record_goes_to_every_sink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    config = Config(out=str(tmp_path), train=TrainConfig(steps=4), log=LogConfig(tensorboard=True))
    with closing(Log(config)) as log:
        log.write(2, TRAINED)
        log.write(2, {"validation_loss": 2.25, "validation_perplexity": 9.5})
        log.write(4, TRAINED | {"loss": 1.5})
    assert [record["step"] for record in metrics.read(tmp_path / "metrics.jsonl")] == [2, 2, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 2.5), (4, 1.5)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(2, 2.25)]
    assert "mfu" not in events.Tags()["scalars"]
    shown = capsys.readouterr()
    assert "step 2: validation loss 2.2500" in shown.out + shown.err
    assert "step 2 of 4: loss 2.5000" in shown.err and "\r" not in shown.err and "step 4" not in shown.err


@contextmanager
def output(terminal: bool) -> Iterator[io.StringIO]:
    """Where stdout and stderr go together."""
    both = io.StringIO()
    both.isatty = lambda: terminal  # type: ignore[method-assign]
    with redirect_stdout(both), redirect_stderr(both):
        yield both


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_lines_in_the_order_of_time_and_on_a_terminal_a_bar(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("megacore.training.metrics.time.monotonic", lambda: now)
    with output(terminal) as shown, closing(metrics.ProgressBar(total=5)) as bar:
        for step in range(1, 6):
            now += 12.0
            bar.write(step, TRAINED | {"loss": step})
            if step == 2:
                bar.write(step, {"validation_loss": 2.25, "validation_perplexity": 9.5})
    if terminal:
        assert "5/5" in shown.getvalue() and "loss=5.0" in shown.getvalue()
        assert "\rstep 2: validation loss 2.2500, perplexity 9.5\n" in shown.getvalue()
    else:
        heads = [line.partition(",")[0] for line in shown.getvalue().splitlines()]
        assert heads == ["step 1 of 5: loss 1.0000", "step 2: validation loss 2.2500", "step 4 of 5: loss 4.0000"]


@pytest.mark.parametrize("terminal", [False, True])
def test_other_work_shows_itself_likewise(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("megacore.progress_bar.time.monotonic", lambda: now)
    with output(terminal) as shown, progress_bar(1000, "work", done=100) as done:
        for _ in range(7):
            now += 10.0
            done(100)
    lines = ["work: 400 of 1,000 bytes, 10 a second", "work: 700 of 1,000 bytes, 10 a second"]
    assert "\r" in shown.getvalue() if terminal else shown.getvalue().splitlines() == lines


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    """What a disk or an editor has left, or a kill in the middle of a line; and what holds no numbers."""
    records = [json.dumps({"step": step, **TRAINED}) for step in (1, 2, 3)]
    lines = [records[0], "\x00\x00 garbled", records[1], "[1, 2]", '{"loss": 1}', records[2], '{"step": 4, "lo']
    lines[1:1] = ['{"step": 1, "loss": "x"}', '{"step": 1, "loss": [[]]}', "[" * 100_000]
    lines[1:1] = [f'{{"step": 1, "layers": [1], "counts": {each}}}' for each in ("3", "[1]", '[["x"]]', "[[]]")]
    (path := tmp_path / metrics.METRICS).write_bytes("\n".join(lines).encode() + b"\xff")
    assert metrics.read(path) == metrics.newest(path, 1 << 20) == [json.loads(each) for each in records]
    with closing(Log(Config(out=str(tmp_path)), after=2)) as log:
        log.write(3, TRAINED | {"loss": 1.5})
    assert metrics.curve(metrics.read(path), "loss") == [(1, 2.5), (2, 2.5), (3, 1.5)]


def test_of_a_step_that_stands_twice_the_last_line_counts(tmp_path: Path) -> None:
    config = Config(out=str(tmp_path), train=TrainConfig(steps=9), log=LogConfig(every=1))

    def steps(log: Log, first: int, last: int, loss: float) -> None:
        for step in range(first, last + 1):
            log.write(step, TRAINED | {"loss": loss})
            if step % 2 == 0:
                log.write(step, {"validation_loss": loss, "validation_perplexity": 7.4})
            log.write_loads(step, [0], [[1, int(loss)]])

    with closing(Log(config)) as log:
        steps(log, 1, 6, 2.0)
    with closing(Log(config, after=2)) as log:
        steps(log, 3, 3, 3.0)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 2, 3]
    with closing(Log(config, after=2)) as log:
        steps(log, 3, 7, 4.0)
    lines = metrics.read(tmp_path / "metrics.jsonl")
    whole = [(step, held) for step in range(1, 8) for held in (False, True)[: 2 - step % 2]]
    assert [(line["step"], "validation_loss" in line) for line in lines] == whole
    assert all((line.get("loss") or line["validation_loss"]) == (2 if line["step"] < 3 else 4) for line in lines)
    loads = metrics.read(tmp_path / "experts.jsonl")
    assert [(line["step"], line["counts"]) for line in loads] == [(n, [[1, 2 if n < 3 else 4]]) for n in range(1, 8)]


def test_what_w_and_b_shows_goes_on_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins anew in the folder is another one there."""
    begun = list[dict[str, object]]()

    def init(**given: object) -> SimpleNamespace:
        begun.append(given)
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = Config(out=str(tmp_path), train=TrainConfig(steps=4), log=LogConfig(wandb="project"))
    for after in (0, 2, 3, 0, 1):
        with closing(Log(config, after)) as log:
            log.write(after + 1, TRAINED)
    first, second, third, anew, last = (given["id"] for given in begun)
    assert first == second == third and anew == last != first and {given["resume"] for given in begun} == {"allow"}


def test_all_sinks_are_closed_though_one_fails(tmp_path: Path) -> None:
    log = Log(Config(out=str(tmp_path)))
    first, second = log._sinks
    second.close = mock.Mock(side_effect=OSError("the disk is full"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="full"), closing(log):
        pass
    second.close.assert_called_once()
    assert isinstance(first, metrics.JsonLines) and first._file.closed


# -- the picture


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, **TRAINED}, {"step": 1, "validation_loss": 2.0}, {"step": 2, **TRAINED, "loss": None}],
        [{"step": 1, **TRAINED}],
        [],
    ],
    ids=["both", "training", "nothing"],
)
@pytest.mark.filterwarnings("error:No artists:UserWarning")
def test_the_picture_is_a_png(tmp_path: Path, records: list[dict[str, float | None]]) -> None:
    metrics.draw(records, tmp_path / "loss.png", reference=2.2 if records else None)
    with Image.open(tmp_path / "loss.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.width > 600
        colors = picture.convert("RGB").getcolors(1 << 20)
        assert colors is not None and len(colors) > 10


@pytest.mark.in_turn(3, 2)
def test_the_loads_are_a_picture_of_each_layer(tmp_path: Path) -> None:
    """Experts over steps: an expert that gets everything is dark red, one that gets nothing dark blue; a layer is
    even."""
    lines = [{"step": 10 * n, "layers": [1, 3], "counts": [[12, 0, 0, 0], [3, 3, 3, 3]]} for n in range(1, 4)]
    for given in (lines, lines[:1], [{**lines[0], "layers": range(40), "counts": [[1, 2]] * 40}]):
        metrics.draw_loads(given, tmp_path / "experts.png")
        with Image.open(tmp_path / "experts.png") as picture:
            picture.load()
            assert picture.format == "PNG"
            colors = picture.convert("RGB").getcolors(1 << 20)
        if given is lines:
            most = sorted(colors or [], reverse=True)[1:5]  # but for the white around
            red, even, blue = (sum(count for count, color in most if color == each) for each in COLORS)
            assert 2.9 < blue / red < 3.1 and 3.8 < even / red < 4.2
    with Image.open(tmp_path / "experts.png") as picture:
        assert picture.width < 1600 and picture.height < 1000  # 12 of 40 layers


COLORS = (103, 0, 31), (247, 246, 246), (5, 48, 97)


# -- a folder that somebody else has made


def test_links_in_a_run_s_folder_are_not_followed(tmp_path: Path) -> None:
    """What they lead to is neither read nor written: the picture takes the link's place, and records are not added."""
    (tmp_path / "run").mkdir()
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1}\n')
    for name in (metrics.METRICS, metrics.PICTURE):
        (tmp_path / "run" / name).symlink_to(secret)
    metrics.draw([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], tmp_path / "run" / metrics.PICTURE)
    with pytest.raises(StoreError, match=r"metrics\.jsonl: leads to"):
        metrics.newest(tmp_path / "run" / metrics.METRICS)
    with pytest.raises(StoreError, match=r"metrics\.jsonl: leads to"):
        metrics.JsonLines(tmp_path / "run" / metrics.METRICS)
    assert secret.read_text() == '{"step": 1}\n'
    assert Image.open(tmp_path / "run" / metrics.PICTURE).format == "PNG"
