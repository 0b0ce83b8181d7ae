"""Whether the machine has the files, folders and packages that a config needs. Nothing here imports torch."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.checks.rules import range_problems
from megacore.config import EXAMPLES, RANGES, Config, CorpusConfig, has_examples
from megacore.run_lock import held, holder
from megacore.say import brief
from megacore.store.io import hub
from megacore.store.io.files import leaves
from megacore.store.io.hub import HubName
from megacore.store.io.objects import ObjectPath, place
from megacore.store.io.strict_json import StoreError

RUN_FILES = ("config.yaml", "metrics.jsonl", "experts.jsonl", checkpoints.FOLDER)
"""The files that a run leaves in its folder; a folder that has one of them is not written to again unless the run goes
on."""
FOLDERS = (checkpoints.FOLDER, "examples", "tensorboard", "wandb")
"""Those that a run makes in its folder."""


def surroundings(config: Config, led: bool = False) -> list[str]:
    """Return missing token files, folders that cannot be used, and packages that a setting needs; ``led``: another
    process looks at what all of them share over a network."""
    shared = () if led else (_unusable_folder, _unusable_push)
    missing = list[str]()
    for look in (_missing_files, _unusable_out, *shared, _unusable_export, _unusable_offload_folder, _missing_packages):
        try:
            missing += look(config)
        except (OSError, ValueError) as error:  # a name that no file can have
            missing.append(f"a path of the recipe cannot be used: {brief(str(error))}")
    return missing


def _missing_files(config: Config) -> Iterator[str]:
    for key, corpora in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for corpus in corpora:
            yield from (f"{key}: {problem}" for problem in _missing(corpus))
    template = config.chat.template
    if template is not None and not Path(template).is_file():
        yield f"chat.template: there is no {template}: name a file, or leave it null for the model's own"


def _missing(corpus: CorpusConfig) -> Iterator[str]:
    """Yield the problem of a missing token file or file of examples, and what another path may have meant."""
    if corpus.is_imported:
        return
    path = Path(corpus.path)
    if corpus.streams is not None and corpus.hub_name is None:
        if not path.exists():
            yield f"there is no {path}: name a file or folder of texts, or a data set of the hub (OWNER/NAME@REVISION)"
        return
    if corpus.hub_name is not None or any(has_examples(name) for _, _, names in os.walk(path) for name in names):
        return  # what they hold is looked at later
    ends = ("",) if corpus.has_examples else (".bin", ".idx")
    missing = [f"{path}{end}" for end in ends if not Path(f"{path}{end}").is_file()]
    if not missing:
        return
    if corpus.path.endswith((".bin", ".idx")):
        yield f"{path} is a file: name the prefix, {path.with_suffix('')}"
    elif path.is_dir():
        names = [str(each.with_suffix("")) for each in sorted(path.glob("*.idx"))]
        yield f"{path} is a folder: name one of {', '.join(names)}" if names else f"{path} is a folder: {_KINDS}"
    elif path.exists():
        yield f"{path} is neither a token file nor a file of examples: {_KINDS}"
    elif corpus.has_examples:
        yield f"there is no {path}"
    else:
        name = HubName.parse(corpus.path)
        more = f", or name a data set of the hub by {name}@main" if name is not None and "/" in corpus.path else ""
        yield f"there is no {' and no '.join(missing)}: make them with `megacore tokenize`{more}"


_KINDS = (
    "token files are a pair NAME.bin, NAME.idx, named without the ending, which `megacore tokenize` makes of text, and "
    f"files of examples end in {', '.join(EXAMPLES[:-1])} or {EXAMPLES[-1]}"
)


def readable(config: Config) -> bool:
    """Return whether the data can be looked at, whatever else is wrong with a config."""
    numbers = (key for key in RANGES if key.startswith("data."))
    wrong = (message for key in numbers for message in range_problems(config, key, RANGES[key]))
    return bool(config.data.train) and not any(wrong) and not any(_missing_files(config))


def without_a_model(config: Config) -> list[str]:
    """Return the problem of fine-tuning that would begin with random weights, if it is one."""
    section = config.checkpoint
    going_on = section.resume is not None and (
        section.resume != AUTO or checkpoints.complete(checkpoints.folder_of(config.out, section.folder))
    )
    if section.init is not None or going_on:
        return []
    return [
        "finetune starts from a model that there is: name its Hugging Face folder, its name on the hub or a checkpoint "
        "by --init MODEL (`megacore train` starts from random weights)"
    ]


def _unusable_out(config: Config) -> Iterator[str]:
    out, resume = Path(config.out), config.checkpoint.resume
    there = [name for name in RUN_FILES if (out / name).exists()]
    if elsewhere := [name for name in FOLDERS if leaves(out / name, out)]:
        links = ", ".join(f"{name} leads to {os.path.realpath(out / name)}" for name in elsewhere)
        yield f"out ({out}): {links}, and a run writes to its own folder alone: put all of it there, by out="
    elif who := holder(out):
        yield held(out, who)
    elif there and resume is None:
        yield (
            f"out ({out}) already holds a run ({', '.join(there)}): choose another out=, move it away, or go on with "
            f"it by checkpoint.resume={AUTO}"
        )
    elif there and resume != AUTO and config.checkpoint.folder is None:
        yield from _not_its_own("out", out, checkpoints.folder_of(out), str(resume))
    else:
        yield from _cannot_be_made("out", out)


def _cannot_be_made(key: str, folder: Path) -> Iterator[str]:
    """Yield why a folder cannot be made. Only making it tells: permissions say nothing of a full disk."""
    parent = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    if not parent.is_dir():
        yield f"{key} ({folder}) cannot be made, {parent} is not a folder: choose another {key}="
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megacore-", dir=parent))
    except OSError as error:
        yield (
            f"{key} ({folder}) cannot be written to, no folder can be made in {parent} ({error.strerror}): make that "
            f"possible, or choose another {key}="
        )


def _unusable_export(config: Config) -> Iterator[str]:
    """Yield why an export would fail. It gets its name when training is over: there must be nothing, or an empty
    folder."""
    key = "checkpoint.export"
    if config.checkpoint.export is None:
        return
    folder = Path(config.checkpoint.export)
    if Path(config.out).resolve().is_relative_to(folder.resolve()):
        yield f"{key} ({folder}) holds out ({config.out}): choose a folder in it, or beside it"
    elif folder.is_dir() and any(folder.iterdir()):
        if _is_done(config):  # and was ended when it had made it, or while it told so
            return
        yield f"{key} ({folder}) exists and is not empty: choose another folder, or remove it"
    else:
        # Where it is an empty folder, it is replaced: what must be writable is the folder around it.
        yield from _cannot_be_made(key, folder.parent if folder.is_dir() else folder)


def _unusable_push(config: Config) -> Iterator[str]:
    """Yield why the export cannot be uploaded, which the first rank does."""
    push = config.checkpoint.push
    if push is not None and config.checkpoint.export is not None:  # or else it is refused all the same
        yield from (f"checkpoint.push ({push}) {problem}" for problem in hub.push_problems(push))


def _is_done(config: Config) -> bool:
    """Return whether a run goes on by itself from the checkpoint of its last step."""
    try:
        steps = checkpoints.complete(checkpoints.folder_of(config.out, config.checkpoint.folder))
    except StoreError:  # which is said elsewhere
        return False
    # The last step of these is not known yet, and an export that is there stays as it is.
    open_end = config.train.epochs is not None or config.evaluate.patience is not None
    last = 1 if open_end else config.train.steps
    return config.checkpoint.resume == AUTO and max(steps, default=0) >= last


def _unusable_folder(config: Config) -> Iterator[str]:
    """Yield why a run cannot keep its checkpoints in an object store."""
    key, folder, resume = "checkpoint.folder", config.checkpoint.folder, config.checkpoint.resume
    if folder is None:
        return
    try:
        path = place(folder)
        if not isinstance(path, ObjectPath):
            yield f"{key} ({folder}) is no URL of an object store such as s3://bucket/prefix: leave it out for a disk's"
        elif resume is None and checkpoints.complete(path):
            yield f"{key} ({path}) already holds a run: choose another, or go on with it by checkpoint.resume={AUTO}"
        elif resume not in (None, AUTO) and checkpoints.complete(path):
            yield from _not_its_own(key, path, path, str(resume))
    except StoreError as error:
        yield f"{key}: {error}"


def _not_its_own(key: str, holds: Path, folder: Path, named: str) -> Iterator[str]:
    """Yield why a checkpoint is not the one that the run of a folder resumes from: its own newest. A run that began
    from another's, and has none of its own yet, begins so again."""
    steps, resume = checkpoints.complete(folder), checkpoints.newest_of(place(named))
    here = [step for step, path in steps.items() if path.resolve() == resume.resolve()]
    newer = [path.name for step, path in steps.items() if here and step > here[0]]
    if not here and (steps or not _follow(holds, resume)):
        yield f"{key} ({holds}) already holds a run, and {resume} is not a checkpoint of it: choose another {key}="
    elif newer:
        yield (
            f"checkpoint.resume ({resume}) is older than {', '.join(newer)} in the same folder: choose another {key}=, "
            "or move those away"
        )


