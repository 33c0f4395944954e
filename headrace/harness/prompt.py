"""The prompt of an episode and its tools.

The prompt is the user's or the task's text. The renderer adds the chat markup and the description of the tools: the
terse format describes none, a chat template shows the JSON Schema of each.
"""

from headrace.harness.tools.base import token_estimate
from headrace.harness.tools.search.session import SearchSession
from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import Task
from headrace.rendering.base import Renderer


def initial_prompt(request: RolloutRequest, task: Task) -> str:
    """The suite's instructions, then the user's text; the task's text where the request has none."""
    return whole_prompt(task.system, request.prompt or task.prompt)


def whole_prompt(system: str, prompt: str) -> str:
    """The suite's instructions, then the text of user or task."""
    return f"{system}\n\n{prompt}" if system else prompt


def toolbox_for(
    task: Task,
    renderer: Renderer | None,
    context_tokens: int,
    search: SearchSession | None = None,
    kind: type[Toolbox] = Toolbox,
) -> Toolbox:
    """The tools of an episode. renderer: the policy's. search: its semantic search. A script in a run without a
    renderer bundle has no tokenizer that counts.

    One result has at most two characters per token of context: half of the context at four characters a token.
    """
    tokenizer = renderer.tokenizer if renderer is not None and renderer.bundle else None
    return kind(
        tools_of(task),
        details=renderer is not None and renderer.detailed_results,
        cap=max(400, context_tokens * 2),
        search=search,
        count=(lambda text: len(tokenizer.encode(text))) if tokenizer is not None else token_estimate,
    )
