"""Tasksets of verifiers v1 whose tasks are one message, graded by the taskset's own rewards.

verifiers pins other versions of shared libraries, so the taskset is read and scored by the Python of an environment of
its own (``--python``); headrace imports none of it. A task carries its data and the digest of the taskset's source, and
the checker ``verifiers`` (judging/verifiers.py) asks the same environment for the reward. Tasks that need a runtime,
tool servers, a judge model or a user simulator are refused, with the reason.

Where the data's ``answer`` alone is a message that the rewards accept, it is the known solution.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.messages.tasks import Grading, Oracle, Task, TestPlan
from headrace.tasks.importing.base import (
    ImportOptions,
    ImportRefused,
    MadeTask,
    SourceEntry,
    SourceError,
    clean_id,
    digest,
    limits_of,
)
from headrace.tasks.verifiers.process import TasksetSource, TasksetWorker, VerifiersError, python_of

ANSWER_S = 60.0
"""Longest time in s for the rewards on all forms of the task's own answer."""


def read(options: ImportOptions) -> Iterator[SourceEntry]:
    """The tasks of a taskset. SourceError."""
    if options.python is None:
        raise SourceError("verifiers needs --python: the Python of an environment with verifiers and the taskset")
    if options.repos or options.template or options.tools:
        raise SourceError("--repos, --template and --tools do not apply to verifiers: its tasks are one message")
    try:
        config = json.loads(options.taskset_config or "{}")
    except (ValueError, RecursionError) as error:
        raise SourceError(f"--taskset-config: expected JSON, {error}") from None
    if not isinstance(config, dict):
        raise SourceError(f"--taskset-config: expected an object, got {type(config).__name__}")
    try:
        # The order of the keys is fixed, because the text is part of every task.
        source = TasksetSource(
            python=python_of(options.python), taskset=str(options.source), config=json.dumps(config, sort_keys=True)
        )
        reader = _Reader(source)
    except VerifiersError as error:
        raise SourceError(str(error)) from None
    try:
        for number, line in enumerate(reader.tasks(options.count)):
            try:
                id = clean_id(str(line["id"]))
            except ImportRefused:
                id = f"{number:06d}"
            settings = (*msgspec.structs.astuple(source), reader.version, reader.digest, options.system)
            key = digest(json.dumps(line, sort_keys=True).encode(), json.dumps(settings).encode())
            yield SourceEntry(id, key, _maker(line, id, reader, options))
    except VerifiersError as error:
        raise SourceError(str(error)) from None
    finally:
        reader.close()


class _Reader:
    """The taskset's worker; another one follows a worker that a reward has stopped."""

    def __init__(self, source: TasksetSource) -> None:
        self.source, self._worker = source, TasksetWorker(source)
        self.version, self.digest = self._worker.version, self._worker.digest

    def tasks(self, count: int) -> Iterator[dict[str, Any]]:
        """The taskset's tasks. VerifiersError."""
        number = 0
        while True:
            if not self._worker.alive:
                self._worker = TasksetWorker(self.source)
            for line in self._worker.tasks(count, number):
                number += 1
                yield line
                if not self._worker.alive:
                    break
            else:
                return

    def answer(self, data: dict[str, Any]) -> str:
        """As `Worker.answer`. ImportRefused when the rewards fail."""
        try:
            return self._worker.answer(data, ANSWER_S)
        except VerifiersError as error:
            raise ImportRefused(f"its rewards fail on its own answer: {error}") from None

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _maker(line: dict[str, Any], id: str, reader: _Reader, options: ImportOptions) -> Callable[[], MadeTask]:
    def made() -> MadeTask:
        if why := line.get("refused"):
            raise ImportRefused(str(why))
        answer = reader.answer(line["data"])
        ref, plan = options.ref(id), TestPlan(kind="command", argv=("true",))
        systems = [text for text in (options.system, line["system"]) if text]
        task = Task(
            ref=ref,
            family=options.suite,
            prompt=line["prompt"],
            system="\n\n".join(systems),
            files={},
            allowed=(),
            tests=plan,
            sandbox=False,
            limits=limits_of({"time_s": line["time_s"]}),
        )
        reference = {
            "python": reader.source.python,
            "taskset": reader.source.taskset,
            "config": reader.source.config,
            "source": reader.digest,
            "data": json.dumps(line["data"]),
        }
        grading = Grading(kind="checker", checker="verifiers", reference=reference)
        oracle = Oracle(ref=ref, hidden={}, tests=plan, expected=(), solution={}, answer=answer, grading=grading)
        return MadeTask(task=task, oracle=oracle, notes=tuple(line["notes"]))

    return made
