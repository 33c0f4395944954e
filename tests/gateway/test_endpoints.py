"""The endpoints over a real port: bodies that mean nothing, keys and their rates."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.requests import NewRating
from headrace.gateway.tenants.limits import WAITING
from tests.support.clients import MOST, PLACES, Served, endpoints, two_reads

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with endpoints(tmp_path, two_reads) as started:
        yield started


BODIES = (
    b"",
    b"null",
    b"[]",
    b"{",
    b'"text"',
    b"{}",
    b'{"messages": 1, "input": 1}',
    b'{"messages": [1], "input": [1]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "input": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}], "input": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "input": [{"type": "image"}]}',
    b"[" * 200_000,
    b"\xff\xfe",
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_bad_bodies_are_one_error(served: Served, path: str) -> None:
    headers = {"Authorization": f"Bearer {served.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for body in BODIES:
            async with session.post(served.url + path, data=body) as answer:
                told = await answer.json()
                assert answer.status == 400 and told["error"]["message"], body[:80]
    assert not served.sampler.asked


async def test_a_key_has_a_rate(tmp_path: Path) -> None:
    async with endpoints(tmp_path, two_reads) as served:
        slow = served.keys.add("slow", requests_per_minute=6)
        async with aiohttp.ClientSession(headers={"x-api-key": slow}) as session:
            async with session.get(f"{served.url}/v1/models") as answer:
                assert answer.status == 200
            async with session.get(f"{served.url}/v1/models") as answer:
                assert answer.status == 429 and 1 <= int(answer.headers["Retry-After"]) <= 10


async def test_models_are_listed_and_each_is_retrieved(served: Served) -> None:
    async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as session:
        async with session.get(f"{served.url}/v1/models") as answer:
            listed = (await answer.json())["data"]
        assert "latest" in [model["id"] for model in listed]
        for model in listed:
            async with session.get(f"{served.url}/v1/models/{model['id']}") as answer:
                assert answer.status == 200 and await answer.json() == model
        async with session.get(f"{served.url}/v1/models/other") as answer:
            assert answer.status == 404


async def test_a_session_is_rated_under_the_id_that_its_turns_name(served: Served) -> None:
    body = {"model": "latest", "messages": [{"role": "user", "content": "x"}]}
    async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as session:
        async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
            named = answer.headers["X-Headrace-Session"]
        async with session.post(f"{served.url}/v1/sessions/{named}/feedback", json={"thumb": "up"}) as answer:
            assert answer.status == 200
        async with session.post(f"{served.url}/v1/sessions/{named}/feedback", json={"thumb": []}) as answer:
            assert answer.status == 400
        async with session.delete(f"{served.url}/v1/sessions/{named}") as answer:
            assert answer.status == 404
        async with session.post(f"{served.url}/v1/sessions/{named}/reward", json={"reward": 0.25}) as answer:
            assert answer.status == 200 and (await answer.json())["thumb"] == "down"
        async with session.post(f"{served.url}/v1/sessions/{named}/reward", json={"reward": 1.5}) as answer:
            assert answer.status == 400
    assert served.sampler.rated == [(named, NewRating(thumb="up")), (named, NewRating(reward=0.25))]


def _function(name: str) -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}}


HISTORIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [_function("c1"), _function("c2")]},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
        ]
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "read", "input": {}},
                {"type": "tool_use", "id": "c2", "name": "read", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": "two"},
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
            ]},
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", HISTORIES)
async def test_results_of_parallel_calls_come_in_the_order_of_the_calls(served: Served, path: str) -> None:
    """Whichever tool ended first: a history has one form, by which its session is found."""
    async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as session:
        async with session.post(served.url + path, json=HISTORIES[path]) as answer:
            assert answer.status == 200
    request, _ = served.sampler.asked[-1]
    assert [(said.role, said.text) for said in request.messages[-2:]] == [("tool", "one"), ("tool", "two")]


async def test_a_key_opens_the_routes_of_its_scopes_alone(tmp_path: Path) -> None:
    async with endpoints(tmp_path, two_reads) as served:
        key = served.keys.add("narrow", scopes=("feedback",))
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            for path, kind in (("/v1/messages", "permission_error"), ("/v1/chat/completions", "invalid_request_error")):
                async with session.post(served.url + path, json=body) as answer:
                    told = await answer.json()
                    assert (answer.status, told["error"]["type"]) == (403, kind)
                    assert "lacks the scope 'turns'; it has feedback" in told["error"]["message"]
            async with session.post(f"{served.url}/v1/sessions/s1/reward", json={"reward": 1}) as answer:
                assert answer.status == 200
    assert not served.sampler.asked


async def test_slow_turns_of_one_tenant_leave_places_to_others(tmp_path: Path) -> None:
    """1,024 of them took every connection: another tenant's GET /v1/models was a 503."""
    body = {"model": "latest", "messages": [{"role": "user", "content": "x"}]}
    async with endpoints(tmp_path, two_reads) as served:
        never, usual, their_places = asyncio.Event(), served.sampler._sample, PLACES * 3 // 4

        async def slow(request: ModelRequest) -> ModelReply:
            if served.sampler.asked[-1][1].key.tenant == "slow":
                await never.wait()
            return await usual(request)

        served.sampler._sample = slow  # type: ignore[method-assign]
        statuses: asyncio.Queue[int] = asyncio.Queue()
        many = served.keys.add("slow", requests_per_minute=1_000_000)

        async def ask(session: aiohttp.ClientSession) -> None:
            async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
                assert answer.status != 429 or int(answer.headers["Retry-After"]) >= 1
                statuses.put_nowait(answer.status)

        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers={"x-api-key": many}, connector=unlimited) as session:
            turns = [asyncio.create_task(ask(session)) for _ in range(1024)]
            assert {await statuses.get() for _ in range(1024 - their_places - WAITING)} == {429}
            assert len(served.sampler.asked) == their_places
            async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as other:
                for _ in range(3):
                    async with other.post(f"{served.url}/v1/chat/completions", json=body) as answer:
                        assert answer.status == 200
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            # Clients that went away leave their places.
            served.sampler._sample = usual  # type: ignore[method-assign]
            while True:
                async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
                    if answer.status == 200:
                        break


