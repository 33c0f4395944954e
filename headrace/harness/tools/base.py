"""What a tool is, and what it gets to work with."""

from typing import Protocol

import msgspec

from headrace.messages.sandbox import Op, OpResult, Sandbox
from headrace.messages.tasks import Task


class Answer(msgspec.Struct, frozen=True):
    """What a tool says: the text that the policy reads, and whether the call did what was asked."""

    output: str
    ok: bool = True


class Workspace:
    """The sandbox as one tool call sees it: every operation gets a call id that a repeat of the call gets again."""

    def __init__(self, sandbox: Sandbox, task: Task, call_id: str, details: bool = False) -> None:
        self.task, self.details = task, details
        self._sandbox, self._call_id, self._count = sandbox, call_id, 0

    async def call(self, op: Op) -> OpResult:
        """Run one operation. SandboxLost passes through: it is no answer of the tool."""
        self._count += 1
        return await self._sandbox.call(op, f"{self._call_id}.{self._count}")


class Tool(Protocol):
    """One tool. `writes` says that it changes the workspace, so that no other call may run beside it."""

    name: str
    writes: bool

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Do it. Arguments are complete and known; their values may be anything."""


def failed(result: OpResult) -> Answer:
    """The answer for an operation that did not succeed."""
    return Answer(result.error or result.stderr.strip() or "failed", ok=False)


def number_range(text: str) -> tuple[int, int] | None:
    """``7`` or ``7-9`` as (first, last); None when it is neither."""
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
