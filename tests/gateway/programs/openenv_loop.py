"""A loop of OpenEnv: its harness drives each attempt by model steps that keep token ids and log-probabilities.

Arguments: URL, key, group size, passes. Python of an environment with openenv-core."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStepResult,
    ResourceSession,
    ToolResult,
    VerifyResult,
)
from openenv.core.llm_client import LLMResponse, ToolCall

URL, KEY, SIZE, PASSES = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RUN_TESTS = Tool(name="run_tests", description="", input_schema={"type": "object", "properties": {}})


def post(path: str, body: dict[str, Any], session: str = "") -> dict[str, Any]:
    headers = {"x-api-key": KEY, "Content-Type": "application/json", "X-Headrace-Session": session}
    with urlopen(Request(URL + path, json.dumps(body).encode(), headers)) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


class Fix(ResourceSession):  # type: ignore[misc]
    """A request whose tests always pass. The reward is 1 if they were run."""

    def __init__(self, number: int) -> None:
        self.number, self.ran = number, 0

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"fix {self.number}"}]

    def list_tools(self) -> list[Tool]:
        return [RUN_TESTS]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self.ran += name == "run_tests"
        return ToolResult(data="passed")

    def verify(self, transcript: list[dict[str, Any]], final_state: object = None) -> VerifyResult:
        return VerifyResult(env_reward=float(self.ran > 0), done=True)

    def close(self) -> None:
        pass


def attempt(number: int, group: str) -> dict[str, Any]:
    session = post("/v1/sessions", {"task": f"fix {number}", "group": group})["session"]

    def step(messages: list[dict[str, Any]], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        functions = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}} for tool in tools
        ]
        body = {"model": "latest", "messages": messages, "tools": functions, "logprobs": True, "return_token_ids": True}
        answer = post("/v1/chat/completions", body | sampling, session)
        (choice,) = answer["choices"]
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], args=json.loads(call["function"]["arguments"]))
            for call in choice["message"].get("tool_calls") or ()
        ]
        return ModelStepResult(
            response=LLMResponse(content=choice["message"]["content"] or "", tool_calls=calls),
            prompt_ids=answer["prompt_token_ids"],
            completion_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        )

    fix = Fix(number)
    result = MCPHarnessAdapter().run_white_box(step, fix, HarnessRunLimits(max_turns=3))
    reward = fix.verify(result.messages).env_reward
    post(f"/v1/sessions/{session}/reward", {"reward": reward})
    return {"session": session, "reward": reward, "ids": result.completion_ids, "logprobs": result.logprobs}


with ThreadPoolExecutor(SIZE) as pool:
    for number in range(PASSES):
        for made in pool.map(attempt, [number] * SIZE, [f"pass {number}"] * SIZE):
            print(json.dumps(made), flush=True)
