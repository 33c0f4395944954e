from headrace.harness.tools.base import PATH, Answer, ToolSchema, Workspace
from headrace.messages.sandbox import ReadFile


class CountLines:
    schema, writes = ToolSchema("count_lines", "count the lines of a file", (PATH,)), False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        read = await workspace.call(ReadFile(path=arguments["path"]))
        return Answer(f"{len(read.data.splitlines())} lines" if read.ok else read.error, ok=read.ok)


TOOL = CountLines()
