"""Policies that are scripts: what they write goes through the same loop, tools and judge as what a model writes.

``oracle`` knows the solution and edits just the lines that differ; ``idle`` finishes at once; ``edit-tests`` makes the
tests that it can see pass by rewriting them. Together they check the pipeline from both sides: a task is sound when the
oracle passes, and a judge is sound when the other two don't.
"""

import difflib
from collections.abc import Sequence

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.messages.tasks import Oracle, Task
from headrace.policy.renderer import Renderer

NAMES = ("oracle", "idle", "edit-tests")
Call = tuple[str, dict[str, str]]

_TOGETHER = 5
"""Edits in one turn: below the usual limit of parallel calls."""
_EMPTY_TEST = "def test_nothing():\n    assert True"
_FINISH: Call = ("finish", {})
_TEST: Call = ("run_tests", {})


def edits(path: str, before: bytes, after: bytes) -> list[Call]:
    """Calls that turn `before` into `after`, last lines first so that line numbers stay right."""
    if not before:
        return [("write_file", {"path": path, "text": after.decode()})]
    old, new = before.decode().splitlines(), after.decode().splitlines()
    calls: list[Call] = []
    for kind, a, b, c, d in reversed(difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()):
        if kind != "equal":
            lines = str(a + 1) if b == a + 1 else f"{a + 1}-{b}"
            calls.append(("edit_file", {"path": path, "lines": lines, "text": "\n".join(new[c:d])}))
    return calls


def script(name: str, task: Task, oracle: Oracle) -> list[list[Call]]:
    """The turns of a scripted policy."""
    if name == "idle":
        return [[_FINISH]]
    if name == "oracle":
        calls = [
            call
            for path, content in sorted(oracle.solution.items())
            for call in edits(path, task.files.get(path, b""), content)
        ]
    elif name == "edit-tests":
        paths = [path for path in task.tests.paths if path in task.files] or [
            path for path in sorted(task.files) if path.rpartition("/")[2].startswith("test_") and path.endswith(".py")
        ]
        calls = [
            ("edit_file", {"path": path, "lines": f"1-{len(task.files[path].splitlines())}", "text": _EMPTY_TEST})
            for path in paths
        ]
    else:
        raise ValueError(f"no scripted policy {name!r}; there are {', '.join(NAMES)}")
    turns = [calls[start : start + _TOGETHER] for start in range(0, len(calls), _TOGETHER)] or [[]]
    turns[-1].append(_TEST)
    return [*turns, [_FINISH]]


class ScriptedEngine:
    """The Engine protocol over a script. Stateless: the turn follows from how many turns the context holds.

    The script is not bound by `max_turn_tokens`: it is no generation, and a right line may be long.
    """

    def __init__(self, name: str, renderer: Renderer, task: Task, oracle: Oracle) -> None:
        self._turns = script(name, task, oracle)
        self._renderer = renderer
        self._opening = renderer.encode([(renderer.markup.turn[0], True)])

    @property
    def fingerprint(self) -> str:
        """Empty: a script has no numerics."""
        return ""

    @property
    def version(self) -> int:
        """-1: a script has no weights."""
        return -1

    async def sample(self, request: SampleRequest) -> Sample:
        """The script's next turn; a segment after a summary only finishes."""
        opening, ids = self._opening, list(request.ids)
        done = sum(ids[at : at + len(opening)] == opening for at in range(len(ids))) - 1
        later = not request.session.endswith("/0")
        calls: Sequence[Call] = [_FINISH] if later or done >= len(self._turns) else self._turns[done]
        said = tuple(self._renderer.turn(calls))
        return Sample(ids=said, logprobs=(0.0,) * len(said), routed=None, spans=(), stop="stop")

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
