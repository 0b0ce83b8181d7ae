"""Is the suite able to fail?  ``python tests/parity/sensitivity.py [--only NAME ...] [--list]``

Seeds faults, one at a time, by replacing source text in a temporary copy of the tree, and runs the part of the suite
that should see each. Prints which test caught it; the exit status is 1 if one survives. A fault whose text is not found
exactly once is an error, so that the list stays honest when code moves; so is a test that fails without any fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ("megacore", "models", "parallel", "tools", "tests")
# What hangs is caught as well; the copy need not wait as long for it.
IMPATIENT = ("tests/pool.py", "TIMEOUT_S = 60", "TIMEOUT_S = 15")


@dataclass(frozen=True)
class Fault:
    """A mistake, and who should see it.

    Args:
        name: In words.
        file: Where it is made.
        edits: (text that occurs exactly once there, what it becomes).
        tests: As pytest takes them.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, before: str, after: str, *tests: str) -> Fault:
    return Fault(name, file, ((before, after),), tests)


def layout(*ids: str) -> tuple[str, ...]:
    """Cases of the parity suite."""
    test = "tests/parity/test_layouts.py::test_layout_computes_what_one_process_computes"
    return tuple(f"{test}[{each}]" for each in ids)


TUNING = "tests/parity/test_tuning.py::"
LADDER = "tests/parity/test_ladder.py::"


def ladder(*ids: str) -> tuple[str, ...]:
    """Cases of the ladder's parity suite."""
    return tuple(f"{LADDER}test_each_rung_computes_what_one_process_computes[{each}]" for each in ids)


TRAINER, STEP = "tests/megacore/test_trainer.py::", "tests/megacore/test_step.py::"
OFFLOAD = "tests/megacore/test_offload.py::"
SAVE, RESUME = "tests/megacore/test_save.py::", "tests/megacore/test_resume.py::"

