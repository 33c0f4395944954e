"""A run from outside: what listens, what another user of the machine gets, what a page of another site gets."""

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from headrace.bus.broker.keys import Key
from headrace.bus.broker.permissions import ROLES
from headrace.bus.broker.server import running
from headrace.bus.connection import Bus
from headrace.launch.page import read_place
from headrace.launch.product import gateway_key
from headrace.messages import subjects as s
from tests.launch.test_up import Up, phase, up
from tests.support.listening import listening
from tests.support.paths import ROOT
from tests.test_docs import script

listeners = script("listeners")

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NOT_ALLOWED = {401, 403}


class Address(NamedTuple):
    host: str
    port: int


class Opened(NamedTuple):
    """A run whose every part listens."""

    started: Up
    addresses: dict[str, set[Address]]
    """By the name in the table of listeners."""


def address(url: str) -> Address:
    parts = urlsplit(url if "//" in url else f"//{url}")
    assert parts.hostname is not None and parts.port is not None
    return Address(parts.hostname, parts.port)


def documented(run: Path) -> dict[str, set[Address]]:
    """The addresses that the files of a run name."""
    broker, place = running(run / "broker"), read_place(run)
    assert broker is not None and place is not None
    ports = json.loads(next((run / "broker" / "ports").iterdir()).read_text())
    targets = [json.loads(path.read_text())[0]["targets"][0] for path in (run / "targets").glob("*.json")]
    return {
        listeners.BROKER: {address(broker.url)},
        listeners.WEBSOCKET: {Address("127.0.0.1", address(url).port) for url in ports["websocket"]},
        listeners.GATEWAY: {address(json.loads((run / "gateway.json").read_text())["url"])},
        listeners.PAGE: {address(place.page)},
        listeners.METRICS: {address(target) for target in targets},
    }


@pytest.fixture(scope="module")
async def opened(anyio_backend: object) -> AsyncIterator[Opened]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    folder.chmod(0o755)  # as a developer's folder: the run itself has to keep others out
    settings = {"curriculum.steps": 500, "production.enabled": True}
    try:
        async with up(folder, **settings) as started:
            await started.line("run r")
            await phase(started, "listening")
            await phase(started, "weights_swapped")
            bus = await started.operator()
            async for _ in bus.follow("HR_SCORE", s.SCORE.where(run=started.run.name)):
                break  # every actor is up
            await bus.close()
            yield Opened(started, documented(started.run))
    finally:
        shutil.rmtree(folder)


async def test_nothing_listens_that_the_list_does_not_name(opened: Opened) -> None:
    started, addresses = opened
    family = {process.pid: process.words for process in started.family()} | {started.process.pid: ["up"]}
    sockets = {Address(each.host, each.port): each for each in listening(family) if each.kind != "unix"}
    named = {each for some in addresses.values() for each in some}
    assert set(sockets) == named, [(each, family[each.pid]) for place, each in sockets.items() if place not in named]
    assert {each.kind for each in sockets.values()} == {"tcp"} and {each.host for each in named} == {"127.0.0.1"}
    assert [each for each in listening(family) if each.kind == "unix"] == []
    assert set(addresses) == {each.name for each in listeners.LISTENERS if each.demo}
    assert len(addresses[listeners.METRICS]) == 9, "one per process of actors, and that of `up`"


def secrets_of(run: Path) -> list[str]:
    """Every secret of a run."""
    place = read_place(run)
    assert place is not None
    seeds = [path.read_text().strip() for path in (run / "broker" / "credentials").glob("*.nk")]
    assert len(seeds) >= len(ROLES)
    return [
        *seeds,
        place.key,
        place.secret,
        gateway_key.place(run).read_text(),
        (run.parent / "metrics.key").read_text(),
    ]


def files_of(started: Up) -> set[str]:
    """The files and folders of a run, and what its processes hold open or show of themselves."""
    run = started.run
    paths = {str(path) for path in run.rglob("*")} | {str(run), *(str(run.parent / name) for name in KEYS)}
    for process in started.family():
        here = Path(f"/proc/{process.pid}")
        try:
            opened = list((here / "fd").iterdir())
        except FileNotFoundError:
            continue  # the process has ended
        paths |= {str(here / name) for name in ("environ", "mem", "fd", "io", "maps")}
        for entry in opened:
            try:
                target = os.readlink(entry)
                mode = os.stat(entry).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and "(deleted)" not in target and not target.startswith(INSTALLED):
                paths.add(target)
    return paths


