"""The log files of a run as one stream of lines, in the order of their times.

A process writes one JSON object per line. Any other line (a traceback, a message of a library) belongs to the line
before it and keeps its place.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

POLL_S = 0.2
_OWN = ("timestamp", "level", "event", "actor", "id", "run", "trace_id", "span_id", "text")


class LogLine(NamedTuple):
    """One line of a log."""

    time: float
    process: str
    fields: dict[str, Any]
    """Empty for a line that is not JSON."""
    raw: str


class LineFilter(NamedTuple):
    """The lines to show; an empty field excludes no line."""

    actor: str = ""
    trace: str = ""
    level: str = ""

    def shows(self, line: LogLine) -> bool:
        """Whether a line passes. Text without fields passes only when no field is asked for."""
        fields = line.fields
        names = (str(fields.get("actor", "")), line.process, str(fields.get("id", "")))
        if self.actor and self.actor not in names:
            return False
        if self.trace and not str(fields.get("trace_id", "")).startswith(self.trace):
            return False
        return not self.level or _RANK.get(str(fields.get("level", "")), 0) >= _RANK[self.level]


_RANK = {"debug": 0, "info": 1, "warning": 2, "error": 3}
LEVELS = tuple(_RANK)


class Tail:
    """One log file, from its start, as far as it is written. A file that was replaced is read from its start again."""

    def __init__(self, path: Path) -> None:
        self.path, self.process = path, path.stem
        self._at, self._rest, self._time = 0, b"", 0.0

    def read(self) -> Iterator[LogLine]:
        """Whole lines since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for raw in lines:
            yield self._line(raw.decode("utf-8", "replace"))

    def _line(self, raw: str) -> LogLine:
        fields: dict[str, Any] = {}
        if raw.startswith("{"):
            try:
                fields = msgspec.json.decode(raw, type=dict[str, Any])
                self._time = datetime.fromisoformat(str(fields["timestamp"])).timestamp()
            except (msgspec.DecodeError, KeyError, ValueError, OverflowError, RecursionError):
                fields = {}
        return LogLine(self._time, self.process, fields, raw)


def read(folder: Path, wanted: LineFilter, tails: dict[Path, Tail]) -> list[LogLine]:
    """New lines of every log in a folder that pass, by time. tails: the state of reading per file; filled here."""
    lines: list[LogLine] = []
    for path in sorted(folder.glob("*.log")):
        lines += [line for line in tails.setdefault(path, Tail(path)).read() if wanted.shows(line)]
    return sorted(lines, key=lambda line: line.time)


def shown(line: LogLine) -> str:
    """A line for a terminal: time, process, level, event, text, the other fields, the trace. Further lines of its text
    are indented, so that none of them passes for a line of the log."""
    fields = line.fields
    if not fields:
        return f"{'':<14}{line.process:<14}{line.raw}"
    clock = datetime.fromtimestamp(line.time).strftime("%H:%M:%S.%f")[:12]
    others = " ".join(f"{key}={value}" for key, value in fields.items() if key not in _OWN and value != "")
    trace = f" trace={str(fields['trace_id'])[:12]}" if "trace_id" in fields else ""
    who = str(fields.get("actor") or line.process)
    parts = [fields.get("event", ""), fields.get("text", ""), others]
    body = "  ".join(str(part) for part in parts if part)
    head = f"{clock:<14}{who:<14}{fields.get('level') or ''!s:<8}"
    return f"{head}{body}{trace}".replace("\n", f"\n{'':<28}")


def follow(folder: Path, wanted: LineFilter, say: Callable[[str], None], *, ends: Callable[[], bool]) -> None:
    """Show lines as they are written, until `ends` returns True."""
    tails: dict[Path, Tail] = {}
    while True:
        over = ends()
        for line in read(folder, wanted, tails):
            say(shown(line))
        if over:
            return
        time.sleep(POLL_S)
