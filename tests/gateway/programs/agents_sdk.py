"""Two agents on OpenAI's Agents SDK: `agents_sdk.py chat|responses URL KEY`. One writes files with a tool, the other
has none; both answer in the form of `output_type`."""

import asyncio
import sys
from pathlib import Path

import openai
import pydantic
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled


class Report(pydantic.BaseModel):
    """The files that were written."""

    files: list[str]


@function_tool  # type: ignore[untyped-decorator]
def write(path: str, text: str) -> str:
    """Write a file."""
    Path(path).write_text(text)
    return "written"


async def main(kind: str, url: str, key: str) -> None:
    """Print the files of both reports."""
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[kind]("latest", client)
    writer = Agent(name="writer", instructions="Be brief.", model=model, tools=[write], output_type=Report)
    reporter = Agent(name="reporter", model=model, output_type=Report)
    for agent, asked in ((writer, "write two files"), (reporter, "which files are there?")):
        report = (await Runner.run(agent, asked)).final_output
        assert isinstance(report, Report)
        print(agent.name, report.files)


asyncio.run(main(*sys.argv[1:]))