KEYS = ("metrics.key",)
INSTALLED = ("/usr/", "/lib", str(ROOT), sys.prefix, "/proc/", "/sys/", "/etc/")
PATHS = (
    *("/", "/config.json", "/api/history", "/api/steps", "/api/panel/leases", "/api/trajectory/1", "/metrics"),
    *("/v1/models", "/v1/agents", "/v1/sessions/x", "/healthz/x", "/weights/1/x", "/varz", "/connz"),
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
async def test_another_user_of_the_machine_gets_health_answers_alone(opened: Opened) -> None:
    started, addresses = opened
    kinds = {place: name for name, places in addresses.items() for place in places}
    run = started.run.name
    guesses: list[dict[str, str]] = [{}, {"Authorization": f"Bearer {run}"}, {"x-api-key": "hr-" + "A" * 43}]
    requests: list[list[Any]] = []
    for place in kinds:
        requests += [[*place, "GET", path, headers] for path in PATHS for headers in guesses]
        requests += [[*place, "POST", path, {}] for path in ("/v1/sessions", "/v1/agents", "/v1/chat/completions")]
        requests += [[*place, "DELETE", "/v1/users/x", {}], [*place, "GET", "/healthz", {}]]
    stranger = Key.make()
    connects: list[dict[str, Any]] = [
        {"verbose": False},
        *({"user": role, "pass": word} for role in (*ROLES, run) for word in ("", role, run)),
        {"nkey": stranger.public, "sig": stranger.sign("x").decode()},
    ]
    for role in ROLES:
        public = Key.parse((started.run / "broker" / "credentials" / f"{role}.nk").read_text()).public
        connects += [{"nkey": public}, {"nkey": public, "sig": stranger.sign("x").decode()}]
    told: dict[str, Any] = {
        "files": sorted(files_of(started)),
        "requests": requests,
        "connects": connects,
        "broker": list(next(iter(addresses[listeners.BROKER]))),
    }
    assert len(told["files"]) > 100
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(ROOT / "tests" / "support" / "second_user.py")],
        input=json.dumps(told), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["files"] == [] and got["brokers"] == []
    for host, port, method, path, status in got["answers"]:
        what = (kinds[Address(host, port)], method, path, status)
        match what:
            case (listeners.GATEWAY, "GET", "/healthz", _):
                assert status in (200, 503), what
            case (listeners.PAGE, "GET", "/" | "/healthz" | "/metrics" | "/varz" | "/connz", _):
                assert status == (200 if path == "/" else 404), what  # a file of the page, without data
            case (listeners.BROKER | listeners.WEBSOCKET, *_):
                assert status in {0, 400, 401, 404, 405}, what
            case _:
                assert status in {401, 405, 501}, what
    command_lines = " ".join(word for process in started.family() for word in process.words)
    logs = "".join(path.read_text(errors="replace") for path in started.run.rglob("*log*") if path.is_file())
    report = (started.run / "config.json").read_text()
    for secret in secrets_of(started.run):
        assert secret not in command_lines and secret not in logs and secret not in report


ATTACK = Path(__file__).with_name("other_site.html").read_text()
SENT = ("opaque", "form")
"""A page is never told what became of these; the browser's own log is."""


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver")
async def test_a_page_of_another_site_gets_health_answers_alone_and_stores_nothing(opened: Opened) -> None:
    started, addresses = opened
    bus = await started.operator()
    before = await stored(bus, started.run.name)
    of = {
        listeners.GATEWAY: ["/v1/sessions", "/v1/models", "/v1/chat/completions", "/v1/agents", "/v1/users/x"],
        listeners.PAGE: ["/", "/app.js", "/config.json", "/api/history"],
        listeners.METRICS: ["/metrics"],
        listeners.WEBSOCKET: ["/"],
        listeners.BROKER: ["/"],
    }
    targets: list[Any] = [
        [f"http://{host}:{port}", of[name]] for name in of for host, port in sorted(addresses[name])[:1]
    ]
    runner = web.AppRunner(site())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        got, statuses = await asyncio.to_thread(attacked, runner.addresses[0][1], targets)
    finally:
        await runner.cleanup()
    assert len(got) == 12 * sum(len(paths) for _, paths in targets)
    assert [each for each in got if each[1] != "refused" and not (each[0][0] in SENT and each[1] == "sent")] == []
    ports = {port for some in addresses.values() for _, port in some}
    seen = [(url, status) for url, status in statuses if urlsplit(url).port in ports]
    assert len(seen) > 50 and [each for each in seen if each[1] not in NOT_ALLOWED | {400, 405, 501}] == []
    assert await stored(bus, started.run.name) == before
    await bus.close()


async def stored(bus: Bus, run: str) -> list[object]:
    """The newest records that users have caused."""
    newest = await bus.last("HR_TASK", s.TASK.where(run=run, lane="production"))
    return [newest, *[await bus.last_seq(stream) for stream in ("HR_FEEDBACK", "HR_DLQ")]]


def site() -> web.Application:
    """The site of the page that attacks."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=ATTACK, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    return app


def attacked(port: int, targets: list[Any]) -> tuple[list[Any], list[tuple[str, int]]]:
    """The page's result of each try, and the status of every answer that the browser received."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(120)
        driver.get(f"http://127.0.0.1:{port}/")
        got = driver.execute_async_script("attack(arguments[0]).then(arguments[1])", targets)
        entries = [json.loads(line["message"])["message"] for line in driver.get_log("performance")]  # type: ignore[no-untyped-call]
    finally:
        driver.quit()
    answers = [each["params"]["response"] for each in entries if each["method"] == "Network.responseReceived"]
    return got, [(answer["url"], answer["status"]) for answer in answers]
