"""A name from outside never imports code, opens a file or calls an address: every field of every message that names
something, and every HTTP route, with hostile names, through the real actors and a real broker.

The interpreter's own audit events are the witnesses (PEP 578): imports, opened and removed files, started programs,
resolved names and connections. No hostile name may be in one.
"""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from msgspec import msgpack
from yarl import URL

from headrace import config as c
from headrace.actors.registry import ACTORS, load_class
from headrace.bus.connection import Bus
from headrace.bus.runtime.actor import Actor
from headrace.dashboard.live.server import Address, LivePage
from headrace.gateway import requests as bodies
from headrace.gateway.agents import requests as agent_bodies
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalResult
from headrace.messages.judging import Certificate
from headrace.messages.operations import Ack
from headrace.messages.product import OpenSession, WorkspaceReport
from headrace.messages.rollout import RendererBundle
from headrace.messages.sandbox import Acquired, SandboxReply
from headrace.messages.tasks import TaskRef
from headrace.registry import PluginError
from headrace.rendering.base import RendererError
from headrace.rendering.registry import Renderers
from headrace.tasks import UnknownSuite, open_suite
from tests.conftest import Connect
from tests.support import mutations
from tests.support.actors import living
from tests.support.api_keys import made
from tests.support.judging import trajectory
from tests.support.outside_names import KINDS, readable, sample, table, targets, text_fields
from tests.support.witness import MODULE, NAMES, SOME, watched
from tests.support.world import CONFIG

pytestmark = pytest.mark.anyio
BODIES: dict[str, type[msgspec.Struct] | None] = {
    "POST /v1/sessions": bodies.NewSession,
    "GET /v1/sessions/{session}": None,
    "POST /v1/sessions/{session}/feedback": bodies.NewRating,
    "POST /v1/sessions/{session}/reward": bodies.NewRating,
    "DELETE /v1/sessions/{session}": None,
    "DELETE /v1/users/{user}": None,
    "GET /healthz": None,
    "POST /v1/agents": agent_bodies.NewAgent,
    "GET /v1/agents": None,
    "GET /v1/agents/{agent}": None,
    "POST /v1/agents/{agent}/runs": agent_bodies.NewRun,
    "GET /v1/agents/{agent}/runs/{run}": None,
    "GET /v1/agents/{agent}/runs/{run}/stream": None,
    "POST /v1/agents/{agent}/runs/{run}/cancel": None,
    "POST /v1/agents/{agent}/runs/{run}/feedback": bodies.NewRating,
    "POST /v1/agents/{agent}/runs/{run}/reward": bodies.NewRating,
    "POST /v1/agents/{agent}/runs/{run}/lines": agent_bodies.LaterFiles,
    "POST /v1/agents/{agent}/archive": None,
    "GET /v1/agents/{agent}/usage": None,
    "GET /v1/agents/{agent}/artifacts": None,
    "GET /v1/agents/{agent}/artifacts/{path}": None,
    "GET /v1/agent-sets/{set}": None,
    "GET /v1/agent-sets/{set}/comparison": None,
    "POST /v1/agent-sets/{set}/merge": agent_bodies.Merge,
    "GET /v1/models": None,
    "GET /v1/models/{name}": None,
}
"""Routes of the gateway to their JSON bodies. Those of `DIALECTS` name one thing, the model."""
DIALECTS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/responses/compact"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)


@pytest.fixture(autouse=True)
def importable(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MODULE}.py").write_text("def run(*arguments): ...\n")
    monkeypatch.syspath_prepend(str(folder))


def test_the_witness_sees_imports_files_and_programs(tmp_path: Path) -> None:
    def imports() -> None:
        __import__(MODULE)

    acts: list[Callable[[], object]] = [
        imports,
        lambda: (tmp_path / MODULE).write_bytes(b""),
        lambda: (tmp_path / MODULE).rename(tmp_path / "other"),
        lambda: subprocess.run(["true", MODULE], check=True),
        lambda: socket.gethostbyname(f"{MODULE}.invalid"),
    ]
    for act in acts:
        with pytest.raises(AssertionError), watched(), contextlib.suppress(OSError):
            act()
    del sys.modules[MODULE]


