"""A run of a few numbers, as ranks of the agent know it: it steps, agrees, saves, is told to stop, pause or die.

``python -m toy FOLDER RANKS STEPS SECONDS [STEP:RANK:WHAT ...]`` is the launcher of a node; the module is that of its
ranks as well. WHAT befalls a rank once in a run, or each time with a ``!`` at its end.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

AGENT_S = 20.0


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from megacore import exits
    from megacore.outcome import AGENT, RankOutcome, rank_file
    from megacore.rank import RankPlace, join, leave
    from megacore.recovery.beats import Beat

    stops = list[int]()
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: note(folder, "save"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    folder, steps, seconds, orders = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    agent, here = Path(os.environ[AGENT]), RankPlace.of_environment()
    beat = Beat(rank_file(agent, "beat", os.getpid()))
    join(here, "cpu", timedelta(seconds=AGENT_S))
    state = folder / "state"
    step = torch.tensor([float(state.read_text()) if state.exists() else 0.0])
    if here.world > 1:
        dist.broadcast(step, 0)
    at = int(step)
    if here.rank == 0:
        note(folder, f"start world={here.world} after={at}")
    stopped = paused = False
    while at < steps and not stopped and not paused:
        at += 1
        beat.enter("forward", at)
        for order in [each for each in orders if ":" in each]:
            when, whom, what = order.split(":")
            if (int(when), int(whom)) == (at, here.rank):
                befall(folder, order, what)
        asked = torch.tensor([1.0, bool(stops), (agent / "pause").exists()])
        if here.world > 1:
            dist.all_reduce(asked)
        assert asked[0] == here.world
        stopped, paused = bool(asked[1]), bool(asked[2])
        time.sleep(seconds)
        if here.rank == 0:
            state.with_suffix(".new").write_text(str(at))
            state.with_suffix(".new").replace(state)
            note(folder, f"step {at}")
    if stopped:
        RankOutcome(exits.of_signal(signal.SIGTERM), stopped=True).write()
    else:
        RankOutcome(exits.DONE, paused=paused and at < steps).write()
    leave(here)
    if "abort" in orders[-1:]:
        os.abort()


def befall(folder: Path, order: str, what: str) -> None:
    """Do to this rank what is ordered."""
    from megacore.outcome import RankOutcome

    if not what.endswith("!"):
        try:
            (folder / f"done-{order}").open("x").close()
        except FileExistsError:
            return
    match what.rstrip("!"):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError(3)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(folder, "hangs")
            time.sleep(60)
        case "fail":
            RankOutcome(1).write()
            os._exit(1)


def note(folder: Path, text: str) -> None:
    with (folder / "notes").open("a") as file:
        file.write(f"{text}\n")


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []


def launch(folder: Path, ranks: int, arguments: Sequence[str], shutdown_s: float = 60.0) -> int:
    """Run it on a node -> exit status."""
    from megacore.launcher.command import nodes_of
    from megacore.launcher.node import Job, Node
    from megacore.launcher.processes import IMPORTS, prepare
    from megacore.launcher.signals import noted
    from megacore.launcher.temporary_folder import temporary_folder

    (folder / "notes").touch()
    node = Node(ranks)
    environment = node.network
    with noted() as arrived, temporary_folder() as made:
        prepare(IMPORTS[:2], {})
        from megacore.recovery import rendezvous
        from megacore.recovery.agent import Agent, heed
        from megacore.recovery.rendezvous import OneNode, SeveralNodes, secret_of

        rendezvous.LAST_CALL_S, rendezvous.LEAVES_S, rendezvous.LOOK_S = 0.5, 0.5, 0.1

        least, most = nodes_of(os.environ.get("NNODES") or "1")
        meeting = OneNode()
        if most > 1:
            master = "127.0.0.1", int(os.environ["MASTER_PORT"])
            node = Node(ranks, most, int(os.environ["NODE_RANK"]), master, least)
            meeting = SeveralNodes(node, secret_of(folder), AGENT_S, lambda: heed(arrived))
        given = [str(folder), *arguments]
        job = Job("toy", given, node, environment, shutdown_s, 3, folder)
        return Agent(job, meeting, made, arrived).launch()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
