"""The agents API over real HTTP and a real broker; the test writes the records that a rollout actor would write."""

import asyncio
import base64
import hashlib
import hmac
import json
import random
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace.editor.api import AgentsApi
from headrace.editor.reporting import Noted, Repository
from headrace.gateway.signals.follow_ups import dissatisfied
from headrace.messages import subjects
from headrace.messages.base import Array
from headrace.messages.product import AttemptControl, Feedback
from headrace.messages.rollout import (
    RolloutRequest,
    SlotFailed,
    ToolCall,
    ToolResult,
    Turn,
    TurnDone,
    TurnSampled,
)
from tests.conftest import Connect
from tests.support.gateway import OpenGateway
from tests.support.uploads import bombs, bundle_of, tar_of

pytestmark = pytest.mark.anyio
WRITTEN = b"def b():\n    # nothing\n    return 1\n}\n"


class Product(OpenGateway):
    """A gateway, and a tenant with a key."""

    def __init__(self, connect: Connect, folder: Path, run: str) -> None:
        super().__init__(connect, folder, run, webhook_hosts=("127.0.0.1",))
        self.owner = {"tenant": "acme", "training": True}

    async def asked(self, run: str) -> RolloutRequest:
        """The newest request, which is one of this run."""
        request = await self.request()
        assert request.group.endswith(f".{run}")
        return request

    async def turn(self, request: RolloutRequest, index: int, output: str = "ok", sandbox: str = "s1") -> None:
        """One turn with one call and its result."""
        call = ToolCall(id=f"{index}.0", name="terminal", arguments={"command": f"echo {index}"})
        turn = Turn(
            index=index,
            segment=0,
            prompt_ids=Array.of([1, 2], "<i4"),
            ids=Array.of([3, 4, 5], "<i4"),
            logprobs=Array.of([-1.0] * 3, "<f4"),
            calls=(call,),
        )
        where = subjects.TURN.at(run=self.run, trajectory=request.trajectory)
        sampled = TurnSampled(run=self.run, trajectory=request.trajectory, turn=turn, node="n1", sandbox=sandbox)
        await self.rollout.publish(where, sampled)
        results = (ToolResult(call_id=call.id, ok=True, output=output),)
        await self.rollout.publish(
            where, TurnDone(run=self.run, trajectory=request.trajectory, index=index, results=results)
        )

    async def ended(self, agent: str, run: str) -> dict[str, Any]:
        """The run after its end, which is the end of its events."""
        where = f"/v1/agents/{agent}/runs/{run}"
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}{where}/stream", headers=self.headers) as events,
        ):
            assert (await events.read()).endswith(b"event: done\ndata: {}\n\n")
        status, view = await self.call("GET", where)
        assert status == 200 and view["status"] != "RUNNING", view
        return dict(view)


@pytest.fixture
async def product(connect: Connect, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Product]:
    opened = await Product(connect, tmp_path, subjects.token(request.node.name)[:40]).open()
    yield opened
    await opened.gateway.shut(1.0)


