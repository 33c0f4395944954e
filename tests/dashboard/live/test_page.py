"""The live page in a real browser: history, live records, an attempt by its link, a broker that was killed, an origin.

Needs Debian's chromium and chromium-driver; skipped without them.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config
from headrace.dashboard.live.server import Address, LivePage
from headrace.launch.page import opened
from headrace.messages import sandbox
from headrace.messages import subjects as s
from headrace.messages.base import Array
from headrace.messages.evaluation import EvalResult
from headrace.messages.judging import CriterionScore, RubricScore, Score
from headrace.messages.ledger import ClosedSlot, GroupClosed, GroupDropped, SlotIssued
from headrace.messages.operations import Event, Heartbeat, Metric
from headrace.messages.product import CapacityLease, GateVerdict, lease_key
from headrace.messages.rollout import PolicyRef, Span, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.messages.training import Efficiency, StepDone, TokenGap, TokenGaps
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from tests.support.keys import Writers, as_writers
from tests.support.records import of

if TYPE_CHECKING:
    from selenium import webdriver

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"),
]
RUN, PATIENCE_S = "rpage", 60
RUBRIC = of(
    RubricScore,
    rubric="practices",
    model="judge-model",
    value=0.25,
    criteria=(
        CriterionScore(id="scope", weight=1.0, met=0.5, reason="It changes one line: 'return a + b'."),
        CriterionScore(id="leaves_debris", weight=0.5, pitfall=True, met=1.0, reason="It leaves <b>print(a)</b>."),
    ),
)
TASK = TaskRef("generated/train", "t1")


def originals(_: TaskRef) -> Mapping[str, bytes]:
    return {"a.py": b"def add(a, b):\n    return a - b\n"}


def step(number: int) -> StepDone:
    return of(
        StepDone,
        run=RUN,
        step=number,
        version=number + 1,
        groups=("g000001",),
        seconds=1.0,
        pass_rate=0.5,
        staleness={"0": 90, "1": 10},
    )


def attempt() -> Trajectory:
    turn = of(
        Turn,
        prompt_ids=Array.of([1, 2], "<i4"),
        ids=Array.of([3, 4], "<i4"),
        logprobs=Array.of([-0.5, -2.0], "<f4"),
        spans=(Span(0, 4, 0),),
        calls=(
            ToolCall(id="c1", name="read_file", arguments={"path": "a.py"}),
            ToolCall(id="c2", name="search", arguments={"text": "<script>"}),
        ),
        results=(ToolResult(call_id="c1", ok=True, output="def add"), ToolResult(call_id="c2", ok=True, output="none")),
    )
    return of(
        Trajectory,
        run=RUN,
        group="g000001",
        id="g000001-0-0",
        task=TASK,
        turns=(turn,),
        diff={"a.py": b"def add(a, b):\n    return a + b\n"},
        backend="qemu",
    )


def score(group: str, slot: int, seq: int, passed: bool) -> Score:
    """A score without parts of the attempt at `seq`."""
    return of(
        Score,
        run=RUN,
        group=group,
        slot=slot,
        trajectory_seq=seq,
        task=TASK,
        verdict="passed" if passed else "failed",
        reward=float(passed),
        passed=passed,
    )


def issued(group: str, index: int, slot: int) -> SlotIssued:
    return of(SlotIssued, run=RUN, group=group, index=index, slot=slot, task=TASK)


async def fill(bus: Bus) -> int:
    """A step, an attempt and its score; the attempt's sequence."""
    await bus.publish(s.STEP.at(run=RUN), step(0))
    seq = await bus.publish(s.TRAJ.at(run=RUN, group="g000001"), attempt())
    gap = TokenGap(trajectory="g000001-0-0", engine="", tokens=2, gaps=Array.of([0.0, -0.25], "<f4"))
    await bus.publish(s.EVENT.at(run=RUN, actor="trainer", type="token_gaps"), TokenGaps(run=RUN, step=0, of=(gap,)))
    scored = msgspec.structs.replace(
        score("g000001", 0, seq, True),
        reward=0.97,
        parts={"tests": 1.0, "length": -0.03},
        rubric=RUBRIC,
        tests=(sandbox.TestOutcome("test_a.py::test_add", "passed"),),
    )
    await bus.publish(s.SCORE.at(run=RUN, judge="judge", group="g000001"), scored)
    return seq


class Site:
    """A broker that admits the page's origin, and the page."""

    def __init__(self, server: Server, page: LivePage, address: Address, seq: int) -> None:
        self.server, self.page, self.address, self.seq = server, page, address, seq
        self.url = opened(address.url, page.access.key)


