"""The end of a run in a few lines, and its pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megacore import checkpoints, incidents
from megacore.config import Config
from megacore.data.corpus import Corpus
from megacore.say import err, say
from megacore.store.io.objects import ObjectPath
from megacore.store.io.strict_json import StoreError
from megacore.training import metrics, run_report
from megacore.training.trainer import Callback, Trainer


class FinalReport(Callback):
    """Reports on rank 0, once all records are written and all checkpoints published."""

    def on_end(self, run: Trainer) -> None:
        if run.mesh.rank or run.failure is not None or run.pausing:
            return
        try:
            say(report(run.config, run.step, run.model.config.vocab_size))
        except (OSError, StoreError, ValueError) as error:  # on a full disk, say; all steps are done
            err(f"Done after step {run.step}, and cannot report: {error}")


def report(config: Config, last: int, vocabulary: int) -> str:
    """Return the end of a run in a few lines and draw the pictures; vocabulary: the number of the model's tokens."""
    out = Path(config.out)
    records = metrics.read(out / metrics.METRICS)
    known = Corpus.beside(Path(config.data.train[0].path)) if len(config.data.train) == 1 else None
    entropy = known.unigram_entropy if known else None
    unit = " in nats per token" if config.preference is None else " of a pair"
    metrics.draw(records, out / metrics.PICTURE, entropy, unit)
    keys = "loss", "validation_loss", "skipped_steps", "goodput"
    losses, held_out, skipped, goodput = ([value for _, value in metrics.curve(records, key)] for key in keys)
    lines = ["", f"Done after step {last} of {config.train.steps}." if last < config.train.steps else "Done."]
    if losses:
        recent = losses[-10:]
        lines.append(
            f"  training loss    {sum(recent) / len(recent):.4f}{unit.replace(' in', '')} "
            f"(the last {len(recent)} records)"
        )
    if held_out:
        lowest, at = min((loss, step) for step, loss in metrics.curve(records, "validation_loss"))
        best = f", the lowest {lowest:.4f} at step {at:,.0f}" if lowest < held_out[-1] else ""
        lines.append(f"  validation loss  {held_out[-1]:.4f}{best}")
    lines += _above_a_guess(records, vocabulary) if config.has_cross_entropy else []
    if skipped and skipped[-1]:
        lines.append(f"  skipped steps    {skipped[-1]:,} of {last:,}, which changed nothing")
    if goodput:
        befell = incidents.summary(incidents.read(out))
        lines.append(f"  goodput          {goodput[-1]:.1%} of the wall clock went into steps that count ({befell})")
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    paths = {"metrics": out / metrics.METRICS, "loss curve": out / metrics.PICTURE}
    if lines_of_experts := metrics.read(out / metrics.EXPERTS):
        metrics.draw_loads(lines_of_experts, out / metrics.PICTURE_OF_EXPERTS)
        paths["load of experts"] = out / metrics.PICTURE_OF_EXPERTS
    if config.log.report and find_spec("vl_convert"):
        paths["report"] = out / run_report.PAGE
        run_report.write([out], paths["report"])
    paths["resolved config"] = out / "config.yaml"
    if found := checkpoints.complete(checkpoints.folder_of(out, config.checkpoint.folder)):
        paths["checkpoint"] = found[max(found)]
        if config.checkpoint.best and (best_step := checkpoints.best(found)) is not None:
            paths["best checkpoint"] = found[best_step]
    lines += [f"  {what:<16} {path}{_size(path)}" for what, path in paths.items()]
    return "\n".join(lines)


def _size(path: Path) -> str:
    """Return the size of a folder on a disk, and what is to be said of a path that is gone."""
    if not path.exists():
        return " (is gone)"
    if isinstance(path, ObjectPath) or not path.is_dir():
        return ""
    return f" ({sum(file.stat().st_size for file in path.rglob('*') if file.is_file()):,} bytes)"


def _above_a_guess(records: Sequence[metrics.Record], vocabulary: int) -> list[str]:
    """Return an explanation of losses that are above that of a guess among all tokens, if there are some."""
    guess = math.log(vocabulary)
    value, step = max(((value, step) for step, value in metrics.curve(records, "loss")), default=(0.0, 0.0))
    if value <= 1.1 * guess:
        return []
    return [
        f"  highest loss     {value:.4f}, at step {step:,.0f}: above ln {vocabulary:,} = {guess:.4f}, that of a guess "
        "among all tokens. The model was sure of",
        "                   wrong ones, as first weights or steps make it that are too large for the text: "
        "lower optimizer.lr, warm up, or give it more text",
    ]
