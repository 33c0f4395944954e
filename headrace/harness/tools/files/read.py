"""read_file: a file, or some of its lines, with line numbers."""

from headrace.harness.tools.base import Answer, Workspace, failed, number_range, numbered
from headrace.harness.tools.files.staleness import remember
from headrace.messages.sandbox import ReadFile
from headrace.rendering.schemas import BY_NAME


class ReadFileTool:
    """Shows a file."""

    schema, writes = BY_NAME["read_file"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Lines as ``number:text``."""
        wanted = number_range(arguments["lines"]) if "lines" in arguments else (1, 1 << 30)
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        result = await workspace.call(ReadFile(path=arguments["path"]))
        if not result.ok:
            return failed(result)
        remember(workspace, arguments["path"], result.data)
        lines = result.data.decode("utf-8", "replace").splitlines()
        first, last = max(1, wanted[0]), wanted[1]
        if first > len(lines) and lines:
            return Answer(f"the file has {len(lines)} lines", ok=False)
        return Answer(numbered(lines[first - 1 : last], first))


TOOL = ReadFileTool()
