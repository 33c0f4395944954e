"""Users over real HTTP, the gateway over a real broker: sessions, their ends, feedback, restarts, purges."""

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from headrace.actors import gateway
from headrace.actors.feedback.actor import Feedback
from headrace.bus.connection import Bus
from headrace.bus.nats import ordered_reader
from headrace.gateway.http import MAX_BODY
from headrace.launch.product import users
from headrace.launch.product.gateway_key import place
from headrace.messages import subjects
from headrace.messages.product import SCOPES, ClientSession
from headrace.messages.rollout import RolloutRequest, SlotFailed
from headrace.messages.weights import WeightsSwapped
from tests.support.gateway import OpenGateway
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
Connect = Callable[..., Awaitable[Bus]]


class Product(OpenGateway):
    """A gateway for users of headrace's own agent."""

    async def answer(self, request: RolloutRequest, diff: bytes = b"fixed\n") -> None:
        """Publish as a rollout actor would."""
        await self.finish(request, {"kit/core.py": diff})


@pytest.fixture
async def product(connect: Connect, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    opened = await Product(connect, tmp_path, subjects.token(request.node.name)[:40]).open()
    yield opened
    await opened.gateway.shut(1.0)


JSON = {"Content-Type": "application/json"}
ASK = {"user": "zoe", "suite": "generated/heldout", "task": "3"}


async def test_a_session_from_question_to_answer(product: Product) -> None:
    status, opened = await product.call("POST", "/v1/sessions", ASK | {"prompt": "mend it", "files": {"a.py": "x"}})
    assert status == 202
    request = await product.request()
    assert (request.lane, request.isolation, request.prompt, request.files) == (
        "production",
        "episode",
        "mend it",
        {"a.py": b"x"},
    )
    assert "zoe" not in request.group, (
        "a clear user name must not reach the bus"
    )  # no hex digits, as names of groups are
    waiting = asyncio.create_task(product.call("GET", f"/v1/sessions/{opened['session']}?wait=30"))
    await product.answer(request)
    status, view = await waiting
    assert (status, view["state"], view["result"]["files"]) == (200, "finished", {"kit/core.py": "fixed\n"})


async def test_there_is_no_product_before_a_policy_is_served(product: Product, tmp_path: Path) -> None:
    status, health = await product.call("GET", "/healthz")
    assert (status, health["version"]) == (503, -1)
    swapped = WeightsSwapped(run=product.run, rollout="product", node="n", version=0, state_hash="", pause_ms=0.0)
    where = subjects.EVENT.at(run=product.run, actor="rollout", type=swapped.type_name)
    await product.rollout.publish(where, swapped)
    place(tmp_path / product.run).write_text(product.key)
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        await users.Product(http, tmp_path / product.run, asyncio.Event()).opened()
    assert (await product.call("GET", "/healthz"))[1]["version"] == 0


async def test_bad_requests_are_told_what_to_send(product: Product) -> None:
    status, answer = await product.call("POST", "/v1/sessions", {"suite": "pytasks", "user": "zoe"})
    assert (status, "expected `user` and `task`" in answer["error"]) == (400, True)
    for mixed in (
        {"prompt": "x"},
        {"suite": "pytasks", "user": "z", "task": "t", "group": "g"},
        {"metadata": {"a": 1}},
    ):
        assert (await product.call("POST", "/v1/sessions", mixed))[0] == 400, mixed
    assert (await product.call("POST", "/v1/sessions", [1]))[0] == 400
    assert (await product.call("GET", "/v1/sessions/none"))[0] == 404
    _, opened = await product.call("POST", "/v1/sessions", ASK)
    path = f"/v1/sessions/{opened['session']}/feedback"
    assert (await product.call("POST", path, {"thumb": "sideways"}))[0] == 400
    assert (await product.call("POST", path, {"thumb": "up"}))[0] == 400, "no thumb before the end"


async def test_failures_of_our_own_parts_are_tried_again_then_said(product: Product) -> None:
    _, opened = await product.call("POST", "/v1/sessions", ASK)
    for attempt in range(product.config.curriculum.attempts):
        request = await product.request()
        assert request.attempt == attempt
        failed = SlotFailed(
            run=product.run, lane="production", group=request.group, slot=0, attempt=attempt, reason="sandbox_lost"
        )
        waiting = asyncio.create_task(product.call("GET", f"/v1/sessions/{opened['session']}?wait=30"))
        await product.rollout.publish(subjects.FAIL.at(run=product.run, group=request.group), failed)
        while attempt + 1 < product.config.curriculum.attempts and (await product.request()).attempt == attempt:
            await asyncio.sleep(0.01)
        if attempt + 1 == product.config.curriculum.attempts:
            _, view = await waiting
            assert (view["state"], view["result"]["reason"]) == ("failed", "sandbox_lost")
            assert view["result"]["text"] == "the machine with the session's sandbox was lost"
            assert [failure["attempt"] for failure in view["failures"]] == [0, 1, 2]
        else:
            waiting.cancel()


async def test_a_restarted_gateway_knows_its_sessions(product: Product, tmp_path: Path) -> None:
    """Also for a user's program that asked the one before, which listened elsewhere."""
    _, open_one = await product.call("POST", "/v1/sessions", ASK)
    request = await product.request()
    _, done_one = await product.call("POST", "/v1/sessions", ASK | {"user": "bob"})
    await product.answer(await product.request())
    before = product.url
    place(tmp_path / product.run).write_text(product.key)
    async with aiohttp.ClientSession() as http:
        user = users.Product(http, tmp_path / product.run, asyncio.Event())
        asked = asyncio.create_task(user.call("GET", f"/v1/sessions/{open_one['session']}?wait=30"))
        await product.gateway.shut(1.0)
        await product.open()
        assert product.url != before
        await product.answer(request)
        async with asyncio.timeout(PATIENCE_S):
            while (await asked).get("state") != "finished":
                asked = asyncio.create_task(user.call("GET", f"/v1/sessions/{open_one['session']}?wait=30"))
    _, view = await product.call("GET", f"/v1/sessions/{done_one['session']}?wait=10")
    assert view["state"] == "finished"


async def test_a_thumb_becomes_a_rating_in_the_ledger_and_a_purge_removes_the_user(
    product: Product, connect: Connect
) -> None:
    feedback = Feedback(product.config, await connect("feedback"), product.run, "feedback-1")
    await feedback.start()
    try:
        _, opened = await product.call("POST", "/v1/sessions", ASK)
        request = await product.request()
        await product.answer(request, os.urandom(2 << 20))
        admin, blob = await connect("admin"), f"hr.blob.{request.group.partition('.')[0]}.>"
        # MessageGone unless the large payload lies under its user's name; a chunk is no message, so it is read raw.
        await ordered_reader.from_leader(admin.connection, "HR_BLOB", {"last_by_subj": blob})
        await product.call("GET", f"/v1/sessions/{opened['session']}?wait=30")
        status, _ = await product.call("POST", f"/v1/sessions/{opened['session']}/feedback", {"thumb": "up"})
        assert status == 202
        async with asyncio.timeout(PATIENCE_S):
            while not feedback.book.ratings:
                await asyncio.sleep(0.01)
        (rating,) = feedback.book.ratings.values()
        assert rating.feedback is not None and rating.feedback.thumb == "up"
        assert [r async for r in product.admin.history("HR_SCORE", subjects.SCORE.where(run=product.run))] == []

        status, _ = await product.call("DELETE", "/v1/users/zoe")
        assert status == 200
        where = subjects.TRAJ.where(run=product.run)
        assert [r async for r in product.admin.history("HR_TRAJ", where)] == []
        user = request.group.partition(".")[0]
        assert [r async for r in admin.history("HR_FEEDBACK", f"hr.feedback.*.{user}")] == []
        assert feedback.book.ends({}) == {"purged": 1}
        assert await admin.purge("HR_BLOB", subject=blob) == 0, "nothing was left there"
        assert (await product.call("GET", f"/v1/sessions/{opened['session']}"))[0] == 404
    finally:
        await feedback.shut(1.0)


async def test_a_session_and_a_purge_need_a_key_with_the_tenant_and_the_scope(
    product: Product, connect: Connect
) -> None:
    ours = await product.other("default", scopes=SCOPES)
    theirs = await product.other("other", scopes=("agents", "purge"))
    feedback = Feedback(product.config, await connect("feedback"), product.run, "feedback-1")
    await feedback.start()
    try:
        _, opened = await product.call("POST", "/v1/sessions", ASK)
        session = f"/v1/sessions/{opened['session']}"
        usual = {"x_api_key": await product.other("default")}
        for method, path, body in (
            ("POST", "/v1/sessions", ASK),
            ("GET", session, None),
            ("DELETE", "/v1/users/a", None),
        ):
            assert (await product.call(method, path, body, x_api_key=""))[0] == 401
            assert (await product.call(method, path, body, x_api_key="hr-none"))[0] == 401, "a wrong key is no key"
        assert (await product.call("GET", session, None, x_api_key=theirs))[0] == 403
        assert (await product.call("GET", session, None, **usual))[0] == 200
        assert (await product.call("DELETE", "/v1/users/zoe", None, **usual))[0] == 403
        status, _ = await product.call("DELETE", "/v1/users/zoe", None, x_api_key=theirs)
        assert (status, (await product.call("GET", session))[0]) == (200, 200), "the other tenant's user of this name"
        assert (await product.call("DELETE", "/v1/users/zoe", None, x_api_key=ours))[0] == 200
        assert (await product.call("GET", session))[0] == 404
    finally:
        await feedback.shut(1.0)


async def test_an_unknown_suite_or_task_is_refused_at_once(product: Product) -> None:
    for change in ({"suite": "no such"}, {"suite": "generated/none"}, {"task": "no such"}, {"suite": "../../etc"}):
        status, answer = await product.call("POST", "/v1/sessions", ASK | change)
        assert status == 404 and answer["error"], change
    assert product.gateway.sessions.runs == {}


MALFORMED = [
    b"",
    b"[1]",
    b"null",
    b'{"user": 5, "suite": "s", "task": "t"}',
    b'{"user": "", "suite": "generated/heldout", "task": "3"}',
    b'{"user": "\\ud800", "suite": "generated/heldout", "task": "3"}',
    b'{"user": "zoe", "suite": "\\udfff", "task": "3"}',
    b'{"user": "zoe", "suite": "generated/heldout", "task": "3", "prompt": ["x"]}',
    b'{"user": "zoe", "suite": "generated/heldout", "task": "3", "files": {"/etc/passwd": "x"}}',
    b'{"user": "zoe", "suite": "generated/heldout", "task": "3", "files": {"a/../../b": "x"}}',
    b'{"user": "zoe", "suite": "generated/heldout", "task": "3", "files": {"a": 5}}',
    b'{"user": "' + b"u" * 300 + b'", "suite": "generated/heldout", "task": "3"}',
    b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"\xff\xfe",
    b'{"user": NaN, "suite": 1e999, "task": null}',
]


async def test_malformed_input_is_a_bad_request_and_never_an_internal_error(product: Product) -> None:
    async with aiohttp.ClientSession(headers=product.headers) as http:
        for body in MALFORMED:
            async with http.post(product.url + "/v1/sessions", data=body, headers=JSON) as answer:
                assert (answer.status, bool((await answer.json())["error"])) == (400, True), body[:80]
        _, opened = await product.call("POST", "/v1/sessions", ASK)
        where = f"{product.url}/v1/sessions/{opened['session']}"
        for wait in ("abc", "-1", "nan", "inf", "1e400", "%ED%A0%80"):
            async with http.get(URL(f"{where}?wait={wait}", encoded=True)) as answer:
                assert (answer.status, "wait" in (await answer.json())["error"]) == (400, True), wait
        for thumb in (["up"], {"up": 1}, None, 1, "UP"):
            async with http.post(f"{where}/feedback", json={"thumb": thumb}) as answer:
                assert answer.status == 400, thumb
        async with http.delete(URL(f"{product.url}/v1/users/%ED%A0%80", encoded=True)) as answer:
            assert answer.status in (400, 503), "this test runs no feedback actor"
        async with http.post(
            product.url + "/v1/sessions", data=io.BytesIO(b"x" * (MAX_BODY + 1)), headers=JSON
        ) as answer:
            assert (answer.status, "larger than" in (await answer.json())["error"]) == (413, True)
    assert await kinds(product.admin, product.run) == {"listening"}, "no handler failed"


async def kinds(bus: Bus, run: str) -> set[str]:
    """The kinds of the gateway's events."""
    where = subjects.EVENT.where(run=subjects.token(run), actor="gateway", type="event")
    return {received.message.kind async for received in bus.history("HR_EVENT", where)}


async def test_a_dead_letter_of_a_request_ends_its_session(product: Product, connect: Connect) -> None:
    _, opened = await product.call("POST", "/v1/sessions", ASK)
    request = await product.request()
    waiting = asyncio.create_task(product.call("GET", f"/v1/sessions/{opened['session']}?wait=30"))
    await product.dead_letter(request)
    _, view = await waiting
    assert (view["state"], view["result"]["reason"], view["result"]["detail"]) == (
        "failed",
        "dead_letter",
        "unknown task",
    )
    _, health = await product.call("GET", "/healthz")
    assert health["waiting"] == 0, "the scavenger may lend again"
    sessions = await (await connect("gateway")).kv("HR_SESSION")
    assert await sessions.keys(f"{product.run}.session.>") == []


async def test_a_restarted_gateway_issues_no_attempt_twice(product: Product) -> None:
    """The gateway dies after an attempt failed and its successor was issued: HR_SESSION names the first attempt."""
    _, opened = await product.call("POST", "/v1/sessions", ASK)
    first = await product.request()
    await product.fail(first)
    while (await product.request()).attempt == 0:
        await asyncio.sleep(0.01)
    for _ in range(2):
        await product.gateway.shut(1.0)
        await product.open()
        _, view = await product.call("GET", f"/v1/sessions/{opened['session']}")
        assert (view["state"], view["attempt"]) == ("queued", 1)
    second = await product.request()
    await product.gateway.shut(1.0)
    await product.fail(second)  # while no gateway runs
    await product.open()
    third = await product.request()
    assert third.attempt == 2
    await product.answer(third)
    _, view = await product.call("GET", f"/v1/sessions/{opened['session']}?wait=30")
    assert view["state"] == "finished"
    where = subjects.LEDGER.at(run=product.run, group=first.group)
    issued = [received.message.attempt async for received in product.admin.history("HR_LEDGER", where)]
    assert issued == [0, 1, 2]


async def test_a_session_that_takes_too_long_ends(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    _, opened = await product.call("POST", "/v1/sessions", ASK)
    monkeypatch.setattr(gateway, "SESSION_S", -1.0)
    await product.gateway._end_overdue()
    _, view = await product.call("GET", f"/v1/sessions/{opened['session']}")
    assert (view["state"], view["result"]["reason"]) == ("failed", "timed_out")


async def test_a_stored_client_session_under_another_key_is_not_taken_up(connect: Connect, tmp_path: Path) -> None:
    """The gateway would delete it under its own key, for ever, or under one that the broker refuses."""
    run = "stored-sessions"
    values = await (await connect("gateway")).kv("HR_SESSION")
    for key, group in (("ab12.a", "ab12.a"), ("ab12.b", "ab12.c"), ("ab12.d", "ab12"), ("ab12.e", "g000001.")):
        stored = ClientSession(group=group, tenant="default", training_allowed=False)
        await values.put(f"{run}.session.client.{key}", stored)
    opened = await OpenGateway(connect, tmp_path, run).open()
    try:
        assert [session.group for session in opened.gateway.clients._sessions.idle(-1.0)] == ["ab12.a"]
    finally:
        await opened.gateway.shut(1.0)
