"""The checker of tasks that come from verifiers: the taskset's own rewards, computed in its own environment.

One worker per taskset stays open and scores one message at a time. The start of the worker and the wait for a free one
do not count towards the checker's time limit (`ready`). A reward that exceeds the limit ends the worker, and the next
verdict starts another. The worker runs the taskset's code on the judge's machine, as a plugin does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from headrace.judging.checkers import TIMEOUT_S, Message, waits_for
from headrace.registry import PluginError, require
from headrace.tasks.verifiers.process import TasksetSource, TasksetWorker, VerifiersError

_SHARE = 0.8
"""Share of the checker's time limit after which the worker is closed: its thread ends before the judge gives up."""
_workers: dict[TasksetSource, TasksetWorker] = {}
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[TasksetSource, asyncio.Lock]] = WeakKeyDictionary()


@asynccontextmanager
async def ready(message: Message) -> AsyncIterator[None]:
    """Hold the taskset's worker; start it if none runs. PluginError when it cannot start or its source has changed."""
    source = _source(message)
    async with _locks.setdefault(asyncio.get_running_loop(), {}).setdefault(source, asyncio.Lock()):
        worker = _workers.get(source)
        if worker is None or not worker.alive:
            try:
                worker = _workers[source] = await asyncio.to_thread(TasksetWorker, source)
            except VerifiersError as error:
                raise PluginError(f"the taskset {source.taskset} in {source.python}: {error}") from error
        if worker.digest != message.reference["source"]:
            raise PluginError(
                f"the taskset {source.taskset} in {source.python} differs from the one that was imported; "
                "import the suite again"
            )
        yield


@waits_for(ready)
def score(message: Message) -> float:
    """The weighted sum of the task's rewards for the message. VerifiersError when one raises or exceeds the limit."""
    return _workers[_source(message)].score(message.reference["data"], message.text, TIMEOUT_S * _SHARE)


def _source(message: Message) -> TasksetSource:
    """The taskset that the task names. PluginError unless the operator admitted the pair of interpreter and taskset: a
    task's data would start any program otherwise."""
    told = message.reference
    require("checkers", f"{told['python']}:{told['taskset']}")
    return TasksetSource(python=told["python"], taskset=told["taskset"], config=told["config"])