def test_every_text_field_has_a_kind() -> None:
    """A new field of a message or of a body belongs into `outside_names.TABLE`, with the kind of what it names."""
    structs = [*readable(), *(body for body in BODIES.values() if body is not None)]
    kinds = table()
    assert text_fields(iter(structs)) == set(kinds)
    assert {kind for kind in kinds.values() if kind} == set(KINDS)


HERE = sorted(set(ACTORS) - {"search", "trainer"})


@contextlib.asynccontextmanager
async def actors(connect: Connect, folder: Path, run: str, names: list[str]) -> AsyncIterator[dict[str, Actor]]:
    """Actors of a run, each with a connection of its own; one that fails fails the test."""
    machines = c.Environment(backend="process", warm=0)
    product = msgspec.structs.replace(CONFIG.production, webhook_hosts=("hooks.example",), git_hosts=("code.example",))
    config = msgspec.structs.replace(
        CONFIG,
        run=c.Run(dir=str(folder)),
        environment=machines,
        evaluation=c.Evaluation(before=False),
        rollout=msgspec.structs.replace(CONFIG.rollout, lanes=("train", "eval", "production")),
        production=product,
    )
    (folder / run).mkdir()
    async with contextlib.AsyncExitStack() as stack:
        living_ones = {}
        for name in names:
            cls = load_class(name)
            living_ones[name] = await stack.enter_async_context(living(cls, config, await connect(cls.role), run, name))
        yield living_ones
        assert [name for name, actor in living_ones.items() if actor.failed.done()] == []


def hostile(run: str, names: Sequence[str]) -> Iterator[tuple[type[Message], str, str, dict[str, Any]]]:
    """A type, a field that a host resolves, a hostile name, and a message's fields with the name in that field."""
    for cls in readable():
        for number, (target, name) in enumerate(itertools.product(targets(cls), names)):
            fields = sample(cls, run, target, name)
            # Equal requests are answered once.
            own = {"eval_request": {"id": f"e{number}"}, "certify_asked": {"task_hash": f"{number:064x}"}}
            yield cls, target, name, fields | own.get(cls.type_name, {})


async def quiet(bus: Bus) -> None:
    """Return when a connection has been silent for a moment: its readers are at the end of their streams."""
    heard, before = bus.connection.client.stats["in_msgs"], -1
    while heard != before:
        await asyncio.sleep(0.3)
        heard, before = bus.connection.client.stats["in_msgs"], heard


async def send(admin: Bus, place: str, cls: type[Message], fields: dict[str, Any]) -> None:
    """Store fields that no `Message` would take, signed as the role that writes there."""
    payload, kind = msgpack.encode(fields), {"Hr-Type": f"{cls.type_name}/{cls.type_version}"}
    await admin.connection.send(place, payload, admin._signed(place, cls.type_name, kind, payload))


