"""edit_file: replace lines by their numbers. The small policy uses this format, because line numbers take few tokens;
`edit` (files/edit.py) is for policies that quote the text they replace."""

from headrace.harness.tools.base import Answer, Workspace, failed, number_range
from headrace.harness.tools.files.staleness import forget
from headrace.messages.sandbox import ReplaceLines
from headrace.rendering.schemas import BY_NAME


class EditFileTool:
    """Replaces lines."""

    schema, writes = BY_NAME["edit_file"], True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, or why the lines could not be replaced."""
        wanted = number_range(arguments["lines"])
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        op = ReplaceLines(path=arguments["path"], first=wanted[0], last=wanted[1], text=arguments["text"])
        result = await workspace.call(op)
        forget(workspace, arguments["path"])
        return Answer("ok") if result.ok else failed(result)


TOOL = EditFileTool()