async def test_nothing_of_a_repeat_is_read_while_its_turn_is_under_way(tmp_path: Path) -> None:
    """Each of many repeats was parsed and looked up at once, before the requests of others."""
    body = {"model": "latest", "messages": [{"role": "user", "content": "x"}]}
    async with endpoints(tmp_path, two_reads) as served:
        over, begun, usual = asyncio.Event(), asyncio.Event(), served.sampler._sample

        async def held(request: ModelRequest) -> ModelReply:
            begun.set()
            await over.wait()
            return await usual(request)

        served.sampler._sample = held  # type: ignore[method-assign]
        asked, headers = served.sampler.asked, {"x-api-key": served.key, "Idempotency-Key": "k"}

        async def ask(session: aiohttp.ClientSession, **more: str) -> int:
            async with session.post(f"{served.url}/v1/chat/completions", json=body, headers=more) as answer:
                return answer.status

        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=unlimited) as session:
            first = asyncio.create_task(ask(session))
            await begun.wait()
            repeats = [asyncio.create_task(ask(session)) for _ in range(64)]
            async with session.get(f"{served.url}/v1/models") as answer:  # behind the repeats, by rounds
                assert answer.status == 200
            assert [caller.retry for _, caller in asked] == ["k"]
            other = asyncio.create_task(ask(session, **{"Idempotency-Key": "other"}))
            while len(asked) < 2:
                await asyncio.sleep(0.001)
            assert [caller.retry for _, caller in asked] == ["k", "other"]
            for repeat in repeats[:60]:
                repeat.cancel()
            over.set()
            assert {await first, await other, *await asyncio.gather(*repeats[60:])} == {200}
            assert [caller.retry for _, caller in asked] == ["k", "other", *["k"] * 4]


async def test_a_key_has_tokens_a_minute(tmp_path: Path) -> None:
    """They count when a turn ends; a turn that its client leaves counts with all that it might sample."""
    body = {"model": "latest", "messages": [{"role": "user", "content": "one two three"}]}
    async with endpoints(tmp_path, two_reads) as served:
        path = f"{served.url}/v1/chat/completions"

        async def ask(key: str, **changes: Any) -> tuple[int, int]:
            async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
                async with session.post(path, json=body | changes) as answer:
                    await answer.read()
                    return answer.status, int(answer.headers.get("Retry-After", 0))

        small, large = served.keys.add("small", tokens_per_minute=6), served.keys.add("large", tokens_per_minute=10**6)
        assert await ask(small) == (200, 0), "six tokens of prompt and turn"
        status, again_s = await ask(small)
        assert status == 429 and 1 <= again_s <= 60
        assert (await ask(small, stream=True))[0] == 429
        assert await ask(large) == (200, 0) and await ask(served.key) == (200, 0)

        begun, usual = asyncio.Event(), served.sampler._sample

        async def never(request: ModelRequest) -> ModelReply:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        served.sampler._sample = never  # type: ignore[method-assign]
        left = served.keys.add("left", tokens_per_minute=MOST)
        turn = asyncio.create_task(ask(left))
        await begun.wait()
        served.sampler._sample = usual  # type: ignore[method-assign]
        turn.cancel()
        while (await ask(left))[0] != 429:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("named", ["user", "safety_identifier"])
async def test_the_whole_name_of_the_person_is_the_user(served: Served, path: str, named: str) -> None:
    """A purge names the person by the whole name; OpenAI's clients now send it under another key."""
    name = "person" * 100
    body = {"model": "latest", "input": "x", "messages": [{"role": "user", "content": "x"}], named: name}
    del body["messages" if path == "/v1/responses" else "input"]
    async with aiohttp.ClientSession(headers={"x-api-key": served.key}) as session:
        async with session.post(served.url + path, json=body) as answer:
            assert answer.status == 200 and named not in answer.headers.get("X-Headrace-Left-Out", "")
    assert served.sampler.asked[-1][1].user == name
