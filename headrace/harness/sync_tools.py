"""Runs tool calls without an event loop, to generate traces with the code that episodes run."""

from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task

T = TypeVar("T")


@lru_cache(8)
def _toolbox(names: tuple[str, ...], details: bool) -> Toolbox:
    return Toolbox(names, details=details)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("the operations of a sandbox for traces must not suspend")


def answer(
    task: Task,
    sandbox: Sandbox,
    calls: Sequence[ToolCall],
    *,
    details: bool = False,
) -> list[ToolResult]:
    """Results of a turn's calls, run one after another in a sandbox whose operations never suspend.

    details: with the messages of failed tests, as `Renderer.detailed_results` says.
    """
    box = _toolbox(tools_of(task), details)
    return [_run(box.run(call, sandbox, task)) for call in calls]
