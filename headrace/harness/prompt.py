"""The prompt of an episode and its tools.

The prompt is the user's or the task's text. The renderer decides how it is framed and whether the tools are explained:
the terse format explains nothing, a chat template shows the JSON Schema of every tool.
"""

from headrace.harness.tools.search.session import SearchSession
from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import Task


def initial_prompt(request: RolloutRequest, task: Task) -> str:
    """The user's text on the production lane, the task's elsewhere, behind the instructions of the suite."""
    prompt = request.prompt or task.prompt
    return f"{task.system}\n\n{prompt}" if task.system else prompt


def toolbox_for(
    task: Task, detailed_results: bool, context_tokens: int, search: SearchSession | None = None
) -> Toolbox:
    """The tools of an episode. detailed_results: as of its renderer. search: its semantic search.

    One result may fill the context to about a quarter, at two characters a token or more.
    """
    return Toolbox(tools_of(task), details=detailed_results, cap=max(400, context_tokens * 2), search=search)