FAULTS = (
    # -- sums over replicas
    fault(
        "norm weights are not summed over tp",
        "parallel/sync.py",
        "if len(s.replicas) > 1 or s.parameter.dtype != self.dtype}",
        'if len(s.replicas) > 1 and "norm" not in s.name or s.parameter.dtype != self.dtype}',
        *layout("llama-tp2"),
    ),
    fault(
        "buckets are not reduced over dp",
        "parallel/sync.py",
        "bucket.pending = start_all_reduce(bucket.flat, bucket.group)",
        "bucket.pending = None",
        *layout("llama-dp2"),
    ),
    fault(
        "an average over dp for the sum",
        "parallel/sync.py",
        "                bucket.pending.wait()\n",
        "                bucket.pending.wait().div_(bucket.group.size)\n",
        *layout("llama-dp2"),
    ),
    fault(
        "buckets leave after the first microbatch",
        "parallel/sync.py",
        "arrivals.uses * microbatches",
        "arrivals.uses",
        *layout("llama-dp2"),
    ),
    fault(
        "a tied embedding is not summed between the ends of the pipeline",
        "parallel/sync.py",
        "bucket.pending = start_all_reduce(bucket.flat, bucket.group)",
        "bucket.pending = None\n"
        "            if not self._crosses_stages(bucket.spans[0]):\n"
        "                bucket.pending = start_all_reduce(bucket.flat, bucket.group)",
        *layout("gpt2-pp2"),
    ),
    fault(
        "the gradient of a shared kv head is not summed",
        "parallel/sync.py",
        "    if len(set(replicas.values())) == 1:",
        "    if replicas:",
        *layout("llama-tp4"),
    ),
    fault(
        "the second microbatch's gradient is copied, not added",
        "parallel/sync.py",
        "span.gradient.add_(span.of(gradient))",
        "span.gradient.copy_(span.of(gradient))",
        *layout("llama-dp2"),
    ),
    fault(
        "gradients of the last step are kept",
        "parallel/sync.py",
        "            span.parameter.grad = None\n",
        "            pass\n",
        STEP + "test_a_step_starts_from_no_gradient_and_evaluation_leaves_none",
    ),
    # -- the data parallel ladder
    fault(
        "a rank updates another one's slice",
        "parallel/zero.py",
        "        self.own = self.values.chunk(self.group.size)[self.group.index]",
        "        self.own = self.values.chunk(self.group.size)[self.group.index - 1]",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "a slice of the sum is taken from the wrong place",
        "parallel/collectives.py",
        "    own = x.chunk(group.size)[group.index]\n    if group.size == 1:",
        "    own = x.chunk(group.size)[group.index - 1]\n    if group.size == 1:",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "units do not wait for their parameters",
        "parallel/zero.py",
        "        for flat in unit.used:\n            flat.wait()\n",
        "",
        *ladder("llama-dp2-parameters"),
    ),
    fault(
        "after the update nobody gathers",
        "parallel/zero.py",
        "                bucket.wait()\n                bucket.refresh()\n",
        "                bucket.wait()\n",
        *ladder("llama-dp2-optimizer"),
    ),
    fault(
        "parameters that are gathered again are the old ones",
        "parallel/slices.py",
        "        whole.chunk(group.size)[group.index].copy_(own)\n",
        "",
        *ladder("llama-dp2-parameters"),
    ),
    fault(
        "parameters stay after their use",
        "parallel/zero.py",
        "            _let_go(unit.used, unit.after)\n",
        "            pass\n",
        LADDER + "test_parameters_are_there_only_while_they_are_used",
    ),
    fault(
        "frozen parameters stay in the backward",
        "parallel/zero.py",
        "            _let_go(each.frozen, [unit])\n",
        "            pass\n",
        TUNING + "test_frozen_parameters_are_there_only_while_they_are_used",
    ),
    fault(
        "adapters forget their scale",
        "parallel/lora.py",
        "        narrow = F.linear(self.dropout(x), self.a) * self._scale",
        "        narrow = F.linear(self.dropout(x), self.a)",
        TUNING + "test_a_step_is_that_of_the_formula",
    ),
    fault(
        "the pieces of B take each other's rows",
        "parallel/lora.py",
        "held = iter(self.b.split(",
        "held = iter(self.b.flip(0).split(",
        TUNING + "test_a_step_is_that_of_the_formula",
    ),
    fault(
        "a row-parallel A is not summed",
        "parallel/lora.py",
        "        narrow = row_linear(self.dropout(x), self.a, None, self.base.group) * self._scale",
        "        narrow = F.linear(x, self.a).chunk(self.base.group.size)[self.base.group.index] * self._scale",
        TUNING + "test_layout_computes_what_one_process_computes[lora-all-tp]",
    ),
    fault(
        "frozen weights are trained",
        "parallel/parameters.py",
        "            parameter.requires_grad_(name not in names)\n",
        "            pass\n",
        TUNING + "test_what_is_trained_learns_and_what_is_frozen_stays",
    ),
    fault(
        "the second microbatch's slice replaces the first's",
        "parallel/zero.py",
        "self.gradient.add_(found) if self.summed else self.gradient.copy_(found)",
        "self.gradient.copy_(found)",
        *ladder("llama-dp2-gradients"),
    ),
    fault(
        "groups of replicas and the ends of the pipeline do not sum their slices",
        "parallel/zero.py",
        "start_all_reduce(bucket.gradient, bucket.across) for bucket in self.buckets",
        "start_all_reduce(bucket.gradient, bucket.group) for bucket in self.buckets[:0]",
        *ladder("llama-dp4-x2-optimizer"),
    ),
    fault(
        "the same slices count each in the norm",
        "parallel/zero.py",
        "square_sum(bucket.gradient) / bucket.across.size",
        "square_sum(bucket.gradient)",
        *ladder("gpt2-pp2-dp2-optimizer"),
    ),
    # -- what lives elsewhere
    fault(
        "slices in host memory do not come",
        "parallel/slices.py",
        "            whole.chunk(group.size)[group.index].copy_(own, non_blocking=True)\n",
        "",
        OFFLOAD + "test_wherever_they_live_they_are_bitwise_the_same[dp2-parameters]",
    ),
    fault(
        "all of an offloaded window decays",
        "megacore/states/offload.py",
        "self._rule.weight_decay if decays else 0.0",
        "self._rule.weight_decay",
        OFFLOAD + "test_wherever_they_live_they_are_bitwise_the_same[dp2-optimizer]",
    ),
    fault(
        "what lies in gaps is not put back",
        "megacore/states/offload.py",
        "            flat.put_back()\n",
        "            pass\n",
        OFFLOAD + "test_wherever_they_live_they_are_bitwise_the_same[tp4-none]",
    ),
    fault(
        "an offloaded step that is left out is taken",
        "megacore/states/offload.py",
        "        if not bool(go):\n            return\n",
        "",
        OFFLOAD + "test_an_overflow_leaves_everything_as_it_was",
    ),
    fault(
        "a window that was changed is forgotten",
        "megacore/states/shelves.py",
        "            if place.changed:\n                self._write(place)\n            place.holds",
        "            place.holds",
        OFFLOAD + "test_a_window_is_read_after_it_was_written_and_one_that_fails_says_so",
    ),
    fault(
        "elements of an offloaded part are read beside their place",
        "megacore/states/windows.py",
        "offset = self.at - self.start",
        "offset = -self.start",
        OFFLOAD + "test_wherever_they_live_they_are_bitwise_the_same[dp2-gradients]",
    ),
    fault(
        "stages share with each other",
        "parallel/zero.py",
        "parts.setdefault((place.pp, place.dp * replicas // shape.dp), [])",
        "parts.setdefault((0, place.dp * replicas // shape.dp), [])",
        LADDER + "test_stages_and_replicas_divide_a_set",
    ),
    fault(
        "a gradient that has not come is what lay there",
        "parallel/zero.py",
        "            if held not in self.arrived:\n                held.of(full).zero_()\n",
        "",
        "tests/parallel/test_zero.py",
    ),
    fault(
        "a tensor is read from this rank's slice alone",
        "parallel/zero.py",
        "                if start < stop:\n                    broadcast_(",
        "                if start > stop:\n                    broadcast_(",
        LADDER + "test_weights_come_back_as_they_were_filled_in[parameters]",
    ),
    # -- the norm and the optimizer
    fault(
        "replicas count each in the norm",
        "parallel/sync.py",
        "square_sum(bucket.flat) / bucket.group.size",
        "square_sum(bucket.flat)",
        *layout("llama-dp2"),
    ),
    fault(
        "each rank clips by its own norm",
        "parallel/sync.py",
        "return all_reduce_(squares, mesh.world).sqrt()",
        "return squares.sqrt()",
        *layout("llama-pp2"),
    ),
    fault(
        "the order of the norm's sum shows",
        "parallel/sync.py",
        "memory = torch.empty_like(blocks[0], dtype=torch.float64)",
        "memory = torch.empty_like(blocks[0], dtype=torch.float32)",
        "tests/parity/test_ladder_precision.py::test_rungs_agree_bitwise_where_sums_have_one_order[dp2-fp8]",
    ),
    fault(
        "clipping is applied twice",
        "megacore/optimizer.py",
        "self._factor(norm, scale))\n",
        "self._factor(norm, scale).square())\n",
        TRAINER + "test_clipping_bounds_the_norm_that_the_optimizer_sees",
    ),
    fault(
        "norms and biases decay",
        "parallel/schema.py",
        "return len(self.sentence.dims) > 1",
        "return len(self.sentence.dims) >= 1",
        TRAINER + "test_norms_and_biases_do_not_decay",
    ),
    fault(
        "the schedule does not reach the optimizer",
        "megacore/states/resident.py",
        'group["lr"] = lr',
        "pass",
        TRAINER + "test_the_schedule_arrives_in_the_optimizer",
    ),
    fault(
        "after a NaN the weights move on",
        "megacore/step.py",
        "stats.finite if halted is None else stats.finite & ~halted",
        "stats.finite",
        TRAINER + "test_a_loss_that_is_no_number_stops_and_the_weights_are_those_before",
    ),
    # -- collectives and linears
    fault(
        "a gather puts the parts in the wrong order",
        "parallel/collectives.py",
        "parts = out.chunk(group.size)",
        "parts = out.chunk(group.size)[::-1]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "a scatter hands out the wrong slices",
        "parallel/collectives.py",
        "parts = x.chunk(group.size)",
        "parts = x.chunk(group.size)[::-1]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "a gather of features gathers tokens",
        "parallel/collectives.py",
        "return start_all_gather(x.movedim(dim, 0), group).wait().movedim(0, dim)",
        "return start_all_gather(x, group).wait()",
        "tests/parallel/test_collectives.py",
    ),
    fault(
        "a row bias is added on every rank, before the sum",
        "parallel/linear.py",
        "return y if bias is None else y + bias",
        "return y if bias is None else y + bias * group.size",
        *layout("gpt2-tp2"),
    ),
    fault(
        "the input's gradient of a column-parallel linear is the first rank's part alone",
        "parallel/linear.py",
        "dx = start_reduce_scatter(partial, ctx.group) if ctx.sequence",
        "dx = start_reduce_scatter(partial * (ctx.group.index == 0), ctx.group) if ctx.sequence",
        *layout("llama-tp2"),
    ),
    # -- vocabulary and loss
    fault(
        "padded vocabulary has probability",
        "parallel/loss.py",
        "valid = max(0, min(logits.shape[1], self.vocab - start))",
        "valid = logits.shape[1]",
        *layout("llama-tp2"),
    ),
    fault(
        "the embedding does not mask other ranks' tokens",
        "parallel/embedding.py",
        "rows * mine[..., None]",
        "rows",
        *layout("llama-tp2"),
    ),
    fault(
        "padded rows of the embedding are drawn",
        "parallel/random.py",
        "shape = [stop - start for start, stop in zip(low, high, strict=True)]",
        "low, high = [0] * len(sizes), [max(a, b[1]) for a, b in zip(high, box)]\n"
        "        shape = [stop - start for start, stop in zip(low, high, strict=True)]",
        *layout("llama-tp2"),
    ),
    fault(
        "labels are smoothed over the padded vocabulary",
        "parallel/loss.py",
        "loss -= self.label_smoothing / self.vocab * sums[2]",
        "loss -= self.label_smoothing / (logits.shape[1] * self.group.size) * sums[2]",
        *layout("llama-tied-biases-tp4"),
    ),
    fault(
        "the gradient is smoothed over the padded vocabulary",
        "parallel/loss.py",
        "(self.label_smoothing / self.vocab)",
        "(self.label_smoothing / (logits.shape[1] * self.group.size))",
        *layout("llama-tied-biases-tp4"),
    ),
    fault(
        "the loss is divided by this rank's number of tokens",
        "megacore/step.py",
        "return all_reduce_(own, mesh.batch).clamp_(min=1)",
        "return own.clamp_(min=1)",
        *layout("llama-dp2"),
    ),
    fault(
        "ignored labels count as tokens",
        "megacore/step.py",
        "(m.labels != IGNORE).sum()",
        "(m.labels != IGNORE - 1).sum()",
        STEP + "test_loss_and_gradients_are_those_of_torch",
    ),
    fault(
        "ignored labels have a loss",
        "parallel/loss.py",
        "return torch.where(labels != IGNORE, loss, 0.0), log_sum",
        "return loss, log_sum",
        STEP + "test_loss_and_gradients_are_those_of_torch",
    ),
    fault(
        "chunks of the loss forget what the ones before gave the weight",
        "parallel/head_loss.py",
        "dw.addmm_(dlogits.t(), full[rows])",
        "torch.mm(dlogits.t(), full[rows], out=dw)",
        "tests/parity/test_memory.py::test_a_chunked_loss_computes_what_one_process_computes[tied-one-loss5]",
    ),
    fault(
        "each rank has the gradients of its own part of the vocabulary alone",
        "parallel/head_loss.py",
        "start_reduce_scatter(dx, objective.group).wait()",
        "objective.own(dx)",
        "tests/parity/test_memory.py::test_a_chunked_loss_computes_what_one_process_computes[tied-tp2-selective-loss4]",
    ),
    # -- what is kept
    fault(
        "a recomputed block draws other masks",
        "parallel/recompute.py",
        "preserve_rng_state=drops",
        "preserve_rng_state=False",
        "tests/parity/test_memory.py::test_what_is_kept_changes_no_bit[gpt2-dp2-full]",
    ),
    fault(
        "what is kept in host memory is taken for what its storage held before",
        "parallel/saved.py",
        "return tensor.untyped_storage()._cdata, tensor._version",
        "return tensor.untyped_storage()._cdata, 0",
        "tests/parallel/test_saved.py",
    ),
    fault(
        "a view that comes back begins where its storage begins",
        "parallel/saved.py",
        "self.offset, self.size, self.stride",
        "0, self.size, self.stride",
        "tests/parity/test_memory.py::test_what_is_kept_changes_no_bit[llama-one-none-offload]",
    ),
    # -- what ranks and stages hold
    fault(
        "ranks share the wrong kv head",
        "parallel/layout.py",
        "head = part * size // parts",
        "head = part % size",
        *layout("llama-tp4"),
    ),
    fault(
        "uneven layers are on the wrong stage",
        "parallel/layout.py",
        "start = sum(self.layers[:virtual])",
        "start = sum(self.layers) // len(self.layers) * virtual",
        *layout("llama-tp2-pp2-uneven"),
    ),
    Fault(
        "the chunks of a stage follow each other",
        "parallel/layout.py",
        (
            ("v % self.mesh.pp for v, count", "v // self.chunks for v, count"),
            (
                "virtual = chunk * self.mesh.pp + stage\n        start",
                "virtual = stage * self.chunks + chunk\n        start",
            ),
        ),
        layout("llama-pp2-v2"),
    ),
    fault(
        "initial values depend on the rank",
        "parallel/random.py",
        "key(seed, shard.name, label, block)",
        "key(seed, shard.name, label, block, box)",
        *layout("llama-tp2"),
    ),
    # -- the pipeline
    fault(
        "a gradient goes to the wrong microbatch",
        "parallel/pipeline/run.py",
        "self.alive.pop((chunk, m))",
        "self.alive.pop(max(self.alive))",
        *layout("llama-pp2"),
    ),
    fault(
        "messages of the backward channel are taken in another order than they are sent",
        "parallel/pipeline/schedules.py",
        '"backward": plans[(stage + 1) % stages]["backward"],',
        '"backward": plans[(stage + 1) % stages]["backward"][::-1],',
        *layout("llama-tp2-pp2-gpipe"),
    ),
    fault(
        "an activation goes to the wrong chunk",
        "parallel/pipeline/schedules.py",
        'sent["forward"].append(Message((virtual + 1) // stages, action.microbatch))',
        'sent["forward"].append(Message(action.chunk, action.microbatch))',
        "tests/parallel/test_schedules.py",
    ),
    # -- the model
    fault(
        "gate and up are swapped",
        "models/blocks.py",
        "return F.silu(gate).mul_(up)",
        "return F.silu(up).mul_(gate)",
        "tests/models/test_feed_forward.py",
    ),
    fault(
        "rope counts positions by the microbatch",
        "models/decoder.py",
        "return cos[microbatch.positions], sin[microbatch.positions]",
        "return cos[microbatch.positions // microbatch.sequences], sin[microbatch.positions // microbatch.sequences]",
        *layout("llama-one"),
    ),
    fault(
        "every tp rank embeds the positions of the first",
        "models/decoder.py",
        "microbatch.positions.chunk(self.group.size)[self.group.index]",
        "microbatch.positions.chunk(self.group.size)[0]",
        *layout("gpt2-tp2"),
    ),
    fault(
        "tokens see earlier documents",
        "parallel/documents.py",
        "batches = _Batches.of(starts)\n    made = []\n    for batch in batches.parts:\n        queries",
        "batches = _Batches.of(starts[[0, -1]])\n    made = []\n    for batch in batches.parts:\n        queries",
        STEP + "test_documents_that_are_kept_apart_are_sequences_of_their_own",
    ),
    # -- the engine
    fault(
        "data-parallel ranks read the same samples",
        "megacore/data/batches.py",
        "range(position + self._rank * self._micro,",
        "range(position,",
        TRAINER + "test_every_layout_logs_what_one_process_logs[dp2]",
    ),
    fault(
        "evaluation drops out",
        "megacore/trainer.py",
        "        self.model.train(False)\n",
        "",
        TRAINER + "test_evaluation_drops_nothing_and_training_goes_on_dropping",
    ),
    fault(
        "every step has the same dropout masks",
        "megacore/trainer.py",
        "seed = key(self.config.train.seed, step, number)",
        "seed = key(self.config.train.seed, number)",
        TRAINER + "test_masks_differ_between_steps_microbatches_and_ranks",
    ),
    fault(
        "a rank that is asked to end leaves alone",
        "megacore/trainer.py",
        "self.control.largest(self.interrupt.asked, save, *self.saver.news())",
        "(self.interrupt.asked, save, *self.saver.news())",
        TRAINER + "test_one_rank_that_is_asked_to_end_ends_all_after_that_step",
    ),
    fault(
        "a run that goes on begins with the first sample",
        "megacore/trainer.py",
        "self.batches.steps(self.start.samples)",
        "self.batches.steps()",
        RESUME + "test_another_layout_goes_on_with_the_same_numbers[dp2]",
    ),
    fault(
        "a run that goes on corrects its moments' bias as in the first step",
        "megacore/resume.py",
        "        optimizer.updates = start.progress.updates\n",
        "",
        RESUME + "test_another_layout_goes_on_with_the_same_numbers[tp4]",
    ),
    fault(
        "the moments of kv heads shared by ranks are not saved",
        "parallel/sync.py",
        "        for span in spans:\n            span.of(whole)",
        "        for span in spans[:1]:\n            span.of(whole)",
        RESUME + "test_another_layout_goes_on_with_the_same_numbers[tp4]",
    ),
    fault(
        "a checkpoint is written from the live weights",
        "megacore/save.py",
        "            unsigned = host.view(",
        "            self.state.read_into(state, stored.name, host)\n            unsigned = host.view(",
        SAVE + "test_training_goes_on_while_what_was_is_written",
    ),
)


