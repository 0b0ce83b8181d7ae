"""Saves in the background in the model of the recovery protocol: begun after a step, written while later ones are done,
published by rank 0 once all know that all have written, and given up by a fault, after which they are done again."""

from __future__ import annotations

from typing import Any, NamedTuple

from explorer import GONE, Explorer, Groups, History, Move, Proc, World


class BackgroundSave(NamedTuple):
    """A save that a process is at: it is being written, is written here, is being published, or is not its own work any
    more."""

    version: int
    image: History
    stage: str

    @property
    def busy(self) -> bool:
        return self.stage in ("writes", "publishes")


class BackgroundExplorer(Explorer):
    """The same, but that all talk of their saves after each step, and none waits for a disk before the next save or the
    end. Disks answer: who leaves a generation ends what it writes."""

    def moves(self, world: World) -> list[Move]:
        works = [
            ("works", rank)
            for rank, proc in enumerate(world.procs)
            if proc.saving and proc.saving.busy and proc.at not in {*GONE, "stands"}
        ]
        return [] if world.failed else [*works, *super().moves(world)]

    def after(self, world: World, move: Move) -> World:
        kind, rank = move
        return self._works(world, rank) if kind == "works" else super().after(world, move)

    def _works(self, world: World, rank: int) -> World:
        """End what a thread does: the files of a rank are whole, or the checkpoint is published."""
        proc = world.procs[rank]
        version, image, stage = proc.saving
        if stage == "writes":
            world = world._replace(files=(*world.files, (version, rank, image)))
        elif stage == "publishes":
            world = self._publish(world, version)
        after = {"writes": "written", "publishes": "over"}.get(stage, stage)
        return self._put(world, rank, proc._replace(saving=BackgroundSave(version, image, after)))

    def _read(self, world: World, rank: int, proc: Proc) -> World:
        if proc.inbox[0] == ("over", proc.generation) and proc.at != "idle" and proc.saving:
            world = self._abandons(world, rank)
            proc = world.procs[rank]
        return super()._read(world, rank, proc)

    def _abandons(self, world: World, rank: int) -> World:
        """Give up a save; what rank 0 publishes needs nobody else."""
        world = self._works(world, rank)
        proc = world.procs[rank]
        if rank == 0 and proc.saving.stage == "written":
            world = self._removed(world, proc.saving.version)
        known = rank == 0 and proc.saving.stage == "over"
        return self._put(world, rank, proc._replace(saving=None, unsaved=not known))

    def _removed(self, world: World, version: int) -> World:
        return world._replace(files=tuple(each for each in world.files if each[0] != version))

    def _die(self, world: World, rank: int, proc: Proc) -> World:
        return super()._die(world, rank, proc._replace(saving=None, unsaved=False))

    def _save(self, world: World, rank: int, proc: Proc) -> World:
        return self._talk(world, rank, proc, "listen")

    def _talk(self, world: World, rank: int, proc: Proc, at: str) -> World:
        news = proc.saving is not None and proc.saving.busy, proc.unsaved
        return self._give(self._put(world, rank, proc._replace(at=at)), rank, news)

    def _give(self, world: World, rank: int, what: Any) -> World:
        proc = world.procs[rank]
        if proc.at == "status" and proc.unsaved:
            world = self._set(world, self._groups(world, proc.generation)._replace(unsaved=True))
        return super()._give(world, rank, what)

    def _can_go_on(self, rank: int, proc: Proc, groups: Groups) -> bool:
        return not proc.saving.busy if proc.at == "join" else super()._can_go_on(rank, proc, groups)

    def _go_on(self, world: World, rank: int, proc: Proc) -> World:
        groups = self._groups(world, proc.generation)
        told: tuple[Any, ...] = groups.result[1] if groups.result else ()
        match proc.at:
            case "status":
                proc = proc._replace(unsaved=proc.unsaved or groups.unsaved)
                return Explorer._go_on(self, self._put(world, rank, proc), rank, proc)
            case "listen" | "finish":
                proc = proc._replace(unsaved=any(asked for _, asked in told))
                if proc.saving is None or any(busy for busy, _ in told):
                    return self._due(world, rank, proc)
                if proc.saving.stage == "over":
                    return self._due(world, rank, proc._replace(saving=None))
                return self._give(self._put(world, rank, proc._replace(at="gathered")), rank, proc.saving[:2])
            case "gathered":
                stage = "over" if rank else "publishes"
                return self._due(world, rank, proc._replace(saving=proc.saving._replace(stage=stage)))
            case "join":
                return self._talk(world, rank, proc, "finish")
            case "begin":
                saving = None if told[0] else BackgroundSave(len(proc.history), proc.history, "writes")
                return self._next(world, rank, proc._replace(saving=saving, unsaved=False))
        return Explorer._go_on(self, world, rank, proc)

    def _due(self, world: World, rank: int, proc: Proc) -> World:
        """Begin a save where one is due or was given up, once the one before it is published."""
        version = len(proc.history)
        if version not in self.setting.saves and not proc.unsaved:
            return self._next(world, rank, proc)
        if proc.saving:
            return self._put(world, rank, proc._replace(at="join"))
        there = rank == 0 and dict(world.published).get(version) == proc.history
        if rank == 0 and not there:
            world = self._removed(world, version)
        return self._give(self._put(world, rank, proc._replace(at="begin")), rank, there)

    def _next(self, world: World, rank: int, proc: Proc) -> World:
        last = len(proc.history) == self.setting.steps
        return self._put(world, rank, proc._replace(at="compute" if not last else "join" if proc.saving else "ended"))