def _follow(out: Path, resume: Path) -> bool:
    """Return whether the records in a run's folder, if there are any, come after a checkpoint, as those of a run that
    began from it do."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            first = json.loads(file.readline() or "null")
        return first is None or first["step"] > checkpoints.step_of(resume)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError, StoreError):
        return False


def _unusable_offload_folder(config: Config) -> Iterator[str]:
    if config.memory.offload_folder is not None:
        yield from _cannot_be_made("memory.offload_folder", Path(config.memory.offload_folder))


def _missing_packages(config: Config) -> Iterator[str]:
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    for name, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(name) is None:
            yield f"log.{name} needs the package {name}: pip install 'megacore[{name}]', or leave log.{name} out"
    if config.evaluate.tasks and importlib.util.find_spec("lm_eval") is None:
        yield "evaluate.tasks needs the package lm_eval: pip install 'megacore[lm-eval]', or leave evaluate.tasks out"
    tables = [each.path for each in (*config.data.train, *config.data.validation) if each.path.endswith(_OF_PYARROW)]
    if tables and importlib.util.find_spec("pyarrow") is None:
        yield f"data: {', '.join(tables)}: such files need the package pyarrow: pip install 'megacore[data]'"


_OF_PYARROW = (".parquet", ".arrow", ".zst")
