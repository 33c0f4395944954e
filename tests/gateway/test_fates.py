"""The answer to a rating says what becomes of it where that is certain; the state of its session says it later."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.feedback import actor as feedback_actor
from headrace.actors.feedback.actor import Feedback
from headrace.config import Feedback as Section
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.gateway import OpenGateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def product(connect: Connect, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[OpenGateway]:
    opened = OpenGateway(connect, tmp_path, f"fates{abs(hash(request.node.name)) % 10**6}")
    opened.config = msgspec.structs.replace(opened.config, feedback=Section(user_cap=1))
    await opened.open()
    yield opened
    await opened.gateway.shut(1.0)


async def finished(product: OpenGateway, user: str) -> str:
    """The path of a finished session."""
    body = {"user": user, "suite": "generated/heldout", "task": "3"}
    id = (await product.call("POST", "/v1/sessions", body))[1]["session"]
    await product.finish(await product.request(), {"kit/core.py": b"fixed\n"})
    while (await product.call("GET", f"/v1/sessions/{id}?wait=30"))[1]["state"] != "finished":
        pass
    return f"/v1/sessions/{id}/feedback"


async def rated(product: OpenGateway, path: str, **body: Any) -> tuple[str, str]:
    status, told = await product.call("POST", path, {"thumb": "up"} | body)
    assert status == 202, told
    return told["outcome"], told["reason"]


async def test_a_capped_and_a_late_rating_come_back_with_the_reason(
    product: OpenGateway, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were `waiting` for their sender for ever."""
    first = await finished(product, "ada")
    assert (await rated(product, first))[0] == "waiting", "no feedback actor runs"
    async with living(Feedback, product.config, await connect("feedback"), product.run):
        assert await rated(product, first) == ("waiting", "it waits for a batch")
        second = await finished(product, "ada")
        outcome, capped = await rated(product, second)
        assert outcome == "capped" and "1 ratings of this user" in capped
        other = await finished(product, "bob")
        monkeypatch.setattr(feedback_actor, "LATE_S", -1.0)
        outcome, reason = await rated(product, other)
        assert outcome == "late" and "after its session" in reason
        assert await rated(product, second) == ("capped", capped), "a repeat is told the same"


async def test_a_rating_without_an_opt_in_says_so_without_a_feedback_actor(
    product: OpenGateway, connect: Connect
) -> None:
    production = msgspec.structs.replace(product.gateway.config.production, training_allowed=False)
    product.gateway.config = msgspec.structs.replace(product.gateway.config, production=production)
    assert (await rated(product, await finished(product, "ada")))[0] == "opted_out"
