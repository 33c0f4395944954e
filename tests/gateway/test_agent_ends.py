"""Every request of the agents API has an end that its user sees: real HTTP and broker, a rollout actor's records."""

import asyncio

import aiohttp
import msgspec
import pytest

from headrace.actors import gateway
from headrace.messages.product import DeniedUser, denied_key
from tests.gateway.test_agents import Product, cut_stream, product
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
__all__ = ["product"]


async def test_a_run_whose_attempts_all_fail_ends_with_the_reason_and_the_agent_goes_on(product: Product) -> None:
    """Its user hears the end by every way: the run, the stream, the list. Another request is welcome then."""
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    streaming = asyncio.create_task(cut_stream(product, agent, run, "", 1 << 30))
    for attempt in range(product.config.curriculum.attempts):
        while (request := await product.asked(run)).attempt < attempt:
            await asyncio.sleep(0.01)
        await product.fail(request, "no_environment")
    ended = await product.ended(agent, run)
    assert (ended["status"], ended["detail"]) == ("ERROR", "no_environment")
    assert [name for name, _ in await streaming] == ["result", "done"]
    assert (await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": "y"}))[0] == 201


async def test_a_request_that_nobody_can_handle_and_one_that_takes_too_long_end_their_runs(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    await product.dead_letter(await product.asked(run))
    assert (await product.ended(agent, run))["detail"] == "dead_letter: unknown task"
    _, second = await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": "y"})
    monkeypatch.setattr(gateway, "SESSION_S", -1.0)
    await product.gateway._end_overdue()
    ended = await product.ended(agent, second["id"])
    assert ended["status"] == "ERROR" and ended["detail"].startswith("timed_out: no result within")
    assert await product.gateway._kept.keys(f"{product.run}.session.*.*") == [], "no open session is left"


async def test_a_run_that_failed_while_no_gateway_ran_has_its_end_at_the_next_one(product: Product) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    request = await product.asked(run)
    await product.gateway.shut(1.0)
    await product.fail(request, "cancelled")
    await product.open()
    assert (await product.ended(agent, run))["status"] == "CANCELLED"


async def test_however_often_a_run_is_cancelled_one_task_repeats_it_and_ends_with_the_run(product: Product) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    request = await product.asked(run)
    for _ in range(5):
        assert (await product.call("POST", f"/v1/agents/{agent}/runs/{run}/cancel"))[0] == 202
    repeating = [task for task in product.gateway._tasks if f"cancel {run}" in task.get_name()]
    assert len(repeating) == 1
    await product.fail(request, "cancelled")
    await product.ended(agent, run)
    assert (await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": "y"}))[0] == 201
    await asyncio.wait(repeating)  # the next run is no reason to go on


async def test_a_purge_ends_the_stream_of_a_run_with_a_last_event(product: Product) -> None:
    """Before, a second HTTP answer was written into the open stream."""
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x", "user": "u"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    await product.turn(await product.asked(run), 0)
    headers = {"x-api-key": product.key}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"{product.url}/v1/agents/{agent}/runs/{run}/stream") as answer:
            while b"event: results" not in (read := await answer.content.readuntil(b"\n\n")):
                assert b"event: done" not in read
            user = product.gateway.agents._agents._agents[agent].user
            await product.gateway.agents.forget(user)
            product.gateway.sessions.runs[f"{user}.{run}"].on_failure("purged")
            rest = await answer.content.read()
    assert b"HTTP/1.1" not in rest and rest.endswith(b"event: done\ndata: {}\n\n"), rest
    assert b'"detail":"purged"' in rest


async def test_a_readmitted_user_is_off_the_deny_list_of_the_gateway(product: Product) -> None:
    values, denied = await product.admin.kv("HR_PRODUCT"), product.gateway.ratings.denied
    entry = DeniedUser(run=product.run, user="ab12", since=1.0)
    async with asyncio.timeout(PATIENCE_S):
        await values.put(denied_key(product.run, "ab12"), entry)
        while "ab12" not in denied:
            await asyncio.sleep(0.01)
        await values.put(denied_key(product.run, "ab12"), msgspec.structs.replace(entry, readmitted=2.0))
        while "ab12" in denied:
            await asyncio.sleep(0.01)
