"""The page's process: it gives users' records only with a token, and nothing under another host name."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

import aiohttp
import msgspec
import pytest

from headrace.bus.broker import permissions
from headrace.bus.broker.keys import Key
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats.streams import declare
from headrace.config import Config
from headrace.dashboard.live.access import Access
from headrace.dashboard.live.attempt import by_turn
from headrace.dashboard.live.server import STATIC, STATIC_FILES, Address, LivePage
from headrace.messages import subjects as s
from headrace.messages.base import Array
from headrace.messages.judging import CriterionScore, RubricScore, Score
from headrace.messages.operations import DeadLetter, Heartbeat
from headrace.messages.product import promotion_key
from headrace.messages.rollout import Span, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import StepDone, TokenGap
from tests.conftest import Connect
from tests.support.paths import ROOT
from tests.support.records import of

WEB = ROOT / "headrace" / "dashboard" / "live" / "web"


def test_the_bundle_is_built_from_these_sources() -> None:
    sources = sorted(f"src/{path.relative_to(WEB / 'src')}" for path in (WEB / "src").rglob("*.*"))
    digest = hashlib.sha256()
    for name in ["build.mjs", "package.json", *sources]:
        digest.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    assert digest.hexdigest() == (STATIC / "sources.sha256").read_text().strip(), "run `make web`"


def test_the_bundle_is_small_and_has_its_licences() -> None:
    assert (STATIC / "app.js").stat().st_size < 300_000
    licences = (STATIC / "LICENSES.txt").read_text()
    assert all(name in licences for name in ("@nats-io/nats-core", "@nats-io/nkeys", "tweetnacl", "uplot"))


def test_a_token_ends() -> None:
    now = [1000.0]
    access = Access(lambda: now[0])
    token = access.token(60)
    assert access.scope(f"Bearer {token}") == "users" and access.scope(f"Bearer {access.key}") == "run"
    for wrong in (Access().token(60), Access().key, f"9999999999.{token.partition('.')[2]}", "", "\udc80", "1.\udc80"):
        assert access.scope(f"Bearer {wrong}") == "", wrong
    assert access.scope("") == "" and access.scope(access.key) == ""
    now[0] = 1061.0
    assert access.scope(f"Bearer {token}") == ""


def test_a_taken_port_is_one_sentence() -> None:
    first = Address("127.0.0.1", 0)
    with pytest.raises(BusError, match=r"choose another \[dashboard\] port"):
        Address("127.0.0.1", first.port)
    first.socket.close()


def test_the_page_s_role_publishes_nothing_and_reads_no_record_of_users() -> None:
    web = permissions.of("web")
    assert web.publish == ()
    user = "hr.score.r1.judge.0123abcd.s1"
    assert not [filter for filter in web.subscribe if s.covers(filter, user)]
    assert web.connections == ("WEBSOCKET",)


@pytest.mark.anyio
async def test_the_page_s_key_is_no_good_outside_a_web_socket(connect: Connect) -> None:
    with pytest.raises(BusError):
        await connect("web")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


STREAMS = ("HR_STEP", "HR_EVENT", "HR_SCORE", "HR_TRAJ", "HR_LEDGER", "KV_HR_PRODUCT", "KV_HR_PRESENCE")


def step(run: str) -> StepDone:
    return of(StepDone, run=run, version=1, groups=("g1",), seconds=1.0, pass_rate=0.5, staleness={"0": 90})


@pytest.fixture
async def page(connect: Connect) -> AsyncIterator[tuple[LivePage, Address, Bus]]:
    address, bus = Address("127.0.0.1", 0), await connect()
    page = LivePage(
        Config(), f"r{token_hex(4)}", bus, websocket="ws://nowhere", seed="S", started=1.0, originals=lambda _: {}
    )
    await page.start(address)
    yield page, address, bus
    await page.close()


@pytest.mark.anyio
async def test_users_records_need_a_token(page: tuple[LivePage, Address, Bus]) -> None:
    live, address, bus = page
    made = of(
        Trajectory,
        run=live.run,
        lane="production",
        group="0123abcd.s1",
        id="0123abcd.s1-0-0",
        task=TaskRef("user", "x"),
        diff={"secret.py": b"1"},
    )
    seq = await bus.publish(s.TRAJ.at(run=live.run, group=made.group), made)
    subject = f"hr.task.{live.run}.production.user"
    for what in (subject, f"hr.task.{live.run}.train.generated"):
        letter = of(DeadLetter, stream_seq=seq, subject=what)
        await bus.publish(s.DLQ.at(stream="hr_task", consumer="c"), letter)
    token, key = bearer(live.access.token(60)), bearer(live.access.key)
    async with aiohttp.ClientSession(address.url, headers=key) as http:
        refused = await http.get(f"/api/trajectory/{seq}")
        assert refused.status == 403 and "token" in await refused.text()
        allowed = await http.get(f"/api/trajectory/{seq}", headers=token)
        assert (await allowed.json())["diff"][0]["path"] == "secret.py"
        letters = {}
        for name, headers in (("without", key), ("with", token)):
            answer = await (await http.get("/api/history", headers=headers)).json()
            letters[name] = [r["subject"] for r in answer["records"] if r["type"] == "dead_letter"]
            assert "prompt" not in str(answer)
        assert subject not in letters["without"] and subject in letters["with"]
        missing = await http.get("/api/trajectory/999999")
        assert missing.status == 404 and "keep_steps" in await missing.text()


@pytest.mark.anyio
async def test_an_attempt_has_the_parts_of_its_reward_and_the_judge_s_reasons(
    page: tuple[LivePage, Address, Bus],
) -> None:
    live, address, bus = page
    task = TaskRef("generated/train", "x")
    made = of(Trajectory, run=live.run, group="g1", id="g1-0-0", task=task)
    seq = await bus.publish(s.TRAJ.at(run=live.run, group="g1"), made)
    criterion = CriterionScore(id="scope", weight=1.0, met=0.5, reason="It says 'return a + b'.")
    rubric = of(RubricScore, rubric="practices", value=0.5, criteria=(criterion,))
    score = of(
        Score,
        run=live.run,
        group="g1",
        trajectory_seq=seq,
        task=task,
        reward=0.97,
        passed=True,
        parts={"tests": 1.0, "length": -0.03},
        rubric=rubric,
    )
    await bus.publish(s.SCORE.at(run=live.run, judge="judge", group="g1"), score)
    async with aiohttp.ClientSession(address.url, headers=bearer(live.access.key)) as http:
        shown = await (await http.get(f"/api/trajectory/{seq}")).json()
    assert shown["parts"][:2] == [["part: tests", "+1"], ["part: length", "-0.03"]]
    assert shown["score"]["rubric"]["criteria"][0]["reason"] == "It says 'return a + b'."


def gaps_by_turn(values: list[float] | None, segments: tuple[int, ...] = (0, 0, 1)) -> list[list[float] | None]:
    turns = tuple(
        Turn(index=index, segment=segment, prompt_ids=Array.of([1], "<i4"), ids=Array.of([2, 3], "<i4"),
             logprobs=Array.of([-0.5, -0.5], "<f4"), spans=())
        for index, segment in enumerate(segments)
    )  # fmt: skip
    made = of(Trajectory, run="r", group="g1", id="g1-0-0", task=TaskRef("s", "x"), turns=turns)
    array = Array.of(values, "<f4") if values else None
    return by_turn(made, None if values is None else TokenGap(trajectory="g1-0-0", engine="", tokens=6, gaps=array))


def test_gaps_belong_to_the_turns_of_their_segments() -> None:
    assert gaps_by_turn(None) == [None, None, None], "not scored again"
    assert gaps_by_turn([]) == [[], [], []], "all are 0"
    values = [0.5, 0.25, 1.0, 2.0, 3.0, 4.0]
    assert gaps_by_turn(values) == [[0.5, 0.25], [1.0, 2.0], [3.0, 4.0]]
    assert gaps_by_turn(values, (1, 0, 1)) == [[1.0, 2.0], [0.5, 0.25], [3.0, 4.0]]
    assert gaps_by_turn(values[:3]) == [[0.5, 0.25], [1.0], None], "the record ends before the last turn"


def call(name: str, number: int) -> ToolCall:
    return ToolCall(id=f"c{number}", name=name, arguments={})


@pytest.mark.anyio
async def test_behaviour_is_of_the_train_lane_and_goes_on_after_a_sequence(
    page: tuple[LivePage, Address, Bus],
) -> None:
    live, address, bus = page
    names = ("read_file", "search", "lint", "edit", "read_file", "run_tests", "lint")
    turn = of(
        Turn,
        prompt_ids=Array.of([1], "<i4"),
        ids=Array.of([2], "<i4"),
        logprobs=Array.of([-0.5], "<f4"),
        spans=(Span(0, 2, 0),),
        calls=tuple(call(name, number) for number, name in enumerate(names)),
        results=(
            ToolResult(call_id="c2", ok=True, output="a.py:1: undefined name x"),
            ToolResult(call_id="c6", ok=True, output="no problems"),
        ),
    )
    made = of(Trajectory, run=live.run, group="g1", id="g1-0-0", task=TaskRef("generated/train", "x"), turns=(turn,))
    first = await bus.publish(s.TRAJ.at(run=live.run, group="g1"), made)
    user = msgspec.structs.replace(made, lane="production", group="0123abcd.s1", id="0123abcd.s1-0-0")
    await bus.publish(s.TRAJ.at(run=live.run, group=user.group), user)
    async with aiohttp.ClientSession(address.url, headers=bearer(live.access.key)) as http:
        panel = await (await http.get("/api/panel/behaviour")).json()
        assert panel["attempts"] == [
            {"group": "g1", "turns": 1, "calls": 7, "reads": 2, "tests": 1, "lint": True},
        ]
        assert panel["last"] > first
        later = await (await http.get(f"/api/panel/behaviour?after={panel['last']}")).json()
        assert later["attempts"] == []
        assert (await http.get("/api/panel/behaviour?after=-1")).status == 400
        assert (await http.get("/api/panel/users")).status == 404
        regions = await (await http.get("/api/panel/regions")).json()
        assert regions == {"newest": -1, "nodes": [], "replicas": []}


FOREIGN = (
    {"Host": "evil.example:{port}"},
    {"Host": "127.0.0.1"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
)
"""Requests of pages of other sites and ports, as a browser sends them."""


@pytest.mark.anyio
async def test_only_the_files_of_the_page_need_no_key_and_no_other_page_gets_them(
    page: tuple[LivePage, Address, Bus],
) -> None:
    live, address, _ = page
    assert live._runner is not None and live._runner.app is not None
    found = {route.resource.canonical for route in live._runner.app.router.routes() if route.resource is not None}
    paths = {path.format(seq="1", name="leases") if path != STATIC_FILES else "/" for path in found} | {"/api/", "/x/y"}
    assert {"/", "/config.json", "/api/steps", "/api/history", "/api/trajectory/1", "/api/panel/leases"} < paths
    async with aiohttp.ClientSession(address.url) as http:
        for path in paths:
            for headers in ({}, bearer("wrong"), {"Cookie": f"key={live.access.key}"}, {"X-Api-Key": live.access.key}):
                for url in (path, f"{path}?key={live.access.key}&token={live.access.key}"):
                    async with http.get(url, headers=headers) as answer:
                        assert answer.status == (200 if path == "/" else 401), (path, headers)
            for foreign in FOREIGN:
                named = {name: value.format(port=address.port) for name, value in foreign.items()}
                async with http.get(path, headers=bearer(live.access.key) | named) as answer:
                    assert answer.status == 403, (path, foreign)
                    assert not [name for name in answer.headers if name.startswith("Access-Control")]
                    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert (await http.get("/", headers=opened)).status == 200, "a link to the page"
        script = await http.get("/app.js")
        assert "default-src 'none'" in script.headers["Content-Security-Policy"]
        assert (await http.get("/server.py")).status == 404
        assert (await http.post("/", data=b"x")).status in (401, 405) and (await http.options("/")).status in (401, 405)


@pytest.mark.anyio
async def test_steps_and_heartbeats_go_on_after_a_sequence(page: tuple[LivePage, Address, Bus]) -> None:
    live, address, bus = page
    seq = await bus.publish(s.STEP.at(run=live.run), step(live.run))
    beat = Heartbeat(actor="judge", id="j", node="n", pid=1, state="running")
    await (await bus.kv("HR_PRESENCE")).put("judge.j", beat)
    async with aiohttp.ClientSession(address.url, headers=bearer(live.access.key)) as http:
        told = await (await http.get("/api/steps")).json()
        assert [record["type"] for record in told["records"]] == ["step_done", "beat"] and told["last"] == seq
        assert told["records"][0]["staleness"] == {"0": 90} and told["records"][1]["time"] > 0
        again = await (await http.get(f"/api/steps?after={seq}")).json()
        assert [record["type"] for record in again["records"]] == ["beat"] and again["last"] == seq
        assert (await http.get("/api/steps?after=x")).status == 400


@pytest.mark.anyio
async def test_the_page_s_seed_writes_nothing_by_any_reply(tmp_path: Path) -> None:
    """Before, a direct get whose reply named a bucket's key stored the answer there: a step as the promoted version."""
    origin, run = "http://127.0.0.1:1", "r1"
    targets = (f"$KV.HR_PRODUCT.{promotion_key(run)}", f"hr.step.{run}", f"hr.event.{run}.trainer.event", "x")
    subjects = (
        *("$JS.API.DIRECT.GET.HR_STEP", "$JS.API.DIRECT.GET.KV_HR_PRESENCE", "$JS.API.INFO", "hr.x"),
        *(f"hr.step.{run}", f"$KV.HR_PRODUCT.{promotion_key(run)}", "$JS.API.STREAM.INFO.HR_STEP", "hr.rpc.web.x"),
    )
    async with Server(tmp_path / "broker", need_free=0, origins=(origin,)) as server, AsyncExitStack() as stack:
        admin = await stack.enter_async_context(
            await Bus.connect(server.url, role="admin", credentials=server.credentials)
        )
        await declare(admin)
        await admin.publish(s.STEP.at(run=run), step(run))
        before = [await admin.last_seq(stream) for stream in STREAMS]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        socket = await stack.enter_async_context(http.ws_connect(server.websocket, origin=origin))
        info = json.loads((await socket.receive()).data[5:])
        key = Key.parse((server.credentials / "web.nk").read_text())
        connect = {"nkey": key.public, "sig": key.sign(info["nonce"]).decode(), "verbose": False, "headers": True}
        await socket.send_bytes(f"CONNECT {json.dumps(connect)}\r\nPING\r\n".encode())
        assert (await socket.receive()).data == b"PONG\r\n"
        for target in targets:
            for subject in subjects:
                await socket.send_bytes(f'PUB {subject} {target} 9\r\n{{"seq":1}}\r\n'.encode())
                answer = (await socket.receive()).data
                assert answer.startswith(b"-ERR 'Permissions Violation for Publish"), (subject, target, answer)
        assert [await admin.last_seq(stream) for stream in STREAMS] == before
