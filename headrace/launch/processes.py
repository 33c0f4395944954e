"""The processes of one run: its broker and its actors, kept alive together and ended together."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.config import Config, branch_config, branch_name, versions
from headrace.launch.admission import require_own
from headrace.launch.broker import Broker
from headrace.launch.output import say
from headrace.launch.runs import RunDir, RunError
from headrace.launch.supervision.children import Child, ChildFailed, actor_command, keep_alive
from headrace.launch.supervision.exporters import Exporters
from headrace.launch.supervision.signals import Stopping
from headrace.search.models import installed

DRAIN_S = 20.0
FLOOR = 8
"""A run is stopped when less than 1/FLOOR of [run] min_free_mb is free: enough to finish writes in progress."""


def process_groups(config: Config) -> list[tuple[str, ...]]:
    """The processes to start; without the production lane those of its actors are left out, and so is the search
    actor where this machine has no model."""
    product = {"gateway", "feedback", "scavenger"}
    groups = []
    for group in config.processes.groups:
        wanted = tuple(
            name
            for name in group
            if (name.partition(":")[0] != "search" or installed(config.search.model))
            and (
                config.production.enabled
                or (name.partition(":")[0] not in product and name.partition(":")[2] not in config.production.rollouts)
            )
        )
        if wanted:
            groups.append(wanted)
    return groups


BRANCH = ("trainer", "weight_sender", "weight_receiver")
"""The actors that a branch has for itself; it shares the other actors with the run that it branches from."""


class Run:
    """The processes of one run. Call `start`, `watch`, and in any case `close`."""

    def __init__(
        self, config: Config, folder: RunDir, config_file: Path, stopping: Stopping, origins: Sequence[str] = ()
    ) -> None:
        """config_file: where `config` is written for the processes to read. origins: of the live page. RunError for a
        name from outside that this process has not admitted (`admission.require_own`)."""
        require_own(config)
        self.config = config
        trains = config.production.enabled and config.feedback.enabled
        self.branch = branch_config(config, folder.id) if trains else None
        """The configuration of the branch that trains on users' ratings."""
        self.folder = folder
        self.config_file = config_file
        config_file.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        self.broker = Broker(config, folder, origins)
        self.children: list[Child] = []
        self.restarts: list[str] = []
        self.finished = False
        """The run's last event is stored."""
        self._exporters = Exporters(config, folder)
        self._stopping = stopping

    async def start(self) -> None:
        """Start every actor process. RunError when one cannot be started."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        for group in process_groups(self.config):
            argv = actor_command(
                group,
                config=self.config_file,
                run=self.folder.id,
                url=self.broker.url,
                credentials=self.broker.credentials,
            )
            name = group[0].replace(":", "-")
            self.children.append(Child(name, argv, self.folder.logs / f"{name}.log", env))
        if self.branch is not None:
            self.children.append(self._branch(self.branch, env))
        try:
            for child in self.children:
                await child.start_or_wait()
        except ChildFailed as failure:
            raise first_of(failure) from None

    def _branch(self, config: Config, env: dict[str, str]) -> Child:
        """The process that trains on users' ratings, under a configuration and a run id of its own."""
        file = self.config_file.with_name("branch.json")
        file.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        argv = actor_command(
            BRANCH,
            config=file,
            run=branch_name(self.folder.id, self.config.feedback),
            url=self.broker.url,
            credentials=self.broker.credentials,
        )
        return Child("branch", argv, self.folder.logs / "branch.log", env)

    def on_restart(self, name: str, why: str) -> None:
        """Note and show that a process ended and is restarted. why: the cause, one line."""
        text = f"{name} died and is restarted: {why}"
        self.restarts.append(text)
        say(text)

    async def watch(self) -> None:
        """Keep all of them alive for as long as this is awaited. RunError, BusError when that fails."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.broker.watch(self.on_restart))
                group.create_task(self._watch_disk())
                group.create_task(self._exporters.watch(say))
                for child in self.children:
                    group.create_task(keep_alive(child, self.on_restart))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    async def _watch_disk(self) -> None:
        """RunError as soon as the disk is nearly full, while a clean end is still possible."""
        while True:
            free = shutil.disk_usage(self.folder.path).free >> 20
            if free * FLOOR < self.config.run.min_free_mb:
                raise RunError(
                    f"the disk of {self.folder.path} is nearly full ({free} MiB free), so the run was stopped with all "
                    f"acknowledged messages stored: free some space, then resume with --set run.id={self.folder.id}",
                    3,
                )
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """Drain all actors together. May be called again."""
        await asyncio.gather(
            self._exporters.stop(finished=self.finished),
            *(child.stop(DRAIN_S, self._stopping.now) for child in self.children),
        )

    async def close(self) -> None:
        """Drain all actors, then stop the broker, and give back the memory of the versions."""
        await self.stop()
        await self.broker.stop()
        if self.config.weights.memory_dir:
            for run in (self.folder.id, branch_name(self.folder.id, self.config.feedback)):
                shutil.rmtree(versions.folder(self.config, run), ignore_errors=True)


def first_of(failures: BaseException) -> BaseException:
    """The first failure inside a group, as the error with which the command ends."""
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    if isinstance(failures, ChildFailed):
        return RunError(str(failures), failures.exit_status)
    return failures
