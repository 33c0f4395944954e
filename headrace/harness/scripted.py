"""Scripted policies: their turns pass through the same loop, tools and judge as the turns of a model.

``oracle`` knows the solution and edits only the lines that differ. ``idle`` finishes at once. ``edit-tests`` rewrites
the visible tests so that they pass; in a task from an image it rewrites every test module. They check tasks and judges:
a task is valid when the oracle passes, and a judge is valid when the other two fail.
"""

import base64
import difflib
import shlex
from collections.abc import Mapping, Sequence

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.messages.tasks import HOST_FOLDER, PROGRAM, Change, Oracle, Task, interpreter
from headrace.rendering.base import Call, Renderer
from headrace.vmhost.guest.lines import bodies, joined, replaced
from headrace.vmhost.guest.names import shown

NAMES = ("oracle", "idle", "edit-tests")

_TOGETHER = 5
"""Edits in one turn: below the usual limit of parallel calls."""
_ARGUMENT = 96 << 10
"""Characters of base64 in one command; an argument of a program has at most 128 KiB."""
_PROGRAM_MS = 300_000
"""The longest wait for the end of a solution's program in one call, in milliseconds."""
_EMPTY_TEST = "def test_nothing():\n    assert True"
_FORGED = f"""find . \\( -name 'test_*.py' -o -name '*_test.py' \\) -exec sh -c 'for file; do
printf "{_EMPTY_TEST.replace(chr(10), chr(92) + "n")}\\n" > "$file"; done' sh {{}} +
mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"""
"""A task from an image does not list its visible tests, so this replaces every test module and Harbor's reward file."""
_FINISH: Call = ("finish", {})
_TEST: Call = ("run_tests", {})


def edits(path: str, before: bytes, after: bytes) -> list[Call]:
    """Calls of edit_file that turn the lines of `before` into the lines of `after`, last lines first so that line
    numbers stay right."""
    old, new = bodies(before), bodies(after)
    calls: list[Call] = []
    for kind, a, b, c, d in reversed(difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()):
        if kind != "equal":
            lines = str(a + 1) if b == a + 1 else f"{a + 1}-{b}"
            calls.append(("edit_file", {"path": shown(path), "lines": lines, "text": joined(new[c:d])}))
    return calls


def _edited(before: bytes, calls: Sequence[Call]) -> bytes:
    for _, arguments in calls:
        first, _, last = arguments["lines"].partition("-")
        before = replaced(before, int(first), int(last or first), arguments["text"])
    return before


def written(path: str, before: bytes, after: bytes) -> list[Call]:
    """Calls that turn `before` into exactly `after`: edits of lines, write_file where these cannot, or shell commands
    for content that is no text or that write_file would change."""
    try:
        text: str | None = after.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and "</" in text:  # it may spell the end of an argument
        text = None
    if before and text is not None and _edited(before, calls := edits(path, before, after)) == after:
        return calls
    if text == "" or (text and text.endswith("\n") and not text.startswith("\n")):
        return [("write_file", {"path": shown(path), "text": text})]
    quoted, data = shlex.quote(path), base64.b64encode(after).decode()
    pieces = [data[at : at + _ARGUMENT] for at in range(0, len(data), _ARGUMENT)] or [""]
    begin = f'mkdir -p -- "$(dirname -- {quoted})" && : > {quoted}'
    return [
        ("terminal", {"command": f"{'' if at else begin + ' && '}echo {piece} | base64 -d >> {quoted}"})
        for at, piece in enumerate(pieces)
    ]


def _solved(
    before: Mapping[str, bytes],
    solution: Mapping[str, bytes],
    entries: Sequence[Change],
    removed: Sequence[str],
    program: str,
) -> list[Call]:
    """Calls that make a known solution in the order in which a certificate's examination makes it: files, links and
    modes, the program. before: the task's files."""
    in_place = [entry.path for entry in entries if entry.path not in before]  # a file would be written through a link
    commands = [f"rm -rf -- {shlex.quote(path)}" for path in (*removed, *in_place)]
    calls: list[Call] = [("terminal", {"command": " && ".join(commands)})] if commands else []
    calls += [call for path in sorted(solution) for call in written(path, before.get(path, b""), solution[path])]
    commands = []
    for entry in entries:
        path = shlex.quote(entry.path)
        if entry.kind == "folder":
            commands.append(f"mkdir -p -- {path}")
        elif entry.kind == "link":
            target = shlex.quote(entry.target)
            commands.append(f'rm -rf -- {path} && mkdir -p -- "$(dirname -- {path})" && ln -s -- {target} {path}')
        else:
            commands.append(f"chmod {entry.mode:o} -- {path}")
    if program:
        calls += written(PROGRAM, b"", program.encode())
        end = f"code=$?; rm -rf {HOST_FOLDER.rstrip('/')}; exit $code"
        commands.append(f"{shlex.join((*interpreter(program), PROGRAM))}; {end}")
    wait = {"yield_time_ms": str(_PROGRAM_MS)}
    return calls + [("terminal", {"command": command} | wait) for command in commands]


