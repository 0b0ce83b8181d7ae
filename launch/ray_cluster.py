"""A run on the machines of a Ray cluster, which Ray Train V2 finds and replaces.

Each of its workers runs `megacore train` for its machine, which checks, starts, watches and ends the ranks there as it
does anywhere. Ray starts all of them again where one is lost, and on more or fewer machines; each time they go on from
the newest checkpoint. A resize and the announced drain of a machine end them after their step, with a checkpoint.
"""

from __future__ import annotations

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

from megacore.exits import DONE, FAILED, MISUSED, RETRY, of_signal

FINAL = (FAILED, MISUSED)
"""The statuses after which a retry would not help."""

LEAVES_S = 60.0
"""The seconds before the announced end of a machine at which the run ends, to save."""

_COMMAND = "; ".join(
    (
        "import sys",
        "from megacore.rank import die_with",
        "die_with(int(sys.argv.pop(1)))",
        "from megacore.launcher.command import run",
        "sys.exit(run('train', sys.argv[1:]))",
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
        [sys.executable, "-c", _COMMAND, str(os.getpid()), *given["arguments"]],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        cwd=given["folder"],
    )
    _RUNNING[:] = [process]
    drained = threading.Event()
    threading.Thread(target=_heed_drains, args=(process, drained), name="drains", daemon=True).start()
    status = process.wait()
    while drained.is_set() and status == of_signal(signal.SIGTERM):
        time.sleep(1)  # until Ray takes this worker: earlier it would place others on the machine that leaves
    if status:
        raise EndedError(128 - status if status < 0 else status, socket.gethostname())


def _heed_drains(process: subprocess.Popen[bytes], drained: threading.Event) -> None:
    """End a command after its step, with a checkpoint, shortly before Ray takes a machine of the run away."""
    while process.poll() is None:
        # All workers ask equally often: each call waits for all of them.
        if (info := ray.train.get_preemption_info()) is not None:
            drained.set()
            while process.poll() is None and time.time() < (info.deadline_ms or 0) / 1000 - LEAVES_S:
                time.sleep(1)
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


class RayVerdict(ray.train.UserCallback):
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


# -- in the driver


def fit(
    arguments: Sequence[str],
    out: Path,
    workers: int | tuple[int, int],
    resources: Mapping[str, float],
    processes: int,
    failures: int,
    look_s: float,
) -> tuple[int, str]:
    """Train on Ray's workers -> exit status, and what Ray says of a failure.

    Args:
        arguments: The arguments of `megacore train`.
        out: The folder of the run, which all machines share.
        workers: The number of machines, or the least and the most.
        resources: The resources of each of them.
        processes: The ranks on each.
        failures: The number of times that all are started again.
        look_s: Seconds between looks for more machines.
    """
    trainer = DataParallelTrainer(
        work,
        # Ray's workers have a working folder of their own.
        train_loop_config={"arguments": arguments, "processes": processes, "folder": os.getcwd()},
        backend_config=MeetingConfig(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            resources_per_worker=dict(resources),
            elastic_resize_monitor_interval_s=look_s,
        ),
        run_config=ray.train.RunConfig(
            name=out.name,
            storage_path=str(out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=failures),
            callbacks=[RayVerdict()],
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        status = _status(error)
        return (status if status in FINAL else RETRY), str(error)
    return DONE, ""
