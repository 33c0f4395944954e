"""A worker in a verifiers environment, and the requests to it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.base import Finite
from headrace.parent_death import die_with

START_S = 120.0
"""Longest wait for the worker's first line: verifiers and the taskset are imported, data sets are opened."""
TASK_S = 600.0
"""Longest wait for the next task; a taskset may download its data first."""
_LINE = 64 << 20
_LARGEST_LOG = 1 << 20
"""Bytes of the worker's standard error that are kept."""
_LOOK_S = 1.0
"""Seconds between two looks at the size of the log while an answer is awaited."""
_END_S = 5.0
"""How long a worker that has closed its output may take to end."""


class VerifiersError(HeadraceError):
    """The worker cannot start or answer; the text says why."""


class TasksetSource(msgspec.Struct, frozen=True, kw_only=True):
    """A taskset, and the environment that it is installed in."""

    python: str
    """Path of the environment's interpreter."""
    taskset: str
    """Module or package name, as ``vf-eval`` takes it."""
    config: str = "{}"
    """The taskset's configuration, JSON."""


class _Deadline(NamedTuple):
    within_s: float
    at: float

    @classmethod
    def after(cls, within_s: float) -> "_Deadline":
        return cls(within_s, time.monotonic() + within_s)


class TasksetWorker:
    """A process of the taskset's environment. It ends with the thread that started it."""

    def __init__(self, source: TasksetSource) -> None:
        """Start it. VerifiersError."""
        spec = find_spec("headrace.tasks.verifiers.worker")
        assert spec is not None and spec.origin is not None
        # -P: the worker's own folder must not hide the library of the same name.
        command = [source.python, "-P", spec.origin, source.taskset, source.config]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._log = tempfile.TemporaryFile()
        self._buffer = bytearray()
        self._number = 0
        """Of the last request. Its answer repeats it, so that no other line is taken for it."""
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )
        except OSError as error:
            self._log.close()
            raise VerifiersError(f"{source.python} cannot be started: {error.strerror or error}") from None
        try:
            first = self._line(_Deadline.after(START_S))
            self.version, self.digest = (_text(first, name) for name in ("version", "source"))
        except VerifiersError:
            self.close()
            raise

    def tasks(self, count: int = 0, start: int = 0) -> Iterator[dict[str, Any]]:
        """The taskset's tasks from number ``start`` on, as `worker.Taskset.task` says. count: the most tasks that there
        are; 0 for all. VerifiersError."""
        number = start
        while "end" not in (line := self._ask({"do": "task", "number": number, "count": count}, TASK_S)):
            try:
                msgspec.convert(line, _Refused if "refused" in line else _Task)
            except msgspec.ValidationError as error:
                self.close()
                raise VerifiersError(f"expected a task from the verifiers environment: {error}") from None
            yield line
            number += 1

    def answer(self, data: dict[str, Any], within_s: float) -> str:
        """A message that the task's rewards accept, made from its data; empty where there is none. VerifiersError as
        in `score`."""
        return _text(self._ask({"do": "answer", "data": data}, within_s), "answer")

    def score(self, data: str, text: str, within_s: float) -> float:
        """The reward of a message. data: the task's data, JSON. VerifiersError; the worker is closed when it gave no
        answer in time."""
        line = self._ask({"do": "score", "data": json.loads(data), "text": text}, within_s)
        reward = line.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
            self.close()
            raise VerifiersError(f"expected a line with a reward from the verifiers environment, got {line!s:.200}")
        return float(reward)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it, with the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None:
                file.close()

    def _ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        if not self.alive:
            raise VerifiersError(self._ended())
        self._number += 1
        deadline = _Deadline.after(within_s)
        self._send(json.dumps(request | {"request": self._number}).encode() + b"\n", deadline)
        return self._line(deadline)

    def _send(self, data: bytes, deadline: _Deadline) -> None:
        """Write a request; closes the worker when it does not read it in time."""
        assert self._process.stdin is not None
        pipe, view = self._process.stdin.fileno(), memoryview(data)
        os.set_blocking(pipe, False)
        while view:
            self._await(pipe, selectors.EVENT_WRITE, deadline)
            try:
                view = view[os.write(pipe, view) :]
            except OSError:
                raise VerifiersError(self._ended()) from None

    def _await(self, pipe: int, event: int, deadline: _Deadline) -> None:
        """Wait until a pipe is ready; closes the worker when that takes too long."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while not selector.select(min(_LOOK_S, max(0.0, deadline.at - time.monotonic()))):
                self._trim()
                if time.monotonic() >= deadline.at:
                    self.close()
                    raise VerifiersError(f"the verifiers environment gave no answer within {deadline.within_s:g} s")

    def _trim(self) -> None:
        """Empty a log that is too large."""
        if os.fstat(self._log.fileno()).st_size > _LARGEST_LOG:
            # The worker writes at the same offset, because both share one open file.
            self._log.seek(0)
            self._log.truncate()

    def _line(self, deadline: _Deadline) -> dict[str, Any]:
        """The next line; closes the worker when none comes in time, or another one than the answer."""
        assert self._process.stdout is not None
        end = self._buffer.find(b"\n")
        while end < 0:
            self._await(self._process.stdout.fileno(), selectors.EVENT_READ, deadline)
            self._trim()
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise VerifiersError(self._ended())
            end = len(self._buffer) + data.find(b"\n") if b"\n" in data else -1
            self._buffer += data
            if len(self._buffer) > _LINE:
                self.close()
                raise VerifiersError(f"a line of the verifiers environment is longer than {_LINE >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            self.close()
            raise VerifiersError(f"expected a JSON object from the verifiers environment, got {line[:200]!r}")
        if (number := told.pop("request", 0)) != self._number:
            self.close()
            raise VerifiersError(
                f"expected the answer to request {self._number} from the verifiers environment, got one to "
                f"{number!s:.20}: does the taskset write to the worker's output?"
            )
        if "error" in told:
            raise VerifiersError(f"{told['error']!s:.500}")
        return told

    def _ended(self) -> str:
        if self._log.closed:
            return "the verifiers environment has been closed"
        try:
            how = f"ended with code {self._process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.close()
        return f"the verifiers environment {how}" + (f": {lines[-1]}" if lines else "")


class _Refused(msgspec.Struct):
    id: str
    data: dict[str, Any]
    refused: str


class _Task(msgspec.Struct):
    id: str
    data: dict[str, Any]
    prompt: str
    system: str
    time_s: Finite
    notes: list[str]


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise VerifiersError(f"expected a line with {name} from the verifiers environment, got {line!s:.200}")
    return value


def python_of(path: Path) -> str:
    """The interpreter that a path names, or that of an environment's folder. VerifiersError when there is none."""
    for candidate in (path, path / "bin" / "python"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate.absolute())
    raise VerifiersError(f"expected a Python interpreter or the folder of a virtual environment, got {path}")