def script(name: str, task: Task, oracle: Oracle) -> list[list[Call]]:
    """The turns of a scripted policy, as lists of calls; empty for a task without a sandbox. ValueError for an unknown
    name."""
    if not task.sandbox:
        return []
    if name == "idle":
        return [[_FINISH]] * (1 + len(task.later))
    if name == "oracle" and oracle.steps:
        rounds = [
            _solved({}, step.solution or {}, step.solution_entries or (), (), step.script)
            for step in oracle.steps.tests
        ]
        return [turn for calls in rounds for turn in _turns(calls)]
    if name == "oracle":
        entries = oracle.solution_entries or ()
        calls = _solved(task.files, oracle.solution, entries, oracle.removed, oracle.script)
    elif name == "edit-tests":
        paths = [path for path in task.tests.paths if path in task.files] or [
            path for path in sorted(task.files) if path.rpartition("/")[2].startswith("test_") and path.endswith(".py")
        ]
        calls = [
            ("edit_file", {"path": shown(path), "lines": f"1-{len(bodies(task.files[path]))}", "text": _EMPTY_TEST})
            for path in paths
        ]
        calls += [("terminal", {"command": _FORGED})] if task.image else []
    else:
        raise ValueError(f"no scripted policy {name!r}: expected one of {', '.join(NAMES)}")
    return [turn for _ in range(1 + len(task.later)) for turn in _turns(calls)]


def _turns(calls: Sequence[Call]) -> list[list[Call]]:
    """The turns of one step: the calls, the tests, the end."""
    turns = [[*calls[start : start + _TOGETHER]] for start in range(0, len(calls), _TOGETHER)] or [[]]
    turns[-1].append(_TEST)
    return [*turns, [_FINISH]]


def _find(ids: Sequence[int], turn: Sequence[int], start: int) -> int:
    """Where a turn that begins at or after `start` ends; -1 when there is none."""
    last = turn[-1]
    for at in range(start + len(turn) - 1, len(ids)):
        if ids[at] == last and tuple(ids[at + 1 - len(turn) : at + 1]) == tuple(turn):
            return at + 1
    return -1


class ScriptedEngine:
    """The Engine protocol over a script. It is stateless: the context determines the next turn.

    `max_turn_tokens` does not limit a script, because a correct line may be longer.
    """

    def __init__(self, turns: Sequence[Sequence[Call]], renderer: Renderer, message: str | None = None) -> None:
        """turns: the calls of each turn, as `script` returns them. message: the only message of an episode without a
        sandbox, in place of `turns`."""
        self._turns: list[tuple[int, ...]] = []
        """Ids of the script's turns in order."""
        calls = 0
        if not renderer.parallel:
            turns = [[call] for turn in turns for call in turn]
        for turn in turns:
            self._turns.append(tuple(renderer.turn(turn, before=calls)))
            calls += len(turn)
        if message is not None:
            self._turns = [(*renderer.tokenizer.encode(message), renderer.stop_ids[0])]
            self._finish = self._turns[0]
        else:
            self._finish = tuple(renderer.turn([_FINISH]))

    @property
    def fingerprint(self) -> str:
        """Empty: a script has no numerics."""
        return ""

    @property
    def version(self) -> int:
        """-1: a script has no weights."""
        return -1

    async def sample(self, request: SampleRequest) -> Sample:
        """The script's next turn; every segment after the first one only calls finish."""
        later = not request.session.endswith("/0")
        ids = self._finish if later else self._next(request.ids)
        return Sample(ids=ids, logprobs=(0.0,) * len(ids), routed=None, spans=(), stop="stop")

    def _next(self, context: Sequence[int]) -> tuple[int, ...]:
        """The first turn that the context does not contain. File contents cannot match a turn, because a turn ends with
        a stop id."""
        at = 0
        for turn in self._turns:
            at = _find(context, turn, at)
            if at < 0:
                return turn
        return self._finish

    async def close(self, session: str) -> None:
        """Nothing is kept."""

    async def stop(self) -> None:
        """Nothing runs."""

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """EngineError: a script has no weights."""
        raise EngineError("a scripted policy has no weights to load")

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """EngineError: a script has no weights."""
        raise EngineError("a scripted policy has no weights to pin")

    async def unpin(self, version: int) -> None:
        """Nothing is pinned."""
