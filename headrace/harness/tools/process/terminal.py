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
        """The output, and the exit code if it is not 0; or that the session still runs. In a task without
        terminal_session no later call could read the session, so this call waits for the program's end."""
        offered = workspace.task.tools or DEFAULT_TOOLS
        yield_ms = YIELD_MS if "terminal_session" in offered else sessions.MOST_YIELD_MS
        return await sessions.start(workspace, arguments["command"], yield_ms)


TOOL = TerminalTool()