async def persistence(product: Product, agent: str, run: str, folder: Path) -> list[dict[str, Any]]:
    """The answers to reports about a run from a git repository that loses two of its three lines before a merge."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)

    folder.mkdir()
    git("init", "-q")
    repository = Repository(folder)
    noted = Noted(url=product.url, agent=agent, run=run, since=time.time() - 700)
    repository.note(noted)
    (folder / "b.py").write_text("def b():\n        return 1\n")
    async with AgentsApi(product.url, product.key) as api:
        first = await repository.report(api, product.url, merged=False)
        assert await repository.report(api, product.url, merged=False) == [], "each moment is reported once"
        (folder / "c.py").write_text("return 1\n")  # not a file that the run changed
        (folder / "b.py").write_text("x = 1\n    return 1\n")
        then = await repository.report(api, product.url, merged=True)
    assert repository.noted() == [], "a final outcome ends it"
    return first + then


async def test_runs_follow_each_other_in_one_workspace(product: Product, tmp_path: Path) -> None:
    status, made = await product.call(
        "POST", "/v1/agents", {"prompt": "write b", "workspace": {"files": {"a.py": "1"}}}, Idempotency_Key="k1"
    )
    agent, run = made["agent"]["id"], made["run"]["id"]
    assert status == 201 and made["run"]["status"] == "RUNNING"
    assert (await product.call("POST", "/v1/agents", {"prompt": "x"}, Idempotency_Key="k1"))[1]["agent"]["id"] == agent
    first = await product.asked(run)
    assert first.limits.max_turns == 50 and first.files == {"a.py": b"1"} and first.workspace is not None
    busy = await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": "more"})
    assert busy[0] == 409 and busy[1]["error"]["code"] == "agent_busy"
    await product.turn(first, 0)
    await product.finish(first, {"b.py": WRITTEN})
    assert (await product.ended(agent, run))["changed"] == ["b.py"]

    await product.gateway.shut(1.0)  # the next gateway knows the agent and its files
    await product.open()
    prompt = "That is wrong: drop a"
    status, second = await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": prompt}, Idempotency_Key="k2")
    followup_rating = await product.admin.last("HR_FEEDBACK", subjects.FEEDBACK.where())
    assert followup_rating is not None and isinstance(followup_rating.message, Feedback)
    assert (followup_rating.message.signal, followup_rating.message.thumb, followup_rating.message.comment) == (
        "followup",
        "down",
        "That is wrong",
    )
    assert followup_rating.message.trajectory == first.trajectory and followup_rating.message.training_allowed
    again = await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": prompt}, Idempotency_Key="k2")
    assert again[1]["id"] == second["id"]
    repeated = await product.admin.last("HR_FEEDBACK", subjects.FEEDBACK.where())
    assert repeated is not None and repeated.seq == followup_rating.seq, "a repeated request rates nothing again"
    asked = await product.asked(second["id"])
    assert asked.workspace is not None and first.workspace is not None
    assert (asked.workspace.name, asked.workspace.turn, asked.workspace.node) == (first.workspace.name, 1, "n1")
    assert asked.files == {"a.py": b"1", "b.py": WRITTEN} and "write b" in asked.prompt and "drop a" in asked.prompt
    await product.turn(asked, 0, sandbox="s2")
    await product.finish(asked, {}, ("a.py",))
    assert (await product.ended(agent, second["id"]))["restored"], "another sandbox than before is said"
    assert (await product.call("GET", f"/v1/agents/{agent}/artifacts"))[1] == {
        "artifacts": [{"path": "b.py", "sizeBytes": 38}],
        "deleted": ["a.py"],
    }
    assert (await product.call("GET", f"/v1/agents/{agent}/usage"))[1]["total"] == {
        "turns": 2, "inputTokens": 4, "outputTokens": 6,
    }  # fmt: skip
    status, _ = await product.call("POST", f"/v1/agents/{agent}/runs/{run}/feedback", {"thumb": "up"})
    rating = await product.admin.last("HR_FEEDBACK", subjects.FEEDBACK.where())
    assert status == 202 and rating is not None and isinstance(rating.message, Feedback)
    assert (rating.message.tenant, rating.message.trajectory) == ("acme", first.trajectory)
    where = f"/v1/agents/{agent}/runs/{run}/feedback"
    assert (await product.call("POST", where, {"diff": "rejected"}))[1]["thumb"] == "down"
    told = (await product.call("POST", where, {"undo": True}))[1]
    assert (told["id"], told["signal"], told["thumb"], told["outcome"]) == (run, "undo", "down", "waiting")
    for given in ({"diff": "accepted"}, {"undo": True}, {"diff": "accepted"}, {"diff": "accepted"}):
        assert (await product.call("POST", where, given))[0] == 202
    held = [each.message async for each in product.admin.history("HR_FEEDBACK", subjects.FEEDBACK.where())]
    last = [(each.signal, each.thumb) for each in held if isinstance(each, Feedback)][-4:]
    assert last == [("undo", "down"), ("diff", "up"), ("undo", "down"), ("diff", "up")], (
        "a changed mind is stored within the duplicate window too, and a repeated request is stored once"
    )
    reported = await persistence(product, agent, run, tmp_path / "repository")
    assert [(each["at"], each["kept"], each["thumb"]) for each in reported] == [("10m", 2, "up"), ("merge", 1, "down")]
    newest = await product.admin.last("HR_FEEDBACK", subjects.FEEDBACK.where())
    assert newest is not None and isinstance(newest.message, Feedback)
    assert (newest.message.signal, newest.message.at, newest.message.final) == ("persistence", "merge", True)
    for odd in ({"diff": "rejected", "thumb": "up"}, {"undo": False}, {}):
        assert (await product.call("POST", where, odd))[0] == 400
    assert (await product.call("POST", f"/v1/agents/{agent}/archive"))[1]["status"] == "ARCHIVED"
    assert (await product.call("POST", f"/v1/agents/{agent}/runs", {"prompt": "x"}))[1]["error"]["code"] == (
        "agent_archived"
    )


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("Hm, it still fails on Windows", "it still fails"),
        ("your fix doesn\u2019t work", "your fix doesn\u2019t work"),
        ("no, revert that please", "revert that"),
        ("This is not what I asked for", "This is not what I asked"),
        ("Thanks! Now the login page does not work on phones: fix it", ""),
        ("add an undo button and a test that fails without it", ""),
        ("Raise ValueError if it is broken", ""),
        ("Thanks, but it still doesn't compile", "it still doesn't compile"),
    ],
)
def test_a_follow_up_is_dissatisfied_only_about_the_earlier_work(prompt: str, words: str) -> None:
    assert dissatisfied(prompt) == words


async def test_another_tenant_sees_no_agent(product: Product) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    where = f"/v1/agents/{made['agent']['id']}"
    product.key = await product.other("other")
    assert [(await product.call("GET", f"{where}{tail}"))[0] for tail in ("", "/usage", "/artifacts")] == [404] * 3
    assert (await product.call("GET", "/v1/agents"))[1] == {"agents": []}
    product.key = "hr-none"
    assert (await product.call("GET", where))[1]["error"]["code"] == "unauthorized"


async def test_a_cancelled_run_ends_when_its_rollout_actor_says_so(product: Product) -> None:
    heard = asyncio.Event()
    groups: list[str | None] = []

    async def on_control(message: AttemptControl) -> None:
        groups.append(message.group)
        heard.set()

    control = subjects.RPC.at(service="rollout", caller="gateway", method=f"control-{subjects.token(product.run)}")
    await product.rollout.listen(control, on_control)  # type: ignore[arg-type]
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    request = await product.asked(run)
    assert (await product.call("POST", f"/v1/agents/{agent}/runs/{run}/cancel"))[0] == 202
    await product.until(heard)
    assert groups[0] == request.group
    failed = SlotFailed(
        run=product.run, lane="production", group=request.group, slot=0, attempt=0, reason="cancelled", detail="by user"
    )
    await product.rollout.publish(subjects.FAIL.at(run=product.run, group=request.group), failed)
    assert (await product.ended(agent, run))["status"] == "CANCELLED"
    again = await product.call("POST", f"/v1/agents/{agent}/runs/{run}/cancel")
    assert again[1]["error"]["code"] == "run_not_cancellable"


@pytest.mark.parametrize("most", [8, pytest.param(100, marks=pytest.mark.slow)])
async def test_cuts_of_a_stream_lose_nothing_and_repeat_nothing(product: Product, most: int) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    request, rng = await product.asked(run), random.Random(17)
    turns, cuts = 6 + most // 2, 0

    async def work() -> None:
        for index in range(turns):
            await product.turn(request, index, "out " * rng.randrange(200))
        await product.finish(request, {})

    working = asyncio.create_task(work())
    seen: list[tuple[str, str]] = []
    while not seen or seen[-1][0] != "done":
        # A cut after any byte; the last connections run to the end.
        left = rng.randrange(1, 4000) if cuts < most else 1 << 30
        seen += await cut_stream(product, agent, run, next((id for _, id in reversed(seen) if id), ""), left)
        if seen and seen[-1][0] == "done" and cuts < most:
            seen.pop()  # it was complete before it was cut often enough: the end is asked for again
        cuts += 1
    await working
    stored = [
        received.seq
        async for received in product.admin.history(
            "HR_TURN", subjects.TURN.at(run=product.run, trajectory=request.trajectory)
        )
    ]
    assert len(stored) == 2 * turns and cuts >= most
    assert [id for name, id in seen if name in ("turn", "results")] == [str(seq) for seq in stored]
    assert [id for name, id in seen if name == "result"] == [f"{stored[-1]}-end"]


async def cut_stream(product: Product, agent: str, run: str, last: str, left: int) -> list[tuple[str, str]]:
    """The whole events (name, id) among the first bytes of a connection."""
    headers = {"x-api-key": product.key, **({"Last-Event-ID": last} if last else {})}
    read = b""
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"{product.url}/v1/agents/{agent}/runs/{run}/stream") as answer:
            assert answer.status == 200, await answer.text()
            async for data in answer.content.iter_any():
                read += data
                if len(read) >= left:
                    break
    whole, _, _ = read[:left].rpartition(b"\n\n")
    events = []
    for text in filter(None, whole.decode().split("\n\n")):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if fields and fields["event"] != "status":
            json.loads(fields["data"])
            events.append((fields["event"], fields.get("id", "")))
    return events


async def test_a_stream_that_cannot_be_resumed_says_why(product: Product) -> None:
    _, made = await product.call("POST", "/v1/agents", {"prompt": "x"})
    agent, run = made["agent"]["id"], made["run"]["id"]
    request, where = await product.asked(run), f"/v1/agents/{agent}/runs/{run}/stream"
    await product.turn(request, 0)
    await product.finish(request, {})
    await product.ended(agent, run)
    for id in ("x", "999999999"):
        status, refused = await product.call("GET", where, Last_Event_ID=id)
        assert (status, refused["error"]["code"]) == (400, "invalid_last_event_id")
    await product.admin.purge("HR_TURN", subject=subjects.TURN.at(run=product.run, trajectory=request.trajectory))
    for headers in ({}, {"Last_Event_ID": "1"}):
        status, refused = await product.call("GET", where, **headers)
        assert (status, refused["error"]["code"]) == (410, "stream_expired")


async def test_the_end_of_a_run_is_posted_with_a_signature_and_again_after_an_error(product: Product) -> None:
    received: list[tuple[bytes, str]] = []
    done = asyncio.Event()

    async def hook(request: web.Request) -> web.Response:
        received.append((await request.read(), request.headers["X-Headrace-Signature"]))
        if len(received) == 2:
            done.set()
        return web.Response(status=500 if len(received) == 1 else 200)

    app = web.Application()
    app.add_routes([web.post("/hook", hook)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        secret = "0123456789abcdef"
        webhook = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/hook", "secret": secret}
        _, made = await product.call("POST", "/v1/agents", {"prompt": "x", "webhook": webhook})
        await product.finish(await product.asked(made["run"]["id"]), {})
        await product.until(done)
    finally:
        await runner.cleanup()
    body, signature = received[1]
    assert signature == "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    assert json.loads(body)["status"] == "FINISHED" and received[0] == received[1]
    inside = {"url": "http://localhost:1/", "secret": secret}
    status, refused = await product.call("POST", "/v1/agents", {"prompt": "x", "webhook": inside})
    assert (status, refused["error"]["code"]) == (400, "invalid_webhook")


async def test_an_address_or_a_number_that_cannot_be_read_is_refused(product: Product) -> None:
    for url in (
        "http://[",
        "http://127.0.0.1]/",
        "http://\uff0f127.0.0.1/",
        "http://x\\@127.0.0.1/",
        "http://\x01@127.0.0.1",
    ):
        hook = {"url": url, "secret": "s" * 16}
        status, refused = await product.call("POST", "/v1/agents", {"prompt": "x", "webhook": hook})
        assert (status, refused["error"]["code"]) == (400, "invalid_webhook"), (url, refused)
        git = {"git": {"url": url.replace("http:", "https:")}}
        status, refused = await product.call("POST", "/v1/agents", {"prompt": "x", "workspace": git})
        assert (status, refused["error"]["code"]) == (400, "invalid_workspace"), (url, refused)
    for limit in ("0001" + "9" * 5000, "00010", "0", "\u0663", "-1"):
        status, refused = await product.call("GET", f"/v1/agents?limit={limit}")
        assert (status, refused["error"]["code"]) == (400, "invalid_request"), refused


async def test_a_workspace_comes_from_a_tar_or_a_bundle_and_stays_inside_its_folder(
    product: Product, tmp_path: Path
) -> None:
    bundle = bundle_of(tmp_path)
    for workspace in ({"tar": tar_of(**{"a.py": b"1"})}, {"bundle": bundle}):
        _, made = await product.call("POST", "/v1/agents", {"prompt": "x", "workspace": workspace})
        assert (await product.asked(made["run"]["id"])).files == {"a.py": b"1"}
    for odd in (
        {"tar": tar_of(**{"..__a": b"1"})},
        {"tar": tar_of(link=None)},
        {"tar": "AAAA"},
        {"bundle": "AAAA"},
        {"git": {"url": "file:///etc"}},
        {"git": {"url": "https://127.0.0.1/x"}},
        {"files": {"/etc/x": ""}},
        {"files": {"a": "1"}, "tar": tar_of(a=b"1")},
        {"tar": base64.b64encode(base64.b64decode(tar_of(a=b"1"))[:-9]).decode()},
        {"tar": tar_of("x", a=b"1")},
        {"tar": tar_of(**{"\udcff": b"1"})},
        {"files": {"a": "", "a/b": ""}},
        {"files": {"a" * 256: ""}},
    ):
        status, refused = await product.call("POST", "/v1/agents", {"prompt": "x", "workspace": odd})
        assert (status, refused["error"]["code"]) == (400, "invalid_workspace"), (odd, refused)
    for bomb in bombs(tmp_path):
        status, refused = await product.call("POST", "/v1/agents", {"prompt": "x", "workspace": bomb})
        assert (status, refused["error"]["code"]) == (413, "workspace_too_large"), refused
