"""A model judges the user's next prompt: over a real gateway, broker and HTTP server with written answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from aiohttp import web

from headrace.config import Config, ConfigError
from headrace.config import Feedback as FeedbackSection
from headrace.gateway.signals.follow_ups import FollowUps
from headrace.messages import subjects
from headrace.messages.operations import Event
from headrace.messages.product import Feedback
from tests.conftest import Connect
from tests.gateway.test_agents import Product
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def model(**answers: list[dict[str, str] | int]) -> AsyncIterator[tuple[str, list[Any]]]:
    """The address of a server, and the requests that it got. answers: by a word of the new prompt, in order; a number
    is a status."""
    asked = list[Any]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        new = asked[-1]["messages"][1]["content"].partition("<new>")[2]
        given = next(left for word, left in answers.items() if word in new).pop(0)
        if isinstance(given, int):
            return web.Response(status=given)
        message = {"role": "assistant", "content": json.dumps(given)}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


async def next_of(product: Product, stream: str, filter: str, kind: type[Any], start: int) -> Any:
    """The first message of a type from a sequence on."""
    async with asyncio.timeout(PATIENCE_S):
        async for received in product.admin.follow(stream, filter, start=start):
            if isinstance(received.message, kind):
                return received.message


async def test_a_model_judges_the_next_prompt_and_quotes_it(connect: Connect, tmp_path: Path) -> None:
    quoted = {"verdict": "dissatisfied", "quote": "I wanted c.py"}
    invented = {"verdict": "dissatisfied", "quote": "you are bad"}
    satisfied = {"verdict": "satisfied", "quote": ""}
    async with model(Thanks=[satisfied], wanted=[invented, quoted], still=[400]) as (url, asked):
        product = Product(connect, tmp_path, f"r{uuid4().hex[:8]}")
        product.config = msgspec.structs.replace(
            product.config,
            feedback=FeedbackSection(followup_judge=True),
            judge=msgspec.structs.replace(product.config.judge, model_url=url, model="m", model_s=PATIENCE_S),
        )
        await product.open()
        try:
            _, made = await product.call("POST", "/v1/agents", {"prompt": "write c", "workspace": {"files": {}}})
            agent, run, trajectories = made["agent"]["id"], made["run"]["id"], []
            prompts = ("Thanks. Now write d, that is wrong in e.", "Hm, I wanted c.py in a folder.", "it still fails")
            ratings, events = await product.admin.last_seq("HR_FEEDBACK"), await product.admin.last_seq("HR_EVENT")
            for prompt in prompts:
                request = await product.asked(run)
                trajectories.append(request.trajectory)
                await product.finish(request, {"c.py": b"1"})
                await product.ended(agent, run)
                run = (await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": prompt}))[1]["id"]
                if prompt is prompts[1]:
                    where = subjects.FEEDBACK.where()
                    rated = await next_of(product, "HR_FEEDBACK", where, Feedback, ratings + 1)
                    assert (rated.signal, rated.comment, rated.final) == ("followup", "I wanted c.py", False)
                    assert rated.trajectory == trajectories[1], (
                        "the first prompt is no complaint, whatever the rule says"
                    )
            by_rule = await next_of(product, "HR_FEEDBACK", subjects.FEEDBACK.where(), Feedback, ratings + 2)
            assert (by_rule.comment, by_rule.trajectory) == ("it still fails", trajectories[2])
            where = subjects.EVENT.where(run=product.run, actor="gateway", type="event")
            async with asyncio.timeout(PATIENCE_S):
                async for received in product.admin.follow("HR_EVENT", where, start=events + 1):
                    if isinstance(received.message, Event) and received.message.kind == "followup_judge_failed":
                        break
            assert len(asked) == 4 and "write c" in asked[0]["messages"][1]["content"]
        finally:
            await product.gateway.shut(1.0)


def test_a_judge_of_follow_ups_needs_a_model() -> None:
    config = Config(feedback=FeedbackSection(followup_judge=True))
    with pytest.raises(ConfigError, match="model_url"):
        FollowUps(config, lambda work, name: None, NotImplemented)