@pytest.mark.parametrize("names", [SOME, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["some", "all"])
async def test_no_record_of_a_stream_imports_opens_or_calls(
    connect: Connect, tmp_path: Path, names: Sequence[str]
) -> None:
    run = f"r{token_hex(4)}"
    admin = await connect("admin")
    async with actors(connect, tmp_path, run, HERE) as running:
        sent = 0
        with watched():
            for cls, _, _, fields in hostile(run, names):
                for place in mutations.places(cls.type_name, run):
                    await send(admin, place, cls, fields)
                    sent += 1
            await admin.connection.flush()
            for actor in running.values():
                await quiet(actor.bus)
            results, certificates = await answers(admin, run, 2 * len(names))
    assert sent > 30 * len(names)
    assert [text for text in results if not text.startswith("refused: ")] == []
    assert all(made.verdict == "refused" and made.reasons for made in certificates)


async def answers(admin: Bus, run: str, count: int) -> tuple[list[str], list[Certificate]]:
    """The evaluator's reasons and the certifier's certificates for hostile suites and tasks, one for each."""
    results: list[str] = []
    certificates: list[Certificate] = []
    async with asyncio.timeout(60.0):
        while len(results) < count or len(certificates) < count:
            results, certificates = [], []
            async for received in admin.history("HR_EVENT", s.EVENT.where(run=run, actor="*")):
                by, made = received.subject.split(".")[3], received.message
                if isinstance(made, EvalResult) and by == "evaluator" and re.fullmatch("e[0-9]+", made.id):
                    results.append(made.reason)
                elif isinstance(made, Certificate) and by == "certifier" and len(made.task_hash) == 64:
                    certificates.append(made)
            await asyncio.sleep(0.2)
    return results, certificates


VALUES = {
    "open_session": ("HR_SESSION", "{run}.session.ab12.n{number}"),
    "client_session": ("HR_SESSION", "{run}.session.client.ab12.n{number}"),
    "agent": ("HR_SESSION", "{run}.session.agent.ab12.n{number}"),
    "agent_set": ("HR_SESSION", "{run}.session.set.ab12.n{number}"),
    "promotion": ("HR_PRODUCT", "feedback.{run}"),
    "gate_state": ("HR_PRODUCT", "feedback.{run}.gate"),
    "branch": ("HR_PRODUCT", "feedback.{run}.branch"),
    "renderer_record": ("HR_RENDERER", "trainer.{run}.renderer"),
}
"""Type to bucket and key, as actors read it."""


async def test_no_value_of_a_bucket_imports_opens_or_calls(connect: Connect, tmp_path: Path) -> None:
    run = f"r{token_hex(4)}"
    admin = await connect("admin")

    async def put(bucket: str) -> None:
        for number, (cls, _, _, fields) in enumerate(hostile(run, SOME)):
            where, key = VALUES.get(cls.type_name, ("", ""))
            if where == bucket:
                if cls is OpenSession:
                    fields["request"] |= {"group": f"ab12.n{number}", "lane": "production"}
                await send(admin, f"$KV.{bucket}.{key.format(run=run, number=number)}", cls, fields)
        await admin.connection.flush()

    with watched():
        await put("HR_SESSION")
        async with actors(connect, tmp_path, run, ["gateway", "feedback", "rollout", "weight_receiver"]) as running:
            for bucket in ("HR_PRODUCT", "HR_RENDERER"):
                await put(bucket)
            for actor in running.values():
                await quiet(actor.bus)


async def test_no_request_imports_opens_or_calls(connect: Connect, tmp_path: Path) -> None:
    """Requests of sandboxes, of workspaces and of clients' turns, which an actor answers."""
    run = f"r{token_hex(4)}"
    async with actors(connect, tmp_path, run, ["environment", "rollout", "feedback"]):
        rollout, gateway = await connect("rollout"), await connect("gateway")
        served = {
            "acquire": (rollout, s.RPC.at(service="environment", caller="rollout", method=f"acquire-{run}")),
            "workspace_command": (gateway, s.RPC.at(service="rollout", caller="gateway", method=f"command-{run}")),
        }
        refused = 0
        with watched():
            for cls, _, _, fields in hostile(run, SOME):
                if cls.type_name in served:
                    asker, subject = served[cls.type_name]
                    made = convert(fields | ({"role": "rollout"} if "role" in fields else {}), cls)
                    if made is None:
                        continue
                    answer = await asker.request(subject, made)
                    assert isinstance(answer, Ack | SandboxReply | Acquired | WorkspaceReport)
                    refused += not isinstance(answer, Acquired)
    assert refused > 0


def convert(fields: dict[str, Any], cls: type[Message]) -> Message | None:
    """The message, unless a field's own type refuses the name."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError:
        return None


async def test_no_route_imports_opens_or_calls(connect: Connect, tmp_path: Path) -> None:
    run = f"r{token_hex(4)}"
    key = await made(await connect("operator"), "acme", training=True)
    async with actors(connect, tmp_path, run, ["gateway"]) as running:
        routes = running["gateway"]._listener._routes  # type: ignore[attr-defined]
        served = {f"{route.method} {route.path}".replace("{path:.+}", "{path}") for route in routes}
        assert served == {*BODIES, *(f"POST {path}" for path in DIALECTS)}
        url = json.loads((tmp_path / run / "gateway.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {key}", "X-Headrace-Session": f"{MODULE}:run"}
        async with aiohttp.ClientSession(headers=headers) as http:
            with watched():
                for route, body in BODIES.items():
                    method, path = route.split(" ")
                    for name in SOME:
                        await refused(http, method, url + filled(path, quote(name, safe="")), None)
                        if body is None:
                            continue
                        for target in targets(body):
                            status = await refused(http, method, url + filled(path, "x"), asked_of(body, target, name))
                            # An image is looked up by the nodes, later.
                            assert 400 <= status < 500 or target == "WorkspaceSource.image", (route, target, name)
                for path in DIALECTS:
                    for name in SOME:
                        asked = {"model": name, "messages": [{"role": "user", "content": "x"}], "input": "x"}
                        status = await refused(http, "POST", url + path, asked | {"max_tokens": 1})
                        assert status >= 400, (path, name, status)  # 503: no rollout actor serves


async def test_no_route_of_the_live_page_imports_opens_or_calls(connect: Connect, tmp_path: Path) -> None:
    run, admin, address = f"r{token_hex(4)}", await connect("admin"), Address("127.0.0.1", 0)

    def originals(ref: TaskRef) -> Mapping[str, bytes]:
        return open_suite(ref.suite, tmp_path).task(ref.task).files

    made = [
        await admin.publish(s.TRAJ.at(run=run, group="g1"), trajectory(run, "g1", {}, task=TaskRef(name, name)))
        for name in SOME
    ]
    page = LivePage(
        c.Config(), run, await connect(), websocket="ws://nowhere", seed="S", started=1.0, originals=originals
    )
    await page.start(address)
    try:
        assert page._runner is not None
        paths = [route.resource.canonical for route in page._runner.app.router.routes() if route.resource is not None]
        asked = [filled(path, quote(name, safe="")) for path in paths for name in SOME]
        asked += [f"/api/trajectory/{seq}" for seq in made] + [f"/api/panel/gate?after={quote(name)}" for name in SOME]
        async with aiohttp.ClientSession() as http:
            with watched():
                for path in asked:
                    status = await refused(http, "GET", URL(f"{address.origins[0]}{path}", encoded=True), None)
                    assert status != 500, path
    finally:
        await page.close()


def asked_of(body: type[msgspec.Struct], target: str, name: str) -> dict[str, Any]:
    """A body with the name in the field `target`, and with no second source of files, which would be refused first."""
    made: dict[str, Any] = json.loads(msgspec.json.encode(sample(body, "", target, name)))
    source = {"GitSource": "git", "WorkspaceSource": "image"}.get(target.partition(".")[0], "")
    for part in ("workspace", "onto"):
        if part in made:
            made[part] = {key: value for key, value in made[part].items() if key == source}
    return made | ({"webhook": None} if target != "Webhook.url" and "webhook" in made else {})


def filled(path: str, value: str) -> str:
    for part in path.split("/"):
        if part.startswith("{"):
            path = path.replace(part, value)
    return path


async def refused(http: aiohttp.ClientSession, method: str, url: str | URL, body: Any) -> int:
    async with http.request(method, url, json=body, allow_redirects=False) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_or_a_renderer_of_that_name_is_unknown(name: str, tmp_path: Path) -> None:
    with watched():
        with pytest.raises(UnknownSuite):
            open_suite(name, tmp_path)
        bundle = msgspec.convert({"renderer": name, "tokenizer_json": "{}"}, RendererBundle)
        with pytest.raises((RendererError, PluginError)):
            Renderers(bundle)
