"""Tools by name, the default ones, and a tool from outside."""

import msgspec
import pytest

from headrace.harness.tools import registry
from headrace.harness.tools.base import Answer, Workspace
from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.harness.tools.todo import TOOL as TODO
from headrace.harness.tools.toolbox import Toolbox, tools_of
from headrace.messages import tasks
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.registry import PluginError, admit
from headrace.rendering.schemas import ToolSchema
from headrace.tasks.generated.repositories import make
from headrace.tasks.local import LocalFiles

TASK = make("train", 4_000_000).task


class Count:
    """A tool from outside, in this file alone."""

    schema, writes = ToolSchema("count_files", "count the files"), False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        if not isinstance(workspace._sandbox, LocalFiles):
            raise RuntimeError("no files")
        return Answer(str(len(workspace._sandbox.files)))


class Half:
    """A tool from outside whose answer holds half of a surrogate pair."""

    schema, writes = ToolSchema("half", "answer"), False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        return Answer("a\ud83db")


COUNT, HALF = Count(), Half()
OUTSIDE = f"{__name__}:COUNT"


def test_every_tool_of_the_package_is_there_and_tasks_say_which_they_offer() -> None:
    others = {"keyword_search", "delete_file", "web_fetch", "web_search", "delegate"}
    assert {*tasks.DEFAULT_TOOLS, *others} == set(registry._built_in())
    assert tools_of(TASK) == ("search", "read_file", "edit_file", "run_tests", "finish")
    assert [schema.name for schema in schemas_of(tasks.DEFAULT_TOOLS)] == list(tasks.DEFAULT_TOOLS)
    with pytest.raises(PluginError, match=r"expected one of .*keyword_search.* or module:attribute, got 'grep'"):
        Toolbox(["grep"])
    admit("tools", [OUTSIDE])
    with pytest.raises(PluginError, match="two tools of a task are called 'count_files'"):
        schemas_of((OUTSIDE, OUTSIDE))


@pytest.mark.anyio
async def test_a_tool_from_outside_answers_and_its_exception_is_an_answer() -> None:
    admit("tools", [OUTSIDE])
    box = Toolbox([*tools_of(TASK), OUTSIDE])
    call = ToolCall(id="0.0", name="count_files")
    result = await box.run(call, LocalFiles({"a": b"", "b": b""}), TASK)
    assert (result.ok, result.output) == (True, "2")
    result = await box.run(call, None, TASK)  # type: ignore[arg-type]
    assert (result.ok, result.output) == (False, "count_files failed: RuntimeError: no files")
    plugin = TOOLS.plugin(OUTSIDE)
    assert plugin is not None and plugin.seam == "tools" and len(plugin.source) == 64


@pytest.mark.anyio
async def test_an_answer_that_no_message_can_carry_is_escaped() -> None:
    admit("tools", [f"{__name__}:HALF"])
    box = Toolbox([f"{__name__}:HALF"])
    result = await box.run(ToolCall(id="0.0", name="half"), LocalFiles({}), TASK)
    assert result.output == "a\\ud83db"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ToolResult) == result


@pytest.mark.anyio
async def test_a_to_do_list_is_counted_or_refused() -> None:
    workspace = Workspace(LocalFiles({}), TASK, "0")
    assert (
        await TODO.run({"items": "[x] look\n[~] mend\n[ ] test\n"}, workspace)
    ).output == "1 open, 1 in progress, 1 done"
    refused = await TODO.run({"items": "[x] look\nmend"}, workspace)
    assert refused == Answer("line 2: expected [ ], [~] or [x] and a text, got 'mend'", ok=False)
    assert "at most 50" in (await TODO.run({"items": "[ ] a\n" * 51}, workspace)).output