async def page_of(server: Server, bus: Bus, address: Address) -> LivePage:
    seed = (server.credentials / "web.nk").read_text().strip()
    page = LivePage(Config(), RUN, bus, websocket=server.websocket, seed=seed, started=1.0, originals=originals)
    await page.start(address)
    return page


@pytest.fixture(scope="module")
async def site(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    address = Address("127.0.0.1", 0)
    server = Server(tmp_path_factory.mktemp("broker"), origins=address.origins)
    await server.start()
    async with await as_writers(server.url, server.credentials) as admin:
        await declare(admin)
        seq = await fill(admin)
        async with await Bus.connect(server.url, role="dashboard", credentials=server.credentials) as bus:
            page = await page_of(server, bus, address)
            yield Site(server, page, address, seq)
            await page.close()
    await server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator["webdriver.Chrome"]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


async def shows(browser: "webdriver.Chrome", *texts: str) -> None:
    """Wait until the page shows every text."""
    from selenium.webdriver.support.ui import WebDriverWait

    def look(driver: "webdriver.Chrome") -> bool:
        seen = driver.find_element("tag name", "body").text
        return all(text in seen for text in texts)

    await asyncio.to_thread(WebDriverWait(browser, PATIENCE_S, 0.1).until, look, f"the page never shows {texts}")


async def until(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():
            await asyncio.sleep(0.05)


def writers(site: Site) -> Writers:
    return Writers(site.server.url, site.server.credentials)


async def test_history_and_live_records_are_on_the_page(site: Site, browser: "webdriver.Chrome") -> None:
    await asyncio.to_thread(browser.get, site.url)
    await shows(browser, RUN, "live", "50 %", "Staleness of tokens")
    await until(lambda: browser.execute_script("return headrace.state.users !== null"))
    async with writers(site) as bus:
        await bus.publish(s.STEP.at(run=RUN), step(1))
        measured = of(
            EvalResult,
            id="e1",
            run=RUN,
            suite="generated/" + "held" * 9,
            version=1,
            tasks=2,
            passed=1,
            rate=0.5,
            reason="heldout_after_greedy",
        )
        await bus.publish(s.EVENT.at(run=RUN, actor="evaluator", type="eval_result"), measured)
        event = Event(actor="judge", id="j", run=RUN, kind="greeting", text="a live <b>event</b>")
        await bus.publish(s.EVENT.at(run=RUN, actor="judge", type="event"), event)
    await shows(browser, "a live <b>event</b>", "2\nof 40", "heldout after greedy")
    wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not browser.execute_script(wide)
    assert browser.find_elements("css selector", "#curves canvas")
    cut = "return [...document.querySelectorAll('.tile *')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.execute_script(cut) == 0
    assert browser.execute_script("return headrace.state.counts.unreadable + headrace.state.counts.refused") == 0


VIEWS = (
    "overview",
    "steps",
    "actors",
    "groups",
    "trajectories",
    "behaviour",
    "ledger",
    "letters",
    "regions",
    "feedback",
    "t",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_has_a_serious_fault_of_access(site: Site, browser: "webdriver.Chrome", scheme: str) -> None:
    """Contrast, names of controls and pictures, keyboard: axe-core's rules."""
    from selenium_axe_python.axe import Axe

    browser.set_script_timeout(PATIENCE_S)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    await asyncio.to_thread(browser.get, site.url)
    await shows(browser, RUN, "live")
    axe = Axe(browser)
    await asyncio.to_thread(axe.inject)
    serious = []
    for view in VIEWS:
        browser.execute_script("location.hash = arguments[0]", f"#/t/{site.seq}" if view == "t" else f"#/{view}")
        await asyncio.to_thread(browser.execute_async_script, "requestAnimationFrame(() => setTimeout(arguments[0]))")
        faults = await asyncio.to_thread(axe.run)
        serious += [
            (view, fault["id"], fault["nodes"][0]["html"])
            for fault in faults["violations"]
            if fault["impact"] in ("serious", "critical")
        ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert serious == []


async def test_heartbeats_tell_the_use_of_every_node_and_what_an_actor_waits_for(
    site: Site, browser: "webdriver.Chrome"
) -> None:
    await asyncio.to_thread(browser.get, f"{site.address.url}#/actors")
    await shows(browser, "live")
    beats = (
        Heartbeat(actor="trainer", id="t", node="n1", pid=1, state="running", waits="batch 3: 1 of 2 groups are closed",
                  cpu=0.5, gpu=0.84),
        Heartbeat(actor="judge", id="j", node="n1", pid=2, state="running", cpu=0.5, gpu=0.84),
        Heartbeat(actor="environment", id="e", node="n2", pid=3, state="running", busy=0.9, cpu=1.0),
    )  # fmt: skip
    async with writers(site) as bus:
        for beat in beats:
            await bus.emit(s.HEARTBEAT.at(actor=beat.actor, id=beat.id), beat)
    await shows(browser, "CPU\n75 %\nof 2 nodes", "GPU\n84 %\nof 1 node")
    await shows(browser, "waits from judge: batch 3: 1 of 2 groups are closed")


async def test_an_attempt_opens_by_its_link(site: Site, browser: "webdriver.Chrome") -> None:
    await asyncio.to_thread(browser.get, f"{site.address.url}#/t/{site.seq}")
    await shows(
        browser,
        *("read_file", "<script>", "def add", "return a + b", "return a - b", "0.97", "test_a.py::test_add"),
        f"headrace replay {RUN} --trajectory g000001-0-0",
    )
    await shows(browser, "part: length -0.03", "practices 0.250, judged by judge-model")
    await shows(browser, "It changes one line: 'return a + b'.", "It leaves <b>print(a)</b>.", "pitfall")
    await shows(browser, "largest gap to the trainer 0.25000")
    (gap,) = browser.find_elements("css selector", ".tokens .gap")
    assert gap.get_attribute("title") == "log-probability -2.000, trainer minus sampler -2.50e-1"
    calls = browser.find_elements("css selector", ".calls > .call")
    assert len(calls) == 2 and calls[0].location["y"] == calls[1].location["y"]  # parallel calls are side by side


async def test_groups_and_the_ledger_add_up(site: Site, browser: "webdriver.Chrome") -> None:
    passed = {
        "views-fail": (False, False),
        "views-mixed": (False, True),
        "views-stale": (False, True),
        "views-open": (),
    }
    async with writers(site) as bus:
        for index, (group, slots) in enumerate(passed.items(), 1):
            for slot in range(2):
                await bus.publish(s.LEDGER.at(run=RUN, group=group), issued(group, index, slot))
            closed = []
            for slot, success in enumerate(slots):
                made = score(group, slot, 1000 + 2 * index + slot, success)
                seq = await bus.publish(s.SCORE.at(run=RUN, judge="judge", group=group), made)
                closed.append(
                    ClosedSlot(slot=slot, attempt=0, trajectory_seq=made.trajectory_seq, score_seq=seq,
                               reward=made.reward, oldest_version=0)
                )  # fmt: skip
            if group in ("views-fail", "views-mixed"):
                closing = of(GroupClosed, run=RUN, group=group, task=TASK, slots=tuple(closed))
                await bus.publish(s.CLOSE.at(run=RUN, group=group), closing)
        dropped = GroupDropped(run=RUN, group="views-stale", reason="stale", detail="too old", group_size=2)
        await bus.publish(s.CLOSE.at(run=RUN, group="views-stale"), dropped)
    await asyncio.to_thread(browser.get, f"{site.address.url}#/groups")
    await shows(browser, "all fail 25 %", "mixed 50 %", "all pass 25 %", "4 groups", "dropped stale")  # g000001 passed
    await asyncio.to_thread(browser.get, f"{site.address.url}#/ledger")
    await shows(browser, "9\nissued\n=\n1\ntrained\n+\n2\ndropped\n+\n6\nin flight", "Dropped, by reason\nstale")
    await shows(browser, "1 groups are open.")


async def test_four_views_show_what_the_page_s_process_reads(site: Site, browser: "webdriver.Chrome") -> None:
    staged = WeightsStaged(run=RUN, node="n1", region="eu", version=3, path="v3", state_hash="0" * 32, stage_s=0.25)
    swapped = WeightsSwapped(run=RUN, rollout="r1", node="n1", version=2, state_hash="0" * 32, pause_ms=1.5)
    verdict = GateVerdict(
        run=RUN,
        candidate=PolicyRef("pinned", 3),
        promoted=PolicyRef("pinned", 1),
        stage="shadow",
        reason="no <b>harm</b>",
    )
    lent = Event(actor="scavenger", id="s", run=RUN, kind="lent", text="r1: no load for 30 s")
    async with writers(site) as bus:
        for actor, kind, record in (
            ("weight_sync", "weights_staged", staged),
            ("rollout", "weights_swapped", swapped),
            ("feedback", "gate_verdict", verdict),
            ("scavenger", "event", lent),
        ):
            await bus.publish(s.EVENT.at(run=RUN, actor=actor, type=kind), record)
        lease = CapacityLease(rollout="r1", lanes=("train", "production"), reason="no load for 30 s", since=1.0)
        await (await bus.kv("HR_LEASE")).create(lease_key(RUN, "r1"), lease)
    for view, texts in {
        "regions": ("eu", "holds the file", "0.25 s", "r1 gone", "1.5 ms"),
        "feedback": ("Gate: idle", "version 3", "no <b>harm</b>", "No feedback actor"),
        "scavenger": ("production", "no load for 30 s", "r1: no load for 30 s", "No gateway has reported"),
        "behaviour": ("Attempts of the train lane: 1.", "Calls of a turn", "Reads before the first edit"),
    }.items():
        await asyncio.to_thread(browser.get, f"{site.address.url}#/{view}")
        await shows(browser, *texts)
    assert len(browser.find_elements("css selector", "#behaviour canvas")) == 4
    assert browser.execute_script("return headrace.state.fault ?? ''") == ""


async def test_the_page_comes_back_after_the_broker_was_killed(site: Site, browser: "webdriver.Chrome") -> None:
    await asyncio.to_thread(browser.get, site.url)
    await shows(browser, "live")
    await site.server.kill()
    await shows(browser, "not connected")
    await site.server.start()
    async with writers(site) as bus:
        await bus.publish(s.STEP.at(run=RUN), step(7))
    await shows(browser, "live", "8\nof 40")


async def test_a_page_of_another_origin_is_refused(site: Site, browser: "webdriver.Chrome") -> None:
    other = Address("127.0.0.1", 0)
    async with await Bus.connect(site.server.url, role="dashboard", credentials=site.server.credentials) as bus:
        page = await page_of(site.server, bus, other)
        await asyncio.to_thread(browser.get, opened(other.url, page.access.key))
        log = Path(site.server.folder) / "log"
        await until(lambda: "origin not allowed" in log.read_text())
        await shows(browser, "not connected")
        await asyncio.to_thread(browser.get, "about:blank")
        await page.close()


async def test_the_first_screen_says_whether_it_learns_and_what_it_waits_for(
    site: Site, browser: "webdriver.Chrome"
) -> None:
    await asyncio.to_thread(browser.get, site.url)
    await shows(browser, "Is it learning? Too early to say")
    spent = Efficiency(seconds={"busy": 1.0, "batch": 3.0, "publish": 0.1}, wall_s=4.1)
    async with writers(site) as bus:
        for number in range(12):
            rate = 0.25 if number < 6 else 0.75
            done = msgspec.structs.replace(step(number), pass_rate=rate, trained_slots=64, efficiency=spent)
            await bus.publish(s.STEP.at(run=RUN), done)
        for id, vms in (("killed", 9.0), ("environment-2", 4.0)):
            metric = Metric(actor="environment", id=id, run=RUN, time=1.0, values={"vms": vms, "sandboxes": vms})
            await bus.emit(s.METRIC.at(actor="environment"), metric)
    await shows(
        browser,
        "Is it learning? Yes: 25 % of attempts passed in the first 5 steps, 75 % in the last 5",
        "Why is it slow? The trainer waits for batches 73 % of its time: sampling, sandboxes or judges limit the speed",
        "sandboxes\n13\n13 machines",
    )
    browser.execute_script("headrace.state.metrics.get('environment:killed').time -= 4")
    await shows(browser, "sandboxes\n4\n4 machines")
    browser.set_window_size(390, 800)
    wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not browser.execute_script(wide)
    browser.set_window_size(1280, 900)


async def test_a_step_shows_who_waited_for_whom(site: Site, browser: "webdriver.Chrome") -> None:
    """Two attempts of a batch: the trainer waited for the second one's score."""
    waited = msgspec.structs.replace(
        step(40), groups=("g000099",), efficiency=Efficiency(seconds={"batch": 6.0, "busy": 2.0}, wall_s=8.0)
    )
    async with writers(site) as bus:
        for slot in (0, 1):
            await bus.publish(s.LEDGER.at(run=RUN, group="g000099"), issued("g000099", 2, slot))
        for slot in (0, 1):
            await bus.publish(
                s.SCORE.at(run=RUN, judge="judge", group="g000099"), score("g000099", slot, 900 + slot, slot == 0)
            )
        await bus.publish(s.STEP.at(run=RUN), waited)
    await asyncio.to_thread(browser.get, site.url)
    await shows(browser, "live")
    browser.execute_script("location.hash = '#/steps/40'")
    await shows(browser, "Step 40 took 8.0 s, and waited 6.0 s of it for its batch. The last attempt was g000099·1")
    bars = browser.find_elements("css selector", ".timeline a.line")
    assert [bar.get_attribute("class") for bar in bars] == ["line passed", "line failed"]
    assert [part.get_attribute("class") for part in browser.find_elements("css selector", ".trainer i")] == [
        "batch",
        "busy",
    ]
