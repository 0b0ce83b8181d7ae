"""`megacore ray`: train what a recipe describes on machines of a Ray cluster, which Ray Train finds and replaces.

Each of its workers runs `megacore train` for its machine, which checks, starts, watches and ends the ranks there as it
does anywhere. Ray starts all of them again where one is lost, and on more or fewer machines; each time they go on from
the newest checkpoint. A resize and the announced drain of a machine end them after their step, with a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from megacore.exits import FAILED, MISUSED, RETRY
from megacore.recipe import ConfigError, load
from megacore.say import err

FINAL = (FAILED, MISUSED)
"""The statuses after which a retry would not help."""

_COMMAND = "; ".join(
    (
        "import sys",
        "from megacore.rank import die_with",
        "die_with(int(sys.argv.pop(1)))",
        "from tools.main import main",
        "sys.exit(main())",
    )
)
_RUNNING: list[subprocess.Popen[bytes]] = []
"""The command of this worker."""


class EndedError(RuntimeError):
    """The command of a worker has ended otherwise than well."""

    def __init__(self, status: int, host: str) -> None:
        super().__init__(status, host)
        self.status = status

    def __str__(self) -> str:
        return f"megacore train on {self.args[1]} ended with status {self.status}"


# -- in each worker


def work(given: Mapping[str, Any]) -> None:
    """Run `megacore train` for this machine until it ends.

    Raises:
        EndedError: it ended otherwise than well.
    """
    context = ray.train.get_context()
    variables = {
        "NNODES": context.get_world_size(),
        "NODE_RANK": context.get_world_rank(),
        "NPROC_PER_NODE": given["processes"],
        "RESTART_COUNT": 1,  # Ray does not say how often it has started the workers
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(os.getpid()), "train", *given["arguments"]],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        cwd=given["folder"],
    )
    _RUNNING[:] = [process]
    threading.Thread(target=_heed_drains, args=(process,), name="drains", daemon=True).start()
    if status := process.wait():
        raise EndedError(128 - status if status < 0 else status, socket.gethostname())


def _heed_drains(process: subprocess.Popen[bytes]) -> None:
    """End a command after its step where Ray says that a machine of the run will be taken away."""
    while process.poll() is None:
        # All workers ask equally often: each call waits for all of them.
        if ray.train.get_preemption_info() is not None:
            process.send_signal(signal.SIGTERM)
            return
        time.sleep(1)


def _end() -> None:
    for process in _RUNNING:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _address() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return ray.util.get_node_ip_address(), port


def _meet_at(host: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


# -- in the controller


class Meeting(Backend):
    """The place where the ranks of all workers meet, and their end where Ray wants the workers for something else."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        host, port = worker_group.execute_single(0, _address)
        worker_group.execute(_meet_at, host, port)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(_end)


class MeetingConfig(BackendConfig):
    """The choice of :class:`Meeting`."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Meeting


class Verdict(ray.train.UserCallback):
    """An end of the run, rather than a retry, where a command has said that a retry would not help."""

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if _status(error) in FINAL:
                raise error


def _status(error: BaseException | None) -> int | None:
    """Return the status of the command that an error of Ray comes from; of several, one that is final, if there is."""
    inner = [error, *getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None)]
    found = [getattr(getattr(each, "_base_exc", each), "status", None) for each in inner]
    statuses = [status for status in found if status is not None]
    return next((status for status in statuses if status in FINAL), statuses[0] if statuses else None)


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore ray", description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the recipe")
    parser.add_argument("--workers", default="1", metavar="N|LEAST:MOST", help="machines; a range may shrink and grow")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks on each machine (its --gpus, else 1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each machine (0)")
    parser.add_argument(
        "--failures", type=int, default=10, metavar="N", help="so many times all are started again (10)"
    )
    parser.add_argument(
        "--look", type=float, default=60, metavar="S", help="seconds between looks for more machines (60)"
    )
    given = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    try:
        out = Path(load(given.recipe, given.overrides).out).absolute()
        workers = _workers(given.workers)
    except ConfigError as error:
        err(error)
        return MISUSED
    processes = given.processes or given.gpus or 1
    trainer = DataParallelTrainer(
        work,
        train_loop_config={
            "arguments": [given.recipe, *given.overrides],
            "processes": processes,
            "folder": os.getcwd(),  # Ray's workers have another one
        },
        backend_config=MeetingConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            resources_per_worker={"CPU": processes, **({"GPU": given.gpus} if given.gpus else {})},
            elastic_resize_monitor_interval_s=given.look,
        ),
        run_config=ray.train.RunConfig(
            name=out.name,
            storage_path=str(out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=given.failures),
            callbacks=[Verdict()],
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        err(error)
        status = _status(error)
        return status if status in FINAL else RETRY
    return 0


def _workers(text: str) -> int | tuple[int, int]:
    """Return a number of workers, or the least and the most.

    Raises:
        ConfigError: it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) > int(parts[-1]):
        raise ConfigError([f"--workers ({text}): give a number, or the least and the most (2:8)"])
    return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


if __name__ == "__main__":
    sys.exit(main())
