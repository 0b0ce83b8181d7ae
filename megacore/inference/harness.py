"""Tasks of lm-evaluation-harness (`lm_eval`, EleutherAI), asked of the parallel model. Only who has it imports this.

Every rank evaluates all of a task: the requests are the same everywhere, and so are the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from megacore.inference.evaluation_data import LONGEST
from megacore.inference.generation import Ending, generate
from megacore.inference.perplexity import log_likelihoods
from megacore.inference.sampling import Greedy
from megacore.inference.texts import Texts
from megacore.models.assemble import Model
from megacore.store.io.errors import StoreError

_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature"}


class HarnessModel(TemplateLM):
    """A model as the harness asks it: log-likelihoods, and greedy texts. ``model``: this rank's part of it; ``texts``:
    its tokenizer; ``tokens``: tokens that are computed at once, at least a request; ``batch``: texts that are generated
    at a time."""

    def __init__(self, model: Model, texts: Texts, tokens: int = 4096, batch: int = 8) -> None:
        if texts.end is None:
            raise StoreError(f"the tokenizer of {texts.folder.path} has no token that ends a text: tasks need one")
        super().__init__()
        self._model, self._texts, self._tokens, self._batch = model, texts, tokens, batch
        self.max_length = model.config.max_positions or LONGEST

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
                settings = normalize_gen_kwargs(requests[together[0]].args[1])
                made = self._greedy([requests[number].args[0] for number in together], settings)
                for number, text in zip(together, made, strict=True):
                    found[number] = text
        return found

    def _greedy(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Return the texts behind contexts, up to the first of the stops."""
        if settings["do_sample"] or settings.keys() - _SETTINGS:
            raise StoreError(f"texts are generated greedily, and a task asks for {settings}")
        most, stops = settings["max_gen_toks"], [each for each in settings["until"] if each]
        room = self.max_length - most
        if room < 1:
            raise StoreError(f"a task asks for texts of {most} tokens, and the model has {self.max_length} positions")
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


def load(tasks: Sequence[str], folder: Path | None) -> TaskManager:
    """Return what knows the tasks, once their data are there. Raises StoreError: some are not known."""
    manager = _manager(tasks, folder)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        where = "" if folder is None else f", nor is it in {folder}"
        raise StoreError(f"lm_eval has no task {', '.join(unknown)}{where}: `lm_eval ls tasks` lists them")
    manager.load(list(tasks))
    return manager


def measure(
    model: HarnessModel, tasks: Sequence[str], manager: TaskManager, shots: int | None, limit: int | None
) -> dict[str, Any]:
    """Return what the harness says of a model on some tasks, the same on all ranks, which all call this. ``shots``:
    examples before each question; None for the tasks' own number; ``limit``: the most questions of each task; None for
    all."""
    return simple_evaluate(
        model, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager, log_samples=False
    )


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
