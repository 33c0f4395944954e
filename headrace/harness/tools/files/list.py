"""list_files: paths that match a glob."""

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import ListFiles
from headrace.rendering.schemas import BY_NAME


class ListFilesTool:
    """Lists paths."""

    schema, writes = BY_NAME["list_files"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """One path a line."""
        result = await workspace.call(ListFiles(pattern=arguments.get("glob", "**"), limit=200))
        if not result.ok:
            return failed(result)
        return Answer(result.stdout.strip("\n") or "no files")


TOOL = ListFilesTool()