class Stale(Exception):
    """A fault whose text has moved, or tests that fail without it."""


def seeded(source: str, edits: Iterable[tuple[str, str]], where: str) -> str:
    """The source with the fault.

    Raises:
        Stale: a text is not there exactly once.
    """
    for before, after in edits:
        if source.count(before) != 1:
            raise Stale(f"{where}: found {source.count(before)} times instead of once: {before!r}")
        source = source.replace(before, after)
    return source


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in TREE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    pool = folder / IMPATIENT[0]
    pool.write_text(seeded(pool.read_text(), [IMPATIENT[1:]], IMPATIENT[0]))
    return folder


def run_tests(folder: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """(pytest's exit status, its output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *options, *tests]
    # Python tells stale bytecode by whole seconds and the size: faults can be quicker.
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def caught_by(folder: Path, each: Fault) -> str | None:
    """The first test that fails with the fault; None if it survives."""
    path = folder / each.file
    whole = path.read_text()
    path.write_text(seeded(whole, each.edits, f"{each.file} ({each.name})"))
    try:
        status, output = run_tests(folder, each.tests, "-x")
    finally:
        path.write_text(whole)
    if status == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status != 1 or found is None:
        raise Stale(f"{each.name}: pytest ended with status {status}:\n{output}")
    return found[1].removeprefix("tests/")


def check(faults: Sequence[Fault]) -> int:
    """Seed each fault, print the table -> how many survive."""
    survived = 0
    with tempfile.TemporaryDirectory() as made:
        folder = copy_tree(Path(made))
        for each in faults:
            seeded((folder / each.file).read_text(), each.edits, f"{each.file} ({each.name})")
        start = time.perf_counter()
        tests = sorted({test for each in faults for test in each.tests})
        status, output = run_tests(folder, tests)
        if status:
            raise Stale(f"without any fault pytest ends with status {status}:\n{output}")
        print(f"{len(tests)} tests pass without a fault ({time.perf_counter() - start:.0f} s)", flush=True)
        width = max(len(each.name) for each in faults)
        for each in faults:
            start = time.perf_counter()
            catcher = caught_by(folder, each)
            survived += catcher is None
            seconds = time.perf_counter() - start
            print(f"{each.name:<{width}}  {catcher or 'SURVIVES'}  ({seconds:.0f} s)", flush=True)
    print(f"{len(faults) - survived} of {len(faults)} faults are caught")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the faults and seed none")
    arguments = parser.parse_args()
    chosen = [each for each in FAULTS if any(word in each.name for word in arguments.only or [""])]
    if not chosen:
        parser.error(f"no fault has {arguments.only} in its name; --list prints them")
    if arguments.list:
        print("\n".join(f"{each.name} ({each.file})" for each in chosen))
        return 0
    try:
        return 1 if check(chosen) else 0
    except Stale as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
