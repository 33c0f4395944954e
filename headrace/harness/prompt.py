"""What a policy is told before its first turn, and which tools it has: by the suite of the task.

A policy that was made from nothing knows its format by heart: terse markup, no system prompt, the task's words. A big
model gets the chat markup, whose system prompt explains the tools (policy/renderer.py).
"""

from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import Task
from headrace.policy.renderer import Renderer


def first_words(request: RolloutRequest, task: Task) -> str:
    """The user's words on the production lane, the task's elsewhere."""
    return request.prompt or task.prompt


def toolbox_for(task: Task, renderer: Renderer, context_tokens: int) -> Toolbox:
    """The tools of an episode. One result may fill about a quarter of the context (two characters a token or more);
    a policy that was not made on terse answers also gets the messages of failed tests."""
    details = bool(renderer.markup.system)
    return Toolbox(tools_of(task), details=details, cap=max(400, context_tokens * 2))
