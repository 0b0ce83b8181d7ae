"""The commands of README.md and docs/: the real parsers and configs take them, and they run as they stand."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hub import save

from megacore.config import SECTIONS
from megacore.data import tokenizer
from megacore.recipe import load, recipes
from megacore.tools.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SCRIPTS = {
    "launch/pretrain.sh": ["train"],
    "launch/finetune.sh": ["finetune"],
    "launch/quickstart.sh": ["train", "quickstart"],
    "launch/slurm.sbatch": ["train"],
}
"""{a script: the command that its arguments go to}."""
OTHERS = ("cat", "hf", "kill", "launch/test.sh", "llama-server", "lm_eval", "pip", "tail", "torchrun", "touch")
"""Programs whose arguments are not ours to check."""
NOT_RUN = {
    "launch/quickstart.sh": "5 minutes; the second block of README.md does the same with less",
    "runs/quickstart": "what the quickstart made",
    "megacore train quickstart": "data of the quickstart",
    "launch/recipes/experts.yaml": "minutes, on data of the quickstart",
    "launch/test.sh": "the suite itself",
    "tests/cuda/steps.py --write": "writes into the checkout",
    "pip install": "the network",
    "HuggingFaceTB/": "the network; a small model stands in the place of SmolLM2",
    "--tasks ": "the network, or tasks of the reader",
    "runs/glm": "a large model, with layers that draft",
    "runs/adapters/checkpoints/step-00000032 --base": "what docs/finetune.md made",
    "runs/books": "texts of the reader",
    "runs/uneven": "runs of the reader",
    "own.py": "a file of the reader",
    "recipe.yaml": "a file of the reader",
    "llama-server": "no program of ours",
    "python benchmarks/": "hours, or a GPU",
    "megacore train llama-3": "GPUs",
    "runs/llama-": "a run on GPUs",
}
"""{a part of a command that is not run: why}. Nor is one run that leaves a name to the reader (RECIPE), or "...\""""
NO_KEYS = {
    *("context.attention", "context.compressed", "context.indexed", "context.states"),
    *("experts.down", "experts.jsonl", "experts.png", "experts.up", "loss.png", "memory.png", "train.py", "train.sh"),
}
"""What looks like keys: files, weights, and what blocks are given."""
ALONE = ["README.md", "docs/finetune.md", "docs/generate.md", "docs/pipelines.md"]
CASES = [*((page,) for page in ALONE), tuple(page for page in PAGES if page not in ALONE)]
"""Pages whose commands run one after the other, in one folder."""
API_CHATS = ".venv/bin/python launch/api_chats.py runs/api --facts 60"
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
_PROGRAM = rf"(?:\.venv/bin/|\./)?(?:megacore|python|sbatch|{'|'.join(map(re.escape, [*SCRIPTS, *OTHERS]))})"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*{_PROGRAM}(?: \S.*| +#.*)?")
_LEFT_TO_THE_READER = re.compile(r"(?<![\w./@-])[A-Z][A-Z_]*(?![\w.=-])|\.\.\.")


def lines(page: str) -> Iterator[tuple[str | None, str]]:
    """The lines of a page and the language of the block that they stand in, None in prose; long ones are joined."""
    language = None
    for line in re.sub(r"\\\n *", "", (ROOT / page).read_text()).splitlines():
        if fence := re.match(r" *```(\w*)", line):
            language = fence[1] if language is None else None
        else:
            yield ("" if language is None and line.startswith("    ") else language), line.strip()


def commands(page: str) -> list[str]:
    """The commands of a page's code, in order. Raises AssertionError: a block for bash has something else."""
    code = [(language, line) for language, line in lines(page) if language in ("", "bash") and line]
    strange = [line for language, line in code if language == "bash" and not _COMMAND.fullmatch(line)]
    assert not strange, f"{page}: no known program in {strange}"
    return [line for _, line in code if _COMMAND.fullmatch(line)]


def words_of(command: str) -> list[str]:
    """The words of a command, without variables before it and comments and other programs behind it."""
    words = shlex.split(command, comments=True)
    ends = [at for at, word in enumerate(words) if word in ("&&", "|", ">")]
    words = words[: min(ends, default=len(words))]
    while re.match("[A-Z_]+=", words[0]):
        del words[0]
    return [words[0].removeprefix(".venv/bin/").removeprefix("./"), *words[1:]]


class Parsed(BaseException):
    """The end of a program that has parsed its arguments, which no handler of its own takes."""


def taken(words: list[str], whole: bool) -> list[str]:
    """The overrides of a command that its own parser takes, or, where it is a part of one, whose options that has.
    Raises ValueError: it does not."""
    program, *given = words
    if program == "python":
        file = ROOT / (given[1].replace(".", "/") + ".py" if given[0] == "-m" else given[0])
        if not (ROOT / file.relative_to(ROOT).parts[0]).is_dir():  # of another project
            return []
        beside = [each.read_text() for each in file.parent.glob("*.py")]
        options = [word for word in given if word.startswith("--")]
        strange = [word for word in options if not any(f'"{word}"' in text for text in beside)]
        if strange or not file.exists():
            raise ValueError(f"{file.relative_to(ROOT)} is not there, or has no option {strange}")
        return []
    if program == "sbatch":
        program, *given = [word for word in given if not word.startswith("--")]
    given = [*SCRIPTS.get(program, []), *given]
    if program in OTHERS or not given or given[0] == "--version":
        return []
    if given[0] not in COMMANDS:
        raise ValueError(f"there is no command {given[0]}")
    overrides = [word for word in given if re.match(r"[a-z]+(\.\w+|\[\d+\])*=", word)]

    def parsed(parse: Callable[..., Any]) -> Callable[..., NoReturn]:
        def once(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> NoReturn:
            options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            if strange := sorted(options - parser._option_string_actions.keys()):
                parser.error(f"there is no option {strange[0]}")
            raise Parsed(parse(parser, arguments) if whole else None)

        return once

    def error(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(message)

    with pytest.MonkeyPatch.context() as patch, suppress(Parsed):
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, parsed(getattr(argparse.ArgumentParser, name)))
        patch.setattr(argparse.ArgumentParser, "error", error)
        importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
    return overrides


def recipe_of(words: list[str]) -> str:
    """The recipe that a command names; where the reader is to name one, one that comes along."""
    named = [word for word in words if word in recipes() or re.fullmatch(r"[\w./-]+/[\w./-]+\.yaml", word)]
    return named[0] if named else "quickstart"


def of_keys(span: str) -> list[str]:
    """The overrides that a span of prose is; of a key without a value none. Raises ValueError: there is no such key."""
    key = re.fullmatch(r"([a-z]+)\.([a-z_]+)(?:(=|: |\[).*)?", span)
    if key is None or key[1] not in SECTIONS or span in NO_KEYS:
        return []
    if key[2] not in {each.name for each in fields(SECTIONS[key[1]])}:
        raise ValueError(f"there is no key {key[1]}.{key[2]}")
    if re.search("[=:] ?[A-Za-z]$", span):  # whatever the reader takes
        return []
    if key[3] == ": " or span.count("=") == 1:  # one key, whose value may have spaces
        return [re.sub("=|: ", "=", span, count=1)]
    return shlex.split(span) if key[3] == "=" else []


def test_parsers_and_configs_take_every_command_and_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong, found = list[str](), 0
    for page in PAGES:
        prose = "\n".join(line for language, line in lines(page) if language is None)
        spans = [" ".join(span.split()) for span in re.findall("`([^`]+)`", prose)]
        for text, whole in [*((each, True) for each in commands(page)), *((each, False) for each in spans)]:
            is_command = _COMMAND.fullmatch(text) and len(words := words_of(text)) > 1
            try:
                overrides = taken(words, whole) if is_command else of_keys(text)
                load(recipe_of(words) if is_command else "quickstart", overrides)
            except ValueError as error:
                wrong.append(f"{page}: {text}: {error}")
            found += bool(is_command or overrides)
    assert not wrong, "\n".join(wrong)
    assert found > 250


def test_what_is_not_run_is_there() -> None:
    every = [command for page in PAGES for command in commands(page)]
    assert not [part for part in NOT_RUN if not any(part in command for command in every)]


def run_of(pages: tuple[str, ...]) -> list[str]:
    """The commands of pages that are run; those of several cases are run in the last."""
    later = {command for each in CASES[CASES.index(pages) + 1 :] for page in each for command in commands(page)}
    found = [command for page in pages for command in commands(page) if command not in later]
    left_out = [each for each in found if any(part in each for part in NOT_RUN) or _LEFT_TO_THE_READER.search(each)]
    return [each for each in found if each not in left_out]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the pages speak of: files, the environment, and a small model in the place of SmolLM2."""
    for name in ("README.md", "docs", "launch", "parallel"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
    model = save("llama", tmp_path / "runs/smollm2", vocab_size=512, max_position_embeddings=2048, **sizes)
    tokenizer.train([(ROOT / page).read_text() for page in PAGES], 512, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.in_turn(3 * len(CASES))  # most take a minute
@pytest.mark.parametrize("pages", CASES, ids=lambda pages: pages[0])
def test_commands_run_as_they_stand(pages: tuple[str, ...], checkout: Path) -> None:
    path = os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    # The questions and chats of docs/finetune.md, of which docs/generate.md speaks.
    before = [API_CHATS] if pages == ("docs/generate.md",) else []
    for command in [*before, *run_of(pages)]:
        with (checkout / "said").open("w+") as said:
            ended = subprocess.run(
                ["bash", "-c", command],
                cwd=checkout,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=300,
            )
        assert ended.returncode == 0, f"{command}\n{(checkout / 'said').read_text()[-3000:]}"
