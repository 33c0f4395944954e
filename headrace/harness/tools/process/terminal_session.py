"""terminal_session: poll, write to, or end a program that a terminal call left running; or read lines of its log."""

import signal

from headrace.harness.tools.base import Answer, Parameter, ToolSchema, Workspace
from headrace.harness.tools.process import sessions

YIELD_MS = 5_000
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


class TerminalSessionTool:
    """One session of the episode's terminal."""

    schema = ToolSchema(
        "terminal_session",
        "go on with a session of the terminal: wait for output, write to its input, end it, or show lines of its log",
        (
            Parameter("session", "its number"),
            Parameter("yield_time_ms", "how long to wait for its end; 5000 when left out", required=False),
            Parameter("signal", "kill, term or int: end it", required=False),
            Parameter("lines", "show these lines of its whole output, such as 10-40", required=False),
        ),
        Parameter("input", "text for its input; write the line break too", required=False),
    )
    writes = True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """New output and how the program ended; or that it still runs."""
        number = arguments["session"].strip()
        session = sessions.read(workspace, number)
        if session is None:
            return Answer(f"there is no session {number[:40]!r} with a log", ok=False)
        if "lines" in arguments:
            return sessions.log_lines(session, arguments["lines"])
        wait = sessions.wait_ms(arguments, YIELD_MS)
        if isinstance(wait, Answer):
            return wait
        wanted = arguments.get("signal", "").strip().lower().removeprefix("sig")
        if wanted and wanted not in SIGNALS:
            return Answer(f"signal: expected {', '.join(SIGNALS)}, got {wanted[:40]!r}", ok=False)
        if not session.running:
            return Answer(f"session {number} has ended{': ' if session.note else ''}{session.note}", ok=False)
        problem = ""
        if arguments.get("input"):
            problem = await sessions.feed(workspace, session, arguments["input"])
        if wanted and not problem:
            problem = await sessions.stop(workspace, session, SIGNALS[wanted])
        if problem:
            return Answer(problem, ok=False)
        return await sessions.follow(workspace, number, session, wait)


TOOL = TerminalSessionTool()
