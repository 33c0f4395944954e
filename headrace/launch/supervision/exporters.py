"""The process that writes a run's figures to TensorBoard, Weights & Biases or MLflow: it may fail without ending it."""

import asyncio
import os
from collections.abc import Callable

from headrace.config import Config
from headrace.dashboard.exporters.writers import wanted
from headrace.launch.runs import RunDir
from headrace.launch.supervision.causes import cause
from headrace.launch.supervision.children import Child, ChildFailed
from headrace.python_modules import module_command

STARTS = 3
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
        """Keep it running; after `STARTS` failures report that and continue without it."""
        for attempt in range(STARTS if self._child else 0):
            assert self._child is not None
            try:
                await self._child.start()
            except ChildFailed as failure:
                say(str(failure))
                await asyncio.sleep(1.0)
                continue
            assert self._child.process is not None
            code = await self._child.process.wait()
            if code == 0:
                return
            again = "is started again" if attempt + 1 < STARTS else "stays down; `headrace export --as metrics` goes on"
            say(f"exporters ended and {again}: {cause(code, self._child.log, 0)} (log: {self._child.log})")
            await asyncio.sleep(1.0)

    async def stop(self, *, finished: bool) -> None:
        """End it. finished: the run's last event is stored, so it ends by itself once everything is written."""
        if self._child is None or self._child.process is None:
            return
        if finished:
            await asyncio.wait({asyncio.ensure_future(self._child.process.wait())}, timeout=FINISH_S)
        await self._child.stop(5.0)
