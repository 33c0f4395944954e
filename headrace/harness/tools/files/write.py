"""write_file: create a file, or replace its whole content."""

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.harness.tools.files.staleness import remember
from headrace.messages.sandbox import WriteFiles
from headrace.rendering.schemas import BY_NAME


class WriteFileTool:
    """Creates or replaces a file. A final newline is added to content that has none."""

    schema, writes = BY_NAME["write_file"], True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, or why the file could not be written."""
        content = arguments["text"].removeprefix("\n")
        data = (content if content.endswith("\n") or not content else content + "\n").encode("utf-8", "replace")
        result = await workspace.call(WriteFiles(files={arguments["path"]: data}))
        if not result.ok:
            return failed(result)
        remember(workspace, arguments["path"], data)
        return Answer("ok")


TOOL = WriteFileTool()
