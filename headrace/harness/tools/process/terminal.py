"""terminal: a shell command in the repository. A program that runs longer than the time to yield becomes a session."""

from headrace.harness.tools.base import Answer, Workspace
from headrace.harness.tools.process import sessions
from headrace.messages.tasks import DEFAULT_TOOLS
from headrace.rendering.schemas import BY_NAME

YIELD_MS = 10_000


class TerminalTool:
    """`sh -c` in the repository."""

    schema, writes = BY_NAME["terminal"], True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Both outputs and the exit code, when it is not 0; or that the session still runs. A task
        without terminal_session could not go on with it, so there the call waits for the end."""
        offered = workspace.task.tools or DEFAULT_TOOLS
        yield_ms = YIELD_MS if "terminal_session" in offered else sessions.MOST_YIELD_MS
        return await sessions.start(workspace, arguments["command"], yield_ms)


TOOL = TerminalTool()
