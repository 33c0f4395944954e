"""Reading, listing, editing and writing files."""

from headrace.harness.tools.base import Answer, Workspace, failed, number_range, numbered
from headrace.messages.sandbox import ListFiles, ReadFile, ReplaceLines, WriteFiles


class ReadFileTool:
    """A file, or some of its lines, with line numbers."""

    name, writes = "read_file", False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Lines as ``number:text``."""
        wanted = number_range(arguments["lines"]) if "lines" in arguments else (1, 1 << 30)
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        result = await workspace.call(ReadFile(path=arguments["path"]))
        if not result.ok:
            return failed(result)
        lines = result.data.decode("utf-8", "replace").splitlines()
        first, last = max(1, wanted[0]), wanted[1]
        if first > len(lines) and lines:
            return Answer(f"the file has {len(lines)} lines", ok=False)
        return Answer(numbered(lines[first - 1 : last], first))


class ListFilesTool:
    """Paths that match a pattern."""

    name, writes = "list_files", False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """One path a line."""
        result = await workspace.call(ListFiles(pattern=arguments.get("glob", "**"), limit=200))
        if not result.ok:
            return failed(result)
        return Answer(result.stdout.strip("\n") or "no files")


class EditFileTool:
    """Replacement of lines."""

    name, writes = "edit_file", True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, or why the lines could not be replaced."""
        wanted = number_range(arguments["lines"])
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        op = ReplaceLines(path=arguments["path"], first=wanted[0], last=wanted[1], text=arguments["text"])
        result = await workspace.call(op)
        return Answer("ok") if result.ok else failed(result)


class WriteFileTool:
    """A new file, or a whole new content."""

    name, writes = "write_file", True

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """``ok``, or why it could not be written."""
        content = arguments["text"].removeprefix("\n")
        data = (content if content.endswith("\n") or not content else content + "\n").encode("utf-8", "replace")
        result = await workspace.call(WriteFiles(files={arguments["path"]: data}))
        return Answer("ok") if result.ok else failed(result)
