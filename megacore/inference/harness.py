"""Tasks of lm-evaluation-harness (`lm_eval`, EleutherAI), asked of the parallel model. Only who has it imports this.

Every rank evaluates all of a task: the requests are the same everywhere, and so are the answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from megacore.inference.evaluation_data import LONGEST
from megacore.inference.generation import Ending, generate
from megacore.inference.perplexity import log_likelihoods
from megacore.inference.sampling import Greedy
from megacore.inference.texts import Texts
from megacore.models.assemble import Model
from megacore.store.io.errors import StoreError

Tasks = dict[str, Any]
"""Tasks and groups of them as the harness has loaded them, with their data."""
_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature"}


class HarnessModel(TemplateLM):
    """A model as the harness asks it: log-likelihoods, and greedy texts. ``model``: this rank's part of it; ``texts``:
    its tokenizer; ``tokens``: tokens that are computed at once, at least a request; ``batch``: texts that are generated
    at a time."""

    def __init__(self, model: Model, texts: Texts, tokens: int = 4096, batch: int = 8) -> None:
        if texts.end is None:
            raise StoreError(f"the tokenizer of {texts.path} has no token that ends a text: tasks need one")
        super().__init__()
        self._model, self._texts, self._tokens, self._batch = model, texts, tokens, batch
        self.max_length = model.config.max_positions or LONGEST

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        return self._model.parameters.mesh.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0; its own ``rank`` would have the harness share out questions."""
        return self._model.parameters.mesh.rank == 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._texts.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self.eot_token_id if self._texts.begin is None else self._texts.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self._texts.encode(string, add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, Sequence[int], Sequence[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        asked = [(context, continuation) for _, context, continuation in requests]
        # The longest first: what does not fit into memory is found at once, and windows of one size go together.
        order = sorted(range(len(asked)), key=lambda i: -len(asked[i][0]) - len(asked[i][1]))
        found = log_likelihoods(self._model, [asked[i] for i in order], self._tokens)
        return [each for _, each in sorted(zip(order, found, strict=True))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = list[tuple[int, Sequence[int], Sequence[int]]]()
        for number, request in enumerate(requests):
            cut = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += ((number, *utils.make_disjoint_window(each)) for each in cut)
        sums = [0.0] * len(requests)
        for (number, *_), (found, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += found
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        found = [""] * len(requests)
        numbered = [(repr(request.args[1]), number) for number, request in enumerate(requests)]
        for _, alike in groupby(sorted(numbered), key=lambda each: each[0]):
            numbers = [number for _, number in alike]
            for at in range(0, len(numbers), self._batch):
                together = numbers[at : at + self._batch]
                settings = self._settings(requests[together[0]].args[1])
                made = self._greedy([requests[number].args[0] for number in together], settings)
                for number, text in zip(together, made, strict=True):
                    found[number] = text
        return found

    def check(self, tasks: Tasks) -> None:
        """Raise StoreError: a task asks for what the model is not asked for."""
        for name, task in tasks["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise StoreError(f"task {name} runs code that the model writes, or shows it images: leave it out")
            if task.get_config("output_type") == "generate_until":
                self._settings(task.get_config("generation_kwargs"))

    def _settings(self, given: Any) -> dict[str, Any]:
        """Return how a task wants texts. Raises StoreError: not as they are generated."""
        settings: dict[str, Any] = normalize_gen_kwargs(given)
        if settings["do_sample"] or settings.keys() - _SETTINGS:
            raise StoreError(f"texts are generated greedily, and a task asks for {settings}")
        if (most := settings["max_gen_toks"]) >= self.max_length:
            raise StoreError(f"a task asks for texts of {most} tokens, and the model has {self.max_length} positions")
        return settings

    def _greedy(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Return the texts behind contexts, up to the first of the stops."""
        most, stops = settings["max_gen_toks"], [each for each in settings["until"] if each]
        room = self.max_length - most
        prompts, made = [self.tok_encode(each)[-room:] for each in contexts], [list[int]() for _ in contexts]
        ending = Ending(frozenset({self.eot_token_id}), most, self._model.config.max_positions)
        done = set[int]()
        for step in generate(self._model, prompts, Greedy(), ending, len(prompts)):
            for new in step:
                if new.prompt in done:  # it is computed on beside the others
                    continue
                made[new.prompt].append(new.token)
                text = self._texts.decode(made[new.prompt]) if stops else ""
                if new.last or any(stop in text for stop in stops):
                    done.add(new.prompt)
            if len(done) == len(prompts):
                break
        return [postprocess_generated_text(self._texts.decode(each), stops, None) for each in made]


def load(tasks: Sequence[str], folder: Path | None = None, shots: int | None = None) -> Tasks:
    """Load tasks and their data. ``shots``: examples before each question; None for the tasks' own number. Raises
    StoreError: some are not known, or cannot be loaded."""
    manager = _manager(tasks, folder)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        where = "" if folder is None else f", nor is it in {folder}"
        raise StoreError(f"lm_eval has no task {', '.join(unknown)}{where}: `lm_eval ls tasks` lists them")
    try:
        loaded: Tasks = manager.load(list(tasks))
    except Exception as error:  # of a network, or of code that is not ours
        raise StoreError(f"{', '.join(tasks)} cannot be loaded: {type(error).__name__}: {error}") from error
    for task in loaded["tasks"].values():  # of those that want none, there are none
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", (own if shots is None or own == 0 else shots) or 0)
    return loaded


def measure(model: HarnessModel, tasks: Tasks, limit: int | None = None, bootstraps: int = 100_000) -> dict[str, Any]:
    """Return what the harness says of a model on some tasks, the same on all ranks, which all call this; rank 0 alone
    shows progress. ``limit``: the most questions of each task; None for all; ``bootstraps``: samples that errors
    without a formula come from."""
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(_SEED)
    with _seeded(model.device), nullcontext() if model.is_first else _without_bars():
        return evaluate(model, tasks, limit=limit, bootstrap_iters=bootstraps, log_samples=False)


def scores(model: HarnessModel, tasks: Tasks) -> dict[str, float]:
    """Return {"tasks/NAME/METRIC": value} of all questions; ranks are as of :func:`measure`."""
    found = measure(model, tasks, bootstraps=0)["results"]
    return {
        f"tasks/{name}/{metric.removesuffix(',none')}": float(value)
        for name, metrics in found.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "," in metric and "_stderr," not in metric
    }


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seed what tasks may draw from as the harness's own command does, and leave all of it as it was."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        random.seed(0)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def _without_bars() -> Iterator[None]:
    """Have no progress bar drawn, also where the harness would always draw one."""
    plain = tqdm.__init__

    def hidden(self: tqdm[Any], *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **{**named, "disable": True})

    tqdm.__init__ = hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        tqdm.__init__ = plain  # type: ignore[method-assign]


_SEED = 1234
"""The harness's own."""


def table(found: dict[str, Any]) -> str:
    """Return the harness's own table of what :func:`measure` has found."""
    return utils.make_table(found)


def _manager(tasks: Sequence[str], folder: Path | None) -> TaskManager:
    """Return what knows the tasks of a folder alone, if these are all there: to know the others takes a while."""
    if folder is not None:
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if all(own.match_tasks([task]) for task in tasks):
            return own
    return TaskManager(include_path=None if folder is None else str(folder))
