"""delete_file: remove one file."""

from headrace.harness.tools.base import PATH, Answer, ToolSchema, Workspace, failed
from headrace.harness.tools.files.staleness import forget
from headrace.messages.sandbox import ReadFile, WriteFiles


class DeleteFileTool:
    """Removes a file. Folders are refused: a wrong path must not cost more than one file."""

    schema, writes = ToolSchema("delete_file", "remove a file", (PATH,)), True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, or why the file could not be removed."""
        path = arguments["path"]
        present = await workspace.call(ReadFile(path=path, limit=1))
        if not present.ok:
            return failed(present)
        removed = await workspace.call(WriteFiles(files={}, delete=(path,)))
        if not removed.ok:
            return failed(removed)
        forget(workspace, path)
        return Answer("ok")


TOOL = DeleteFileTool()
