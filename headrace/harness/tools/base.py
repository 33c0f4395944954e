"""A tool: its schema, its code, and the workspace that one call gets.

A module of this package that defines `TOOL` is a built-in tool. A tool outside this package is named by an entry point
of the group ``headrace.tools`` or as ``module:attribute`` (docs/extending.md). All episodes share one tool object, so a
tool has no state of its own: it stores the notes of an episode in `Workspace.memory`.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from headrace.harness.tools.search.session import SearchSession
from headrace.messages.sandbox import Op, OpResult, Sandbox
from headrace.messages.search import Retrieved
from headrace.messages.tasks import Task
from headrace.rendering.schemas import Parameter, ToolSchema

__all__ = [
    "PATH", "Answer", "Parameter", "Tool", "ToolSchema", "Workspace", "failed", "number_range", "numbered", "shortened",
    "true_or_false",
]  # fmt: skip

PATH = Parameter("path", "path from the repository's root")


class Answer(msgspec.Struct, frozen=True):
    """The result of a call: the text that the policy reads, and whether the call did what was asked."""

    output: str
    ok: bool = True
    retrieved: Retrieved | None = None
    """Evidence of a semantic search, for the trajectory."""


Delegate = Callable[[str, str, int], Awaitable[Answer]]
"""Runs a child agent: the call's id, the child's prompt, the most turns that it may have."""


def token_estimate(text: str) -> int:
    """Tokens of a text where no tokenizer is available: four characters each."""
    return -(-len(text) // 4)


class Workspace:
    """The sandbox as one tool call sees it. The n-th operation of a repeated call has the same id as before."""

    def __init__(
        self,
        sandbox: Sandbox,
        task: Task,
        call_id: str,
        details: bool = False,
        memory: dict[str, str] | None = None,
        search: SearchSession | None = None,
        cap: int = 4000,
        count: Callable[[str], int] = token_estimate,
    ) -> None:
        """details: whether the policy reads messages of failed tests. memory: the episode's notes. search: the
        episode's semantic search, if its run has an embedding model. cap: most characters of a result. count: the
        tokens of a text for the policy."""
        self.task, self.details = task, details
        self.memory = {} if memory is None else memory
        """Notes of the episode, such as the hash of a file as it was last read. A resumed episode starts with none."""
        self.search, self.call_id, self.cap, self.count = search, call_id, cap, count
        self.delegate: Delegate | None = None
        self._sandbox, self._count = sandbox, 0

    async def call(self, op: Op) -> OpResult:
        """Run one operation. SandboxLost must reach the caller of the tool: it is an infrastructure failure."""
        self._count += 1
        return await self._sandbox.call(op, f"{self.call_id}.{self._count}")


class Tool(Protocol):
    """One tool."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and arguments, as a policy sees them."""

    @property
    def writes(self) -> bool:
        """Whether it may change the workspace, so that no other call runs beside it."""

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Execute a call. The schema has checked the arguments' names, but not their values."""


def count_external(server: str, memory: dict[str, str]) -> int:
    """Count a call to an MCP server in this episode; return the number of earlier calls."""
    note = f"mcp {server}"
    before = int(memory.get(note, "0"))
    memory[note] = str(before + 1)
    return before


def failed(result: OpResult) -> Answer:
    """The answer for an operation that did not succeed."""
    return Answer(result.error or result.stderr.strip() or "failed", ok=False)


def true_or_false(arguments: Mapping[str, str], name: str) -> bool | Answer:
    """The value of an argument that is true or false, false when it is left out; the answer to any other text."""
    text = arguments.get(name, "false").strip().lower()
    if text in ("true", "false"):
        return text == "true"
    return Answer(f"{name}: expected true or false, got {text[:40]!r}", ok=False)


def number_range(text: str) -> tuple[int, int] | None:
    """``7`` or ``7-9`` as (first, last); None for other texts."""
    first, dash, last = text.strip().partition("-")
    if not (first.isascii() and first.isdigit() and len(first) < 8):
        return None
    if not dash:
        return int(first), int(first)
    if not (last.isascii() and last.isdigit() and len(last) < 8):
        return None
    return int(first), int(last)


def numbered(lines: list[str], first: int = 1) -> str:
    """Lines as ``number:text``."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(lines, first))


def shortened(text: str, most: int) -> str:
    """The first and the last `most` / 2 characters of a longer text, and between them how many are cut."""
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[len(text) - half :]}"
