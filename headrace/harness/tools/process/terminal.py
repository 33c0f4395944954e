"""terminal: a shell command in the repository."""

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Exec
from headrace.rendering.schemas import BY_NAME


class TerminalTool:
    """`sh -c` in the repository."""

    schema, writes = BY_NAME["terminal"], True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Both outputs and the exit code, when it is not 0."""
        result = await workspace.call(Exec(argv=("sh", "-c", arguments["command"]), timeout_s=30.0))
        text = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip())
        if result.timed_out:
            return Answer(f"{text}\ntime limit".strip(), ok=False)
        if result.code:
            return Answer(f"{text}\nexit code {result.code}".strip(), ok=False)
        return Answer(text or "ok") if result.ok else failed(result)


TOOL = TerminalTool()
