"""terminal: a shell command in the repository. A program that runs longer than the time to yield becomes a session."""

from headrace.harness.tools.base import Answer, Parameter, Workspace
from headrace.harness.tools.process import sessions
from headrace.messages.tasks import DEFAULT_TOOLS
from headrace.rendering.schemas import BY_NAME, extended

YIELD_MS = 10_000


class TerminalTool:
    """`sh -c` in the repository."""

    schema = extended(
        BY_NAME["terminal"],
        Parameter(
            "yield_time_ms",
            "how long to wait for its end before it runs on as a session; 10000 when left out",
            required=False,
        ),
    )
    writes = True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """The output, and the exit code if it is not 0; or that the session still runs. In a task without
        terminal_session no later call could read the session, so this call waits for the program's end."""
        offered = workspace.task.tools or DEFAULT_TOOLS
        yield_ms = sessions.wait_ms(arguments, YIELD_MS)
        if isinstance(yield_ms, Answer):
            return yield_ms
        if "terminal_session" not in offered:
            yield_ms = sessions.MOST_YIELD_MS
        return await sessions.start(workspace, arguments["command"], yield_ms)


TOOL = TerminalTool()
