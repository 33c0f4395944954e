"""The terminal's conformance cases: one table of calls and answers, for the process backend and for a microVM."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from headrace.config import Environment
from headrace.harness.tools.process import sessions, terminal
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import SandboxLimits, Task, TaskRef, TestPlan
from headrace.vmhost.node.host import Host
from tests.support import hosts

pytestmark = pytest.mark.anyio

LONG_MS = "240000"
"""Far more than any of the programs needs: it ends long before."""
TASK = Task(
    ref=TaskRef("s", "t"), family="f", prompt="p", files={"a.txt": b"one\ntwo\n"}, allowed=("**",), tests=TestPlan()
)
Step = tuple[dict[str, str], str]
"""Arguments (with ``command`` for the terminal, else for the session), and the answer."""


def run(command: str, answer: str) -> list[Step]:
    return [({"command": command}, answer)]


ENDS: dict[str, list[Step]] = {
    "output": run("echo hello", "hello"),
    "silence": run("true", "ok"),
    "exit code": run("echo bad; exit 3", "bad\nexit code 3"),
    "exit code alone": run("false", "exit code 1"),
    "standard error": run("echo out; echo err >&2", "out\nerr"),
    "error alone": run("echo err >&2; exit 2", "err\nexit code 2"),
    "a signal": run("kill -9 $$", "exit code -9"),
    "a missing program": run("no-such-program 2>/dev/null", "exit code 127"),
    "repository as folder": run("cat a.txt", "one\ntwo"),
    "a pipe": run("cat a.txt | wc -l | tr -d ' '", "2"),
    "a file that stays": [*run("echo three > b.txt", "ok"), *run("cat b.txt", "three")],
    "variables do not stay": [*run("X=1; export X", "ok"), *run("echo [$X]", "[]")],
    "quotes": run("echo \"a b\" 'c $d'", "a b c $d"),
    "several lines": run("echo 1\necho 2\n", "1\n2"),
    "unicode": run("printf 'gr\\303\\274n'", "grün"),
    "bytes that are no text": run("printf 'a\\377b'", "a\ufffdb"),
    "blank lines inside": run("printf 'a\\n\\nb\\n\\n'", "a\n\nb"),
    "input is a pipe": run("test -t 0 || echo no terminal", "no terminal"),
    "a child that outlives the shell": run("(sleep 0.01; echo late) & wait; echo done", "late\ndone"),
    "numbers of sessions count up": [*run("true", "ok"), *run("true", "ok"), ({"session": "2"}, "session 2 has ended")],
    "lines of an ended log": [
        *run("seq 9", "\n".join(map(str, range(1, 10)))),
        ({"session": "1", "lines": "3-4"}, "3\n4"),
    ],
    "a line behind the log": [*run("echo x", "x"), ({"session": "1", "lines": "7"}, "the log has 1 lines")],
}
GONE = "while kill -0 $(cat pid) 2> /dev/null; do sleep 0.02; done"
WAITS: dict[str, list[Step]] = {
    "input ends it": [
        ({"command": "read x; echo got $x"}, "session 1 still runs"),
        ({"session": "1", "input": "it\n", "yield_time_ms": LONG_MS}, "got it"),
    ],
    "a wait that the call itself sets": [
        ({"command": "read x", "yield_time_ms": "-1"}, "yield_time_ms: expected 0 to 300000, got '-1'"),
        ({"command": "echo x; sleep 0.01", "yield_time_ms": LONG_MS}, "x"),
        ({"command": "read x", "yield_time_ms": "1"}, "session 2 still runs"),
        ({"session": "2", "input": "\n", "yield_time_ms": LONG_MS}, "ok"),
    ],
    "poll without waiting": [
        ({"command": "read x"}, "session 1 still runs"),
        ({"session": "1", "yield_time_ms": "0"}, "session 1 still runs"),
        ({"session": "1", "input": "\n", "yield_time_ms": LONG_MS}, "ok"),
    ],
    "kill": [
        ({"command": "read x"}, "session 1 still runs"),
        ({"session": "1", "signal": "kill", "yield_time_ms": LONG_MS}, "exit code -9"),
        ({"session": "1"}, "session 1 has ended: exit code -9"),
    ],
    "term": [
        ({"command": "read x"}, "session 1 still runs"),
        ({"session": "1", "signal": "SIGTERM", "yield_time_ms": LONG_MS}, "exit code -15"),
    ],
    "int": [
        ({"command": "echo $$ > pid; read x"}, "session 1 still runs"),
        ({"command": "until test -s pid; do sleep 0.02; done; read x; echo there"}, "session 2 still runs"),
        ({"session": "2", "input": "\n", "yield_time_ms": LONG_MS}, "there"),
        ({"session": "1", "signal": "int", "yield_time_ms": LONG_MS}, "exit code -2"),
    ],
    "kill reaches children": [
        ({"command": "read x; sleep 1000 & echo $! > pid; read y"}, "session 1 still runs"),
        ({"command": "until test -s pid; do sleep 0.02; done; read x; echo there"}, "session 2 still runs"),
        ({"session": "1", "input": "\n", "yield_time_ms": "0"}, "session 1 still runs"),
        ({"session": "2", "input": "\n", "yield_time_ms": LONG_MS}, "there"),
        ({"session": "1", "signal": "kill", "yield_time_ms": LONG_MS}, "exit code -9"),
        ({"command": f"read x; {GONE}; echo gone"}, "session 3 still runs"),
        ({"session": "3", "input": "\n", "yield_time_ms": LONG_MS}, "gone"),
    ],
    "two sessions": [
        ({"command": "read x; echo one $x"}, "session 1 still runs"),
        ({"command": "read x; echo two $x"}, "session 2 still runs"),
        ({"session": "2", "input": "b\n", "yield_time_ms": LONG_MS}, "two b"),
        ({"session": "1", "input": "a\n", "yield_time_ms": LONG_MS}, "one a"),
    ],
    "a log over several calls": [
        ({"command": "read x; read y; echo $x; echo $y"}, "session 1 still runs"),
        ({"session": "1", "input": "a\n", "yield_time_ms": "0"}, "session 1 still runs"),
        ({"session": "1", "input": "b\n", "yield_time_ms": LONG_MS}, "a\nb"),
        ({"session": "1", "lines": "2"}, "b"),
    ],
    "a wrong session, signal, time, range": [
        ({"command": "read x"}, "session 1 still runs"),
        ({"session": "9"}, "there is no session '9' with a log"),
        ({"session": "1", "signal": "hup"}, "signal: expected kill, term, int, got 'hup'"),
        ({"session": "1", "yield_time_ms": "-1"}, "yield_time_ms: expected 0 to 300000, got '-1'"),
        ({"session": "1", "lines": "4-2"}, "lines: expected a line or a range such as 10-40, got '4-2'"),
        ({"session": "1", "signal": "kill", "yield_time_ms": LONG_MS}, "exit code -9"),
    ],
}
CASES = {name: (240_000, steps) for name, steps in ENDS.items()} | {name: (0, steps) for name, steps in WAITS.items()}
Fresh = Callable[[], Awaitable[Sandbox]]


@pytest.fixture(scope="module", params=["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])])
async def fresh(request: pytest.FixtureRequest) -> AsyncIterator[Fresh]:
    section = Environment(backend="process", max_vms=64) if request.param == "process" else hosts.environment()
    host = await Host.open(section)
    numbers = itertools.count()

    async def acquire() -> Sandbox:
        number = next(numbers)
        return await host.acquire(hosts.ask(number % 8, group=f"t{number // 8}", files=TASK.files))

    yield acquire
    await host.close()


def test_there_are_thirty_cases_and_more() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
async def test_a_case_has_the_same_answers_on_every_backend(
    fresh: Fresh, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    yield_ms, steps = CASES[name]
    monkeypatch.setattr(terminal, "YIELD_MS", yield_ms)
    sandbox, box = await fresh(), Toolbox(("terminal", "terminal_session"))
    for number, (arguments, answer) in enumerate(steps):
        assert (await call(box, sandbox, number, arguments)).output == answer


async def call(box: Toolbox, sandbox: Sandbox, number: int, arguments: dict[str, str]) -> ToolResult:
    tool = "terminal" if "command" in arguments else "terminal_session"
    return await box.run(ToolCall(id=f"{number}.0", name=tool, arguments=arguments), sandbox, TASK)


async def test_long_output_shows_head_and_tail_and_the_log_has_the_rest(fresh: Fresh) -> None:
    sandbox, box = await fresh(), Toolbox(("terminal", "terminal_session"), cap=1000)
    shown = await call(box, sandbox, 0, {"command": "seq 5000"})
    head, cut, tail = shown.output.partition("\n[")[0], shown.output.partition("[")[2], shown.output[-5:]
    assert head.startswith("1\n2\n3") and tail == "\n5000" and len(shown.output) <= 1000 and not shown.truncated
    first, last = (int(part) for part in cut.partition(" with lines ")[2].partition(" ")[0].split("-"))
    assert head.split("\n")[-1] == str(first - 1) and f"]\n{last + 1}\n" in shown.output
    assert (
        await call(box, sandbox, 1, {"session": "1", "lines": f"{first}-{first + 1}"})
    ).output == f"{first}\n{first + 1}"


async def test_the_cap_is_in_tokens_of_the_policy(fresh: Fresh) -> None:
    sandbox = await fresh()
    shown: dict[int, str] = {}
    for tokens_of in (len, lambda text: len(text) // 10):
        box = Toolbox(("terminal", "terminal_session"), cap=4200, count=tokens_of)
        shown[tokens_of("x" * 10)] = (await call(box, sandbox, len(shown), {"command": "seq 300"})).output
    assert shown[1] == "\n".join(map(str, range(1, 301))), "109 tokens and 1091 characters"
    assert len(shown[10]) < 1100 and "terminal_session 1 with lines" in shown[10] and shown[10].endswith("\n300")


async def test_a_program_that_never_stops_writing_is_yielded_and_ended_by_its_tasks_limit(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LIMIT_S", 1.0)
    task = msgspec.structs.replace(TASK, tests=TestPlan(timeout_s=0.1))
    sandbox, box = await fresh(), Toolbox(("terminal", "terminal_session"), cap=1000)
    shown = await box.run(ToolCall(id="0", name="terminal", arguments={"command": "yes"}), sandbox, task)
    assert shown.output.endswith(("session 1 still runs", "time limit")) and len(shown.output) <= 1000
    for number in range(1, 400):
        if shown.output.endswith("time limit"):
            break
        arguments = {"session": "1", "yield_time_ms": LONG_MS}
        shown = await box.run(ToolCall(id=str(number), name="terminal_session", arguments=arguments), sandbox, task)
    assert shown.output.endswith("time limit") and not shown.ok


async def test_a_program_may_run_as_long_as_the_episode_of_its_task(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LIMIT_S", 0.05)
    program = ToolCall(id="0", name="terminal", arguments={"command": "sleep 0.5; echo end"})
    for limits, output in ((SandboxLimits(), "time limit"), (SandboxLimits(time_s=60.0), "end")):
        task = msgspec.structs.replace(TASK, tests=TestPlan(timeout_s=0.05), tools=("terminal",), limits=limits)
        assert (await Toolbox(("terminal",)).run(program, await fresh(), task)).output == output


async def test_a_task_without_sessions_waits_for_the_end(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "YIELD_MS", 0)
    task = msgspec.structs.replace(TASK, tools=("terminal",))
    program = ToolCall(id="0", name="terminal", arguments={"command": "sleep 0.2; echo end"})
    assert (await Toolbox(("terminal",)).run(program, await fresh(), task)).output == "end"


async def test_a_program_that_runs_on_can_be_ended_also_when_its_log_is_gone(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "KEEP_BYTES", 2000)
    monkeypatch.setattr(terminal, "YIELD_MS", 0)
    sandbox, box = await fresh(), Toolbox(("terminal", "terminal_session"), cap=8000)
    waiting = await call(box, sandbox, 0, {"command": "seq 400; read word; echo got $word"})
    while "400" not in waiting.output:  # the program may start after the first look
        waiting = await call(box, sandbox, 1, {"session": "1"})
    monkeypatch.setattr(terminal, "YIELD_MS", int(LONG_MS))
    await call(box, sandbox, 2, {"command": "seq 500"})
    await call(box, sandbox, 3, {"command": "seq 501"})
    gone = await call(box, sandbox, 4, {"session": "2"})
    assert not gone.ok, "it had ended"
    log = await call(box, sandbox, 5, {"session": "1", "lines": "1-9"})
    assert log.output == sessions.REMOVED.strip()
    fed = await call(box, sandbox, 6, {"session": "1", "input": "x\n"})
    while "got x" not in fed.output:
        fed = await call(box, sandbox, 7, {"session": "1"})
