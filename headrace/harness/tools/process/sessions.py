"""Terminal sessions of an episode: programs that may run on after a call, and their whole output.

A call returns when the program has ended or when `yield_ms` milliseconds have passed. A later call polls the session,
writes to it, ends it, or reads lines of its log. Sessions are numbered from 1 in each episode, so the numbers are the
same on every backend. The harness stores the logs; a resumed episode does not have the logs of its earlier sessions.
"""

import itertools
import time
from collections.abc import Iterable, Mapping

import msgspec

from headrace.harness.tools.base import Answer, Workspace, number_range
from headrace.messages.sandbox import FeedJob, FollowJob, OpResult, StartJob, StopJob

LIMIT_S = 30.0
"""Shortest time limit of a program; the time limit of the task's tests or of its episode applies if it is longer."""
MOST_YIELD_MS = 300_000
KEEP_BYTES = 4 << 20
"""Bytes of logs that an episode keeps; the oldest logs are removed first."""
REMOVED = "[earlier output was removed]\n"
"""Takes the place of the log of a program that still runs."""
MOST_NEW = 1 << 20
"""Characters of new output after which a call returns early; the program blocks until a call reads more."""
TOKENS = 10_000
"""Most tokens of output that a call returns."""
_PIECE = 1 << 16


class Session(msgspec.Struct):
    """One program that a terminal call started."""

    job: int
    log: str = ""
    shown: int = 0
    """Characters of the log that a call has returned."""
    running: bool = True
    note: str = ""
    """How it ended, when it did not end well."""


def read(workspace: Workspace, number: str) -> Session | None:
    """The session with this number; None when there is none, or its log was removed."""
    text = workspace.memory.get(f"terminal.{number}")
    return msgspec.json.decode(text, type=Session) if text is not None else None


def keep(workspace: Workspace, number: str, session: Session) -> None:
    """Store a session, and remove the oldest other sessions while all logs together exceed `KEEP_BYTES`; of one that
    still runs only the log is removed, so that a later call can poll or end it."""
    memory = workspace.memory
    memory[f"terminal.{number}"] = msgspec.json.encode(session).decode()
    names = [name for name in memory if name.startswith("terminal.")]
    while sum(len(memory[name]) for name in names) > KEEP_BYTES and names[0] != f"terminal.{number}":
        oldest = names.pop(0)
        other = msgspec.json.decode(memory[oldest], type=Session)
        if other.running:
            memory[oldest] = msgspec.json.encode(Session(other.job, REMOVED, len(REMOVED))).decode()
        else:
            del memory[oldest]


def wait_ms(arguments: Mapping[str, str], default: int) -> int | Answer:
    """The argument `yield_time_ms`, or the answer to a text that is not a time."""
    wait = arguments.get("yield_time_ms", str(default)).strip()
    if not (wait.isascii() and wait.isdigit() and len(wait) < 10 and int(wait) <= MOST_YIELD_MS):
        return Answer(f"yield_time_ms: expected 0 to {MOST_YIELD_MS}, got {wait[:40]!r}", ok=False)
    return int(wait)


async def start(workspace: Workspace, command: str, yield_ms: int) -> Answer:
    """Run a shell command and wait for its end or for `yield_ms`."""
    task = workspace.task
    limit = max(LIMIT_S, task.tests.timeout_s, task.sandbox_limits.time_s)
    argv = ("sh", "-c", command)
    begun = await workspace.call(StartJob(argv=argv, open_input=True, timeout_s=limit, output_cap=_PIECE))
    if not begun.ok:
        return Answer(begun.error or begun.stderr.strip() or "failed", ok=False)
    number = str(int(workspace.memory.get("terminals", "0")) + 1)
    workspace.memory["terminals"] = number
    return await follow(workspace, number, Session(begun.job), yield_ms)


async def follow(workspace: Workspace, number: str, session: Session, yield_ms: int) -> Answer:
    """Read output until the program ends or `yield_ms` has passed; answer with the output that is new."""
    until = time.monotonic() + min(yield_ms, MOST_YIELD_MS) / 1e3
    errors = ""
    while session.running:
        left = max(0.0, until - time.monotonic())
        result = await workspace.call(FollowJob(job=session.job, wait_s=left, limit=_PIECE))
        session.log += result.stdout
        errors += result.stderr
        if not result.running:
            session.running, session.note = False, _end(result)
        elif not left or len(session.log) + len(errors) - session.shown > MOST_NEW:
            break
    if errors:
        session.log += ("" if not session.log or session.log.endswith("\n") else "\n") + errors
    new, session.shown = session.log[session.shown :], len(session.log)
    keep(workspace, number, session)
    state = f"session {number} still runs" if session.running else session.note
    text = shortened(new.rstrip("\n"), number, session, workspace)
    ok = session.running or not session.note
    return Answer("\n".join(part for part in (text, state) if part) or "ok", ok=ok)


def _end(result: OpResult) -> str:
    if result.timed_out:
        return "time limit"
    if result.code:
        return f"exit code {result.code}"
    return "" if result.ok else result.error or "failed"


def shortened(text: str, number: str, session: Session, workspace: Workspace) -> str:
    """The text; only its head and tail, and the line numbers of the cut between, if it has more tokens than `TOKENS`
    or a quarter of the characters that a result may have."""
    characters = workspace.cap - 200
    tokens = min(TOKENS, characters // 4)

    def cost(line: str) -> float:
        """The share of the limits that a line takes. Of a line that is too long anyway the tokens are not counted."""
        share = (len(line) + 1) / characters
        return share if share > 1 or len(line) > 64 * tokens else max(share, (workspace.count(line) + 1) / tokens)

    if cost(text) <= 1:
        return text
    first = session.log.count("\n", 0, len(session.log) - len(session.log[session.shown - len(text) :])) + 1
    lines = text.split("\n")

    def taken(lines: Iterable[str]) -> int:
        """How many of these lines fit into half of the limits."""
        sums = itertools.accumulate(map(cost, lines))
        return sum(1 for _ in itertools.takewhile(lambda share: share <= 0.5, sums))

    head = taken(lines)
    tail = len(lines) - taken(reversed(lines[head:]))
    begin, end = first + head, first + tail - 1
    cut = f"[{tail - head} lines cut; terminal_session {number} with lines {begin}-{end} shows them]"
    return "\n".join((*lines[:head], cut, *lines[tail:]))


def log_lines(session: Session, wanted: str) -> Answer:
    """Lines of the whole log, such as ``100-200``."""
    lines = session.log.split("\n")
    if lines[-1] == "":
        lines.pop()
    bounds = number_range(wanted)
    if bounds is None or not 1 <= bounds[0] <= bounds[1]:
        return Answer(f"lines: expected a line or a range such as 10-40, got {wanted!r}", ok=False)
    first, last = bounds
    if first > len(lines):
        return Answer(f"the log has {len(lines)} lines", ok=False)
    return Answer("\n".join(lines[first - 1 : last]))


async def feed(workspace: Workspace, session: Session, text: str) -> str:
    """Write to the program's input. Returns an empty text, or the reason of the failure."""
    done = await workspace.call(FeedJob(job=session.job, data=text.encode()))
    return "" if done.ok else done.error or "failed"


async def stop(workspace: Workspace, session: Session, signal: int) -> str:
    """Send a signal to the program and its descendants. Returns an empty text, or the reason of the failure."""
    done = await workspace.call(StopJob(job=session.job, signal=signal))
    return "" if done.ok else done.error or "failed"
