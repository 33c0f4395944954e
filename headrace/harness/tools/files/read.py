"""read_file: a file, or some of its lines, with line numbers, and on request with the anchors that `edit` takes."""

from headrace.harness.tools.base import Answer, Parameter, Workspace, failed, number_range, numbered, true_or_false
from headrace.harness.tools.files.anchors import anchored
from headrace.harness.tools.files.staleness import LARGEST, remember
from headrace.messages.sandbox import ReadFile
from headrace.rendering.schemas import BY_NAME, extended
from headrace.vmhost.guest.lines import parse, shown


class ReadFileTool:
    """Shows a file."""

    schema = extended(
        BY_NAME["read_file"],
        Parameter("anchors", "true shows each line as number#hash, which edit takes in at", required=False),
    )
    writes = False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Lines as ``number:text``, or with anchors as ``number#hash:text``."""
        anchors = true_or_false(arguments, "anchors")
        if isinstance(anchors, Answer):
            return anchors
        wanted = number_range(arguments["lines"]) if "lines" in arguments else (1, 1 << 30)
        if wanted is None:
            return Answer("lines must be a number or a range such as 3-9", ok=False)
        result = await workspace.call(ReadFile(path=arguments["path"], limit=LARGEST))
        if not result.ok:
            return failed(result)
        remember(workspace, arguments["path"], result.data)
        lines = parse(result.data).lines
        first, last = max(1, wanted[0]), wanted[1]
        if first > len(lines) and lines:
            return Answer(f"the file has {len(lines)} lines", ok=False)
        if anchors:
            return Answer(anchored(lines[first - 1 : last], first))
        return Answer(numbered([shown(line) for line in lines[first - 1 : last]], first))


TOOL = ReadFileTool()
