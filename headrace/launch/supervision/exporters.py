"""The process that writes a run's figures to TensorBoard, Weights & Biases or MLflow: it may fail without ending it."""

import asyncio
import os
from collections.abc import Callable

from headrace.config import Config
from headrace.dashboard.exporters.writers import wanted
from headrace.launch.runs import RunDir
from headrace.launch.supervision.children import Child, ChildFailed, keep_alive
from headrace.python_modules import module_command

FINISH_S = 20.0
"""Seconds for which it may write after the run has ended."""


class Exporters:
    """Call `watch` during the run and `stop` after its last event; nothing happens when [metrics] names no target."""

    def __init__(self, config: Config, folder: RunDir) -> None:
        self._child: Child | None = None
        if wanted(config.metrics):
            run = folder.path.resolve()
            argv = module_command("headrace.cli", "export", str(run), str(run / "exporters"), "--as", "metrics")
            self._child = Child("exporters", argv, folder.logs / "exporters.log", dict(os.environ))

    async def watch(self, say: Callable[[str], None]) -> None:
        """Keep it running until everything is written; a process that cannot be kept alive ends no run."""
        if self._child is not None:
            try:
                await keep_alive(
                    self._child, lambda name, why: say(f"{name} ended and is restarted: {why}"), finishes=True
                )
            except ChildFailed as failure:
                say(f"the run goes on without exporters, and `headrace export --as metrics` continues them: {failure}")

    async def stop(self, *, finished: bool) -> None:
        """End it. finished: the run's last event is stored, so it ends by itself once everything is written."""
        if self._child is None or self._child.process is None:
            return
        if finished:
            await asyncio.wait({asyncio.ensure_future(self._child.process.wait())}, timeout=FINISH_S)
        await self._child.stop(5.0)
