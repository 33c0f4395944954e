"""The page's process: it gives users' records only with a token, and nothing under another host name."""

import hashlib
from collections.abc import AsyncIterator
from secrets import token_hex

import aiohttp
import msgspec
import pytest

from headrace.bus.broker import permissions
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.dashboard.live.access import Access
from headrace.dashboard.live.attempt import by_turn
from headrace.dashboard.live.server import STATIC, Address, LivePage
from headrace.messages import subjects as s
from headrace.messages.base import Array
from headrace.messages.judging import CriterionScore, RubricScore, Score
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import PolicyRef, Sampling, Span, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import TokenGap
from tests.conftest import Connect
from tests.support.paths import ROOT

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
    assert access.allows(f"Bearer {token}")
    assert not access.allows(f"Bearer {Access().token(60)}")
    assert not access.allows(f"Bearer 9999999999.{token.partition('.')[2]}")
    assert not access.allows("Bearer ") and not access.allows("")
    now[0] = 1061.0
    assert not access.allows(f"Bearer {token}")


def test_a_taken_port_is_one_sentence() -> None:
    first = Address("127.0.0.1", 0)
    with pytest.raises(BusError, match=r"choose another \[dashboard\] port"):
        Address("127.0.0.1", first.port)
    first.socket.close()


def test_the_page_s_role_writes_nothing_and_reads_no_stream_of_users() -> None:
    web = permissions.of("web")
    assert all(subject.startswith("$JS.API.DIRECT.GET.") for subject in web.publish)
    assert not [
        name for name in web.publish if name.rpartition(".")[2] in ("HR_TRAJ", "HR_TURN", "HR_SCORE", "HR_TASK")
    ]
    user = "hr.score.r1.judge.0123abcd.s1"
    assert not [filter for filter in web.subscribe if s.covers(filter, user) and filter != "_INBOX.web.>"]
    assert web.connections == ("WEBSOCKET",)


@pytest.mark.anyio
async def test_the_page_s_key_is_no_good_outside_a_web_socket(connect: Connect) -> None:
    with pytest.raises(BusError):
        await connect("web")


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
    made = Trajectory(
        run=live.run,
        lane="production",
        group="0123abcd.s1",
        slot=0,
        attempt=0,
        id="0123abcd.s1-0-0",
        task=TaskRef("user", "x"),
        family="user",
        seed=1,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=(),
        diff={"secret.py": b"1"},
    )
    seq = await bus.publish(s.TRAJ.at(run=live.run, group=made.group), made)
    subject = f"hr.task.{live.run}.production.user"
    for what in (subject, f"hr.task.{live.run}.train.generated"):
        letter = DeadLetter(
            stream="HR_TASK",
            consumer="c",
            stream_seq=seq,
            subject=what,
            type="rollout_request",
            reason="broken",
            deliveries=5,
            headers={},
            payload=b"a user's prompt",
        )
        await bus.publish(s.DLQ.at(stream="hr_task", consumer="c"), letter)
    token = {"Authorization": f"Bearer {live.access.token(60)}"}
    async with aiohttp.ClientSession(address.url) as http:
        refused = await http.get(f"/api/trajectory/{seq}")
        assert refused.status == 403 and "token" in await refused.text()
        allowed = await http.get(f"/api/trajectory/{seq}", headers=token)
        assert (await allowed.json())["diff"][0]["path"] == "secret.py"
        letters = {}
        for name, headers in (("without", {}), ("with", token)):
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
    made = Trajectory(
        run=live.run, lane="train", group="g1", slot=0, attempt=0, id="g1-0-0", task=task, family="f", seed=1,
        policy=PolicyRef(), sampling=Sampling(), outcome="finished", turns=(), diff={},
    )  # fmt: skip
    seq = await bus.publish(s.TRAJ.at(run=live.run, group="g1"), made)
    criterion = CriterionScore(id="scope", weight=1.0, met=0.5, reason="It says 'return a + b'.")
    rubric = RubricScore(
        rubric="practices", digest="d", model="m", value=0.5, criteria=(criterion,), calls=1, cached=0,
        prompt_tokens=0, completion_tokens=0, cost=0.0,
    )  # fmt: skip
    score = Score(
        run=live.run, lane="train", group="g1", slot=0, attempt=0, trajectory_seq=seq, task=task, family="f",
        judge_version="1", verdict="passed", reward=0.97, passed=True, parts={"tests": 1.0, "length": -0.03},
        rubric=rubric,
    )  # fmt: skip
    await bus.publish(s.SCORE.at(run=live.run, judge="judge", group="g1"), score)
    async with aiohttp.ClientSession(address.url) as http:
        shown = await (await http.get(f"/api/trajectory/{seq}")).json()
    assert shown["parts"][:2] == [["part: tests", "+1"], ["part: length", "-0.03"]]
    assert shown["score"]["rubric"]["criteria"][0]["reason"] == "It says 'return a + b'."


def gaps_by_turn(values: list[float] | None, segments: tuple[int, ...] = (0, 0, 1)) -> list[list[float] | None]:
    turns = tuple(
        Turn(index=index, segment=segment, prompt_ids=Array.of([1], "<i4"), ids=Array.of([2, 3], "<i4"),
             logprobs=Array.of([-0.5, -0.5], "<f4"), spans=())
        for index, segment in enumerate(segments)
    )  # fmt: skip
    made = Trajectory(
        run="r", lane="train", group="g1", slot=0, attempt=0, id="g1-0-0", task=TaskRef("s", "x"), family="f", seed=1,
        policy=PolicyRef(), sampling=Sampling(), outcome="finished", turns=turns, diff={},
    )  # fmt: skip
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
    turn = Turn(
        index=0,
        segment=0,
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
    made = Trajectory(
        run=live.run,
        lane="train",
        group="g1",
        slot=0,
        attempt=0,
        id="g1-0-0",
        task=TaskRef("generated/train", "x"),
        family="f",
        seed=1,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=(turn,),
        diff={},
    )
    first = await bus.publish(s.TRAJ.at(run=live.run, group="g1"), made)
    user = msgspec.structs.replace(made, lane="production", group="0123abcd.s1", id="0123abcd.s1-0-0")
    await bus.publish(s.TRAJ.at(run=live.run, group=user.group), user)
    async with aiohttp.ClientSession(address.url) as http:
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


@pytest.mark.anyio
async def test_another_host_name_is_refused(page: tuple[LivePage, Address, Bus]) -> None:
    _, address, _ = page
    async with aiohttp.ClientSession(address.url) as http:
        assert (await http.get("/")).status == 200
        assert (await http.get("/app.js")).headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert (await http.get("/config.json", headers={"Host": f"evil.example:{address.port}"})).status == 403
        assert (await http.get("/server.py")).status == 404
