"""The cause of a process's death, in one line: its exit code or signal, whether memory ran out, and the last error in
its log."""

import json
import signal
from contextlib import suppress
from pathlib import Path

TAIL_BYTES = 64 << 10
"""Bytes at the end of a log that are searched."""
_LONGEST = 2000
"""Characters of a cause; it stands in events and on a terminal."""


def oom_kills() -> int:
    """Processes that the kernel has killed since boot because a control group or the machine ran out of memory."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def last_words(log: Path) -> str:
    """The last error in a log; else its last event, else its last line; empty for an empty log. Without characters that
    cannot be printed, and at most 2,000 of them: a process may write anything."""
    words = _last_words(log)
    return "".join(char if char.isprintable() else " " for char in words[:_LONGEST])


def _last_words(log: Path) -> str:
    try:
        with log.open("rb") as source:
            source.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = [line for line in source.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return ""
    event = ""
    for line in reversed(lines[-40:]):
        if line.startswith("headrace: "):
            return line.removeprefix("headrace: ")
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and "error" in record:
                return str(record["error"])
            if isinstance(record, dict) and not event:
                event = f"last event {record.get('event', '?')}: {record.get('text', '')}".rstrip(": ")
    return event or (lines[-1].strip() if lines else "")


def ending(code: int, oom_before: int) -> str:
    """How a process ended. code: as of `subprocess`. oom_before: `oom_kills` when the process started."""
    if code >= 0:
        return f"code {code}"
    names = {number.value: number.name for number in signal.Signals}
    text = f"signal {-code} ({names.get(-code, 'unknown')})"
    if code == -signal.SIGKILL and (kills := oom_kills() - oom_before) > 0:
        text += f", probably out of memory: since it started the kernel ended {kills} processes for lack of memory"
    return text


def cause(code: int, log: Path, oom_before: int) -> str:
    """`ending`, and the last error of the process's log."""
    words = " ".join(last_words(log).split()) or "its log is empty"
    return f"{ending(code, oom_before)}; {words}"
