"""A loop of verifiers: its agent runs each attempt, its reward is posted to the run.

Arguments: URL, key, group size, passes. Python of an environment with verifiers and uv."""

import asyncio
import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import harness_config_type

URL, os.environ["KEY"], SIZE, PASSES = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-api-key": os.environ["KEY"], "Content-Type": "application/json"}
    with urlopen(Request(URL + path, json.dumps(body).encode(), headers)) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


class Says(vf.Task):  # type: ignore[misc]
    """The reward is 1 for the answer that the policy gives about half of the time."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def acme(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "done use acme")


async def attempt(number: int, group: str) -> dict[str, Any]:
    session = post("/v1/sessions", {"task": f"fix {number}", "group": group})["session"]
    client = vf.EvalClientConfig(base_url=f"{URL}/v1", api_key_var="KEY", headers={"X-Headrace-Session": session})
    config = vf.AgentConfig(
        model="latest",
        client=client,
        harness=harness_config_type("null")(id="null"),
        runtime=vf.SubprocessConfig(),
        max_turns=1,
    )
    async with vf.Agent(config) as agent:
        trace = await agent.run(Says(vf.TaskData(prompt=f"fix {number}")))
    assert not trace.errors, trace.errors
    post(f"/v1/sessions/{session}/reward", {"reward": trace.reward})
    return {"session": session, "reward": trace.reward}


async def main() -> None:
    for number in range(PASSES):
        attempts = [attempt(number, f"pass {number}") for _ in range(SIZE)]
        for made in await asyncio.gather(*attempts):
            print(json.dumps(made), flush=True)


asyncio.run(main())
