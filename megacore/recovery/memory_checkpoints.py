"""Checkpoints in the memory of the machines: a run that is started again goes on from there, and loses few steps.

Every rank writes what it would write to a disk into ``/dev/shm``, in the same format and as seldom as its cost demands;
the newest two stay. The ranks of a machine share a folder, with the index of all files. Of several machines each sends
its files to a partner in the background, so that what a machine takes with it is elsewhere (as in Gemini, Wang et al.
2023, doi 10.1145/3600006.3613145).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from io import FileIO
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO, KEPT_IN_MEMORY
from megacore.config import CheckpointConfig, Config
from megacore.control import Control
from megacore.recovery import partners
from megacore.recovery.partners import HeldFiles, Machines, SpreadCheckpoint, TensorTypes
from megacore.resources import free_memory
from megacore.say import say
from megacore.store.io.files import flock, is_at, open_lock
from megacore.store.io.strict_json import StoreError, read_file
from megacore.store.tensor_files.publish import remove_leftovers, replace_file, spelled
from megacore.store.tensor_files.tensors import free_bytes, os_errors
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training import progress
from megacore.training.resume import Setup, Start, check_round, go_on
from megacore.training.save import SaveError, Saver
from megacore.training.step import Phase
from megacore.training.trainer import Callback, Trainer

MEMORY = Path("/dev/shm")
"""The file system that lies in memory."""
RUN_ID = "run.id"
"""The file in the folder of a run that says which folder in memory is its."""
LEFTOVER_S = 3600.0
"""Seconds after which the folder of a run without a process is removed by the next run on the machine."""
RETRY_S = 300.0
"""Seconds until the next try after one that has failed."""
_NONE = "No checkpoints are kept in memory"
_HELD = "held"
"""The file that every rank of a run holds."""


def private(folder: Path) -> Path:
    """Make a folder that this user alone may enter, if it is not there. Raises StoreError: something else has its name,
    or others may enter it."""
    with os_errors(folder):
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StoreError(f"{folder}: is no folder that this user alone may enter: have it removed")
    return folder


def sweep(user: Path, older_than_s: float, but: str = "", only: str = "*") -> None:
    """Remove the folders of a user's runs that no process holds any more, and that were begun or saved so many seconds
    ago: ``only`` those of a pattern, ``but`` one that stays."""
    for folder in sorted(user.glob(only)):
        with suppress(StoreError, OSError):
            if folder.name != but and time.time() - private(folder).stat().st_mtime >= older_than_s:
                with open_lock(folder / _HELD) as lock:
                    if flock(lock, fcntl.LOCK_EX):
                        shutil.rmtree(folder)


def shared(root: Path, control: Control) -> int:
    """Return the number of successive ranks that share a file system in memory: those of several launchers, where they
    are on one machine. Raises StoreError: machines have various numbers; on all ranks."""

    def place() -> tuple[str, int, str]:
        with os_errors(root):
            return Path("/proc/sys/kernel/random/boot_id").read_text(), root.stat().st_dev, str(root)

    told = control.exchange(control.attempt(place))
    sizes = [len([*ranks]) for _, ranks in itertools.groupby(told)]
    if len({*map(str, told)}) < len(sizes) or {*sizes[:-1], max(sizes)} != {sizes[0]}:
        raise StoreError(f"machines have various numbers of ranks: {', '.join(map(str, sizes))}")
    return sizes[0]


def known_as(config: Config) -> tuple[str, str]:
    """Return the number of a run, and that of another one in whose place it begins, if there is one. Raises StoreError:
    it cannot be noted in the folder of the run."""
    path, before = Path(config.out) / RUN_ID, ""
    if path.exists():
        noted = read_file(path, path.parent, 99).decode(errors="replace").strip()
        before = noted if re.fullmatch("[0-9a-f]{32}", noted) else ""
    if before and config.checkpoint.resume == AUTO:
        return before, ""
    known = secrets.token_hex(16)
    with os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, known.encode() + b"\n")
    return known, before


def _opened(config: Config, path: Path, held: Sequence[Mapping[str, TensorTypes]], machines: Machines) -> Start:
    here = Checkpoint.open(path, checked=True)
    checkpoint = SpreadCheckpoint(here.path, here.index, here.files, held, machines, trainer=here.trainer)
    found = go_on(config, checkpoint, checked=True)
    check_round(config, found, machines.control.mesh.shape.dp)
    return replace(found, progress=found.progress.without(config.recovery.skip_samples))


class MemoryCheckpoints(Callback):
    """Saves into memory, and finds there what a run that is started again goes on from. It stands after what saves to
    disk: the end of the run takes the folder away."""

    def __init__(self, root: Path = MEMORY, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._node = 1
        """The number of successive ranks that share a machine."""
        self.folder: Path | None = None
        """The folder of the run's checkpoints in memory; None where there can be none."""
        self._data: Sequence[str] = ()
        self._held: FileIO | None = None
        self._saver: Saver | None = None
        self._costs = deque[float](maxlen=2)
        self._asked = self._began_at = self._blocked_s = self._step_s = self._last = self._due = 0.0
        self._looked = self._is_next = self._failing = self._ended = False

    # -- at a start

    def on_find(self, setup: Setup, start: Start, control: Control) -> Start:
        """Return the newest state in memory, if it is newer and the run goes on by itself (``checkpoint.resume=auto``).

        One that ``start.damaged`` names is removed, and an older one is found, or none.
        """
        self._data = setup.corpora.identities
        if not self._looked and setup.config.recovery.memory:
            self._looked = True
            try:
                self._open(setup.config, control)
            except StoreError as error:
                self._say(control, f"{_NONE}: {error}")
        if self.folder is None or setup.config.checkpoint.resume != AUTO:
            return start
        return self._found(self.folder, setup.config, start, control)

    def _found(self, folder: Path, config: Config, start: Start, control: Control) -> Start:
        first = self._is_first(control)
        refused = {each.path.name for each in start.damaged if each.path.parent.name == folder.name}

        def look() -> list[HeldFiles]:
            if not first:
                return []
            remove_leftovers(folder)
            for name in refused:
                shutil.rmtree(folder / name, ignore_errors=True)
            return partners.held(folder)

        told = control.exchange([asdict(each) for each in control.attempt(look)])
        machines = Machines(control, self._node)
        there = [[HeldFiles(**each) for each in told[ranks[0]]] for ranks in machines.ranks]
        for step, held in partners.whole(there):
            path, others = checkpoints.path_of(folder, step), [each.others if each else {} for each in held]
            if step <= start.progress.step:
                break
            if first and held[machines.here] is None:
                shutil.rmtree(path, ignore_errors=True)  # another one of this step
            try:
                machines.bring(path, others, [max(others, key=len)] * len(others))
                tensors = [each.tensors if each else {} for each in held]
                newer = control.attempt(partial(_opened, config, path, tensors, machines))
            except StoreError as error:
                self._say(control, f"A checkpoint in memory is passed over: {error}")
                continue
            self._drop_after(step, control)
            return replace(newer, damaged=start.damaged)
        self._drop_after(start.progress.step, control)
        return start

    def _drop_after(self, step: int, control: Control) -> None:
        """Remove checkpoints of later steps than that which the run goes on from."""
        if self._saver is not None:
            self._saver.abandon()
        if self.folder is not None and self._is_first(control):
            for later, path in checkpoints.complete(self.folder).items():
                if later > step:
                    shutil.rmtree(path, ignore_errors=True)
        control.largest()

    def _open(self, config: Config, control: Control) -> None:
        """Make the folder of the run on each machine, and hold it on each rank. Raises StoreError: one of them cannot;
        on all ranks."""
        self._node = shared(self._root, control)
        first, user = self._is_first(control), self._root / f"megacore-{os.geteuid()}"
        known, before = control.tell(control.attempt(lambda: known_as(config) if control.mesh.rank == 0 else None))
        folder = user / known

        def make() -> None:
            if first:
                private(user)
                if before:
                    sweep(user, 0, only=before)
                sweep(user, LEFTOVER_S, but=known)
                private(folder)

        def hold() -> FileIO:
            with os_errors(folder):
                lock = open_lock(private(folder) / _HELD)
                if not flock(lock, fcntl.LOCK_SH) or not is_at(lock, folder / _HELD):
                    raise StoreError(f"{folder}: is being removed")
                os.utime(folder)
                return lock

        control.attempt(make)
        self._held = control.attempt(hold)
        self.folder = folder

    def _is_first(self, control: Control) -> bool:
        return control.mesh.rank % self._node == 0

    # -- while it trains

    def on_start(self, run: Trainer) -> None:
        if self.folder is None:
            return
        control, world, send = run.control, run.mesh.shape.world, None
        there = partners.machines(world, self._node)
        if len(there) > 1:
            group = run.mesh.host_group(partners.partners(there))
            send = partial(partners.exchange, group=group, there=there)
        kept, node = CheckpointConfig(keep=KEPT_IN_MEMORY), self._node if send else None
        saver = Saver(self.folder, run.contents, control, kept, node, send, ahead=True)
        try:
            room = self._lack(saver.bytes, saver.carried_bytes, world) if self._is_first(control) else None
            lacks = control.exchange(room)
            if found := [each for each in lacks if each is not None]:
                raise SaveError(found[0])
            saver.reserve()
        except SaveError as error:
            run.tell(f"{_NONE}: {error}")
            return
        self._saver, self._last = saver, self._clock()

    def _lack(self, whole: int, carried: int, world: int) -> str | None:
        """Return why there is no room on this machine for two checkpoints, and what a partner sends, beside a copy from
        which they are written; None where there is."""
        assert self.folder is not None
        here = (whole - carried) * min(self._node, world) // world + carried
        files, free = KEPT_IN_MEMORY * here * (2 if self._node < world else 1), free_memory()
        with suppress(OSError):
            there = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
            if (room := free_bytes(self.folder) + there) < files:
                return f"they need {spelled(files)}, and {self._root} has room for {spelled(room)}"
            if free is not None and free + there < files + here:
                return f"they need {spelled(files + here)} of memory, and {spelled(free + there)} are to spare"
        return None

    def ask(self, run: Trainer) -> Mapping[str, float]:
        if self._saver is None:
            return {}
        self._asked = self._clock()
        busy, failed = self._saver.news()
        waits, due = self._asked < self._due, self._is_next and not run.is_last
        return {"memory.busy": busy, "memory.failed": failed, "memory.wait": waits, "look": due, "keep": due}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        saver, now = self._saver, self._clock()
        if saver is None:
            return
        self._step_s, self._last = now - self._last, now
        busy, failed, wait = (bool(largest[f"memory.{key}"]) for key in ("busy", "failed", "wait"))
        was_idle = not (self._began_at or self._is_next)  # else it is not known here yet when the next one is due
        try:
            if run.pausing:  # the run goes on from here
                self._save_at_once(run, saver)
                run.kept_step = run.step
            elif saver.is_saving:
                saver.advance(busy, failed)
            elif self._is_next:
                # On a CPU bad steps are looked for, and replicas compared, while nothing else is done.
                self._began_at = self._asked if run.mesh.device.type == "cpu" else now
                self._blocked_s = now - self._began_at
                self._save(run, saver)
            self._blocked_s += self._clock() - now
            if self._began_at and not saver.is_saving:
                self._reckon(run, saver)
        except SaveError as error:  # on every rank
            self._fail(run, error)
        self._is_next = was_idle and not (wait or self._began_at or run.is_last)

    def on_rewind(self, run: Trainer) -> None:
        self._drop_after(run.step, run.control)
        self._began_at, self._is_next = 0.0, False
        if self._saver is not None and run.pausing:
            try:
                self._save_at_once(run, self._saver)
            except SaveError as error:
                self._fail(run, error)

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self._ended = False

    def on_end(self, run: Trainer) -> None:
        """Wait for what is under way. The folder goes with the end of the run, after all callbacks have done theirs."""
        if self._saver is not None:
            self._saver.abandon()
        self._ended = not run.pausing

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        if phase != "end" or self.folder is None or self._held is None:
            return
        if self._ended and self._is_first(run.control):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._held.close()

    def _save(self, run: Trainer, saver: Saver) -> None:
        run.enter("save")
        document = progress.document(run.progress, run.lr, run.config, run.mesh.shape, self._data)
        run.call("on_save", document)
        saver.save(run.step, document)
        if self.folder is not None and self._is_first(run.control):
            with suppress(OSError):
                os.utime(self.folder)

    def _save_at_once(self, run: Trainer, saver: Saver) -> None:
        saver.finish()
        if saver.published != run.step:
            self._save(run, saver)
            saver.finish()

    def _fail(self, run: Trainer, error: SaveError) -> None:
        self._due = self._clock() + RETRY_S
        if not self._failing:
            run.tell(f"{error}\nThe run goes on; memory is tried again in {RETRY_S / 60:g} minutes")
        self._failing, self._began_at = True, 0.0

    def _reckon(self, run: Trainer, saver: Saver) -> None:
        """Reckon what a checkpoint has cost, and when the next one may begin."""
        snapshot, shape = saver.reserve(), run.mesh.shape
        # An update waits for what is longer than the step before it.
        cost = self._blocked_s + max(0.0, snapshot.copied_s - self._step_s * snapshot.is_beside)
        if run.mesh.device.type == "cpu":  # whose cores would do something else
            cost += snapshot.cpu_s * min(self._node, shape.world) / len(os.sched_getaffinity(0))
        self._costs.append(cost)
        self._due = self._began_at + sum(self._costs) / len(self._costs) / run.config.recovery.overhead
        self._began_at, self._failing = 0.0, False

    def _say(self, control: Control, text: str) -> None:
        if control.mesh.rank == 0:
            say(text)
