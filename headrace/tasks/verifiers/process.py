"""A worker in a verifiers environment, and the requests to it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headrace.parent_death import die_with

START_S = 120.0
"""Longest wait for the worker's first line: verifiers and the taskset are imported, data sets are opened."""
TASK_S = 600.0
"""Longest wait for the next task; a taskset may download its data first."""
_LINE = 64 << 20
_LARGEST_LOG = 1 << 20
"""Bytes of the worker's standard error that are kept."""


class VerifiersError(Exception):
    """The worker cannot start or answer; the text says why."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A taskset, and the environment that it is installed in."""

    python: str
    """Path of the environment's interpreter."""
    taskset: str
    """Module or package name, as ``vf-eval`` takes it."""
    config: str = "{}"
    """The taskset's configuration, JSON."""


class Worker:
    """A process of the taskset's environment. It ends with the thread that started it."""

    def __init__(self, source: Source) -> None:
        """Start it. VerifiersError."""
        spec = find_spec("headrace.tasks.verifiers.worker")
        assert spec is not None and spec.origin is not None
        # -P: the worker's own folder must not hide the library of the same name.
        command = [source.python, "-P", spec.origin, source.taskset, source.config]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._log = tempfile.TemporaryFile()
        self._buffer = b""
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                command,
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
            first = self._line(START_S)
            self.version, self.digest = (_text(first, name) for name in ("version", "source"))
        except VerifiersError:
            self.close()
            raise

    def tasks(self, count: int = 0, start: int = 0) -> Iterator[dict[str, Any]]:
        """The taskset's tasks from number ``start`` on, as `worker.Taskset.task` says. count: the most tasks that there
        are; 0 for all. VerifiersError."""
        number = start
        while "end" not in (line := self._ask({"do": "task", "number": number, "count": count}, TASK_S)):
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
        if not isinstance(line.get("reward"), int | float):
            self.close()
            raise VerifiersError(f"expected a line with a reward from the verifiers environment, got {line!s:.200}")
        return float(line["reward"])

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
                with contextlib.suppress(OSError):  # what it did not read is lost
                    file.close()

    def _ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        if not self.alive:
            raise VerifiersError(self._ended())
        assert self._process.stdin is not None
        if os.fstat(self._log.fileno()).st_size > _LARGEST_LOG:
            # The worker writes at the same offset, because both share one open file.
            self._log.seek(0)
            self._log.truncate()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise VerifiersError(self._ended()) from None
        return self._line(within_s)

    def _line(self, within_s: float) -> dict[str, Any]:
        """The next line; closes the worker when none comes in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise VerifiersError(f"the verifiers environment gave no answer within {within_s:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise VerifiersError(self._ended())
                self._buffer += data
                if len(self._buffer) > _LINE:
                    self.close()
                    raise VerifiersError(f"a line of the verifiers environment is longer than {_LINE >> 20} MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            self.close()
            raise VerifiersError(f"expected a JSON object from the verifiers environment, got {line[:200]!r}")
        if "error" in told:
            raise VerifiersError(str(told["error"]))
        return told

    def _ended(self) -> str:
        code = self._process.wait()
        if self._log.closed:
            return "the verifiers environment has been closed"
        self._log.seek(0)
        lines = self._log.read()[-4000:].decode(errors="replace").strip().splitlines()
        self.close()
        return f"the verifiers environment ended with code {code}" + (f": {lines[-1]}" if lines else "")


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
