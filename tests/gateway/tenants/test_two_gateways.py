"""Two real gateways of one broker, with empty folders of their own, behave as one; so does a pod that replaces them."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.feedback.actor import Feedback
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.cli.main import main
from headrace.gateway.tenants.keys import digest_of
from headrace.gateway.tenants.store import entries
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.product import SCOPES
from tests.conftest import Connect
from tests.support.api_keys import known
from tests.support.gateway import OpenGateway
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio
ASK = {"user": "zoe", "suite": "generated/heldout", "task": "3"}
RUN = "twogateways"


class Command:
    """`headrace keys` on a host that has the operator's seed and no folder of the run."""

    def __init__(self, server: Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.said = capsys, ""
        self._config = folder / "elsewhere.toml"
        self._config.write_text(
            f'[run]\nid = "{RUN}"\n[bus]\nurl = "{server.url}"\ncredentials = "{server.credentials}"\n'
        )

    async def __call__(self, *words: str) -> tuple[int, str]:
        """Exit code, and what it printed on both streams."""
        code = await asyncio.to_thread(main, ["keys", "--config", str(self._config), *words])
        told = self._capsys.readouterr()
        return code, (told.out + told.err).strip()


async def open_gateway(connect: Connect, folder: Path, key: str, **production: Any) -> OpenGateway:
    folder.mkdir()
    product = OpenGateway(connect, folder, RUN, **production)
    product.key = key
    return await product.open()


async def test_a_key_and_a_user_are_the_same_everywhere(
    connect: Connect,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    command = Command(server, tmp_path, capsys)
    words = ("--rate", "60000", "--training", *(word for scope in SCOPES for word in ("--scope", scope)))
    code, key = await command("--add", "default", *words)
    assert code == 0 and key.startswith("hr-")
    first = await open_gateway(connect, tmp_path / "one", key)
    second = await open_gateway(connect, tmp_path / "two", key)
    gateways = [first, second]
    feedback = Feedback(first.config, await connect("feedback"), RUN, "feedback-1")
    (tmp_path / "one" / RUN).mkdir(exist_ok=True)
    await feedback.start()
    answers: list[Any] = []

    async def call(product: OpenGateway, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, told = await product.call(method, path, body)
        answers.append(told)
        return status, told

    try:
        # A session of one is the other's; the user's hash is the same.
        groups = [(await call(product, "POST", "/v1/sessions", {"user": "ada"}))[1]["session"] for product in gateways]
        assert groups[0] != groups[1] and groups[0].partition(".")[0] == groups[1].partition(".")[0]
        for product in gateways:
            for group in groups:
                assert (await call(product, "GET", f"/v1/sessions/{group}"))[0] == 200
        # A comment through the first, a pod with an empty disk in place of both, and a purge through it.
        opened = (await call(first, "POST", "/v1/sessions", ASK))[1]["session"]
        status, told = await call(second, "GET", f"/v1/sessions/{opened}")
        assert (status, told["state"], told["attempt"]) == (200, "queued", 0)
        await first.fail(await first.request())
        for product in gateways:
            while (await call(product, "GET", f"/v1/sessions/{opened}?wait=1"))[1]["attempt"] != 1:
                pass
        assert (await first.request()).attempt == 1, "the first issues the next attempt, and the second knows of it"
        made = (await call(first, "POST", "/v1/agents", {"prompt": "x"}))[1]["agent"]["id"]
        while (await call(second, "GET", f"/v1/agents/{made}"))[0] != 200:
            pass
        request = next(each for each in [await first.request()] if each.group != opened)
        await first.finish(request, {"a.py": b"1"})
        while (await call(second, "GET", f"/v1/agents/{made}"))[1]["latestRunStatus"] != "FINISHED":
            pass
        assert (await call(second, "GET", f"/v1/agents/{made}/artifacts"))[1]["artifacts"][0]["path"] == "a.py"
        asked = msgspec.structs.replace(request, group=opened, attempt=1)
        await first.finish(asked, {"kit/core.py": b"fixed\n"})
        for product in gateways:
            while (await call(product, "GET", f"/v1/sessions/{opened}?wait=30"))[1]["state"] != "finished":
                pass
        rated = await call(first, "POST", f"/v1/sessions/{opened}/feedback", {"thumb": "up", "comment": "my words"})
        assert rated[0] == 202
        user = opened.partition(".")[0]
        where = subjects.FEEDBACK.where(user=user)
        assert [record async for record in first.admin.records("HR_FEEDBACK", where)]
        for product in gateways:
            await product.gateway.shut(1.0)
        third = await open_gateway(connect, tmp_path / "three", key)
        gateways.append(third)
        status, told = await call(third, "DELETE", "/v1/users/zoe")
        assert status == 200 and f'"user":"{user}"' in told["certificate"]["statement"]
        assert not [record async for record in third.admin.records("HR_FEEDBACK", where)]
        # The end of a key counts at every gateway.
        fourth = await open_gateway(connect, tmp_path / "four", key)
        gateways.append(fourth)
        code, listed = await command()
        assert code == 0 and digest_of(key)[:8] in listed and key not in listed
        code, _ = await command("--revoke", digest_of(key)[:8])
        assert code == 0
        for product in (third, fourth):
            await known(product.gateway, key, so=False)
            assert (await call(product, "GET", "/v1/models"))[0] == 401
        assert (await command("--revoke", digest_of(key)[:8]))[0] == 2
    finally:
        for product in gateways:
            await product.gateway.shut(1.0)
        await feedback.shut(1.0)
    # The key's text is in no answer, in no log and in no file, of the broker's store either.
    assert key not in repr(answers) and key not in caplog.text and key not in capsys.readouterr().out
    for folder in (tmp_path, server.folder):
        for path in folder.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path


async def test_a_gateway_reads_anothers_sessions_when_their_user_asks_or_nobody_does(
    connect: Connect, tmp_path: Path
) -> None:
    """It hears of every session that another one stores, and decodes none of them for that."""
    first = await open_gateway(connect, tmp_path / "one", "", idle_s=0.01)
    second = await open_gateway(connect, tmp_path / "two", first.key, idle_s=0.01)
    here = second.gateway.sessions
    groups = [(await first.call("POST", "/v1/sessions", {"user": user}))[1]["session"] for user in ("ada", "bob")]
    await first.gateway.shut(1.0)
    await second.gateway.clients.caught_up()
    assert [here.get(group) for group in groups] == [None, None]
    ended = asyncio.Event()

    async def end(message: Message) -> Message:
        ended.set()
        return Ack(ok=True)

    try:
        assert (await second.call("GET", f"/v1/sessions/{groups[0]}"))[0] == 200
        assert here.get(groups[0]) is not None and here.get(groups[1]) is None
        # The other's gateway is gone: its session ends here.
        where = subjects.RPC.at(service="rollout", caller="gateway", method=f"end-{subjects.token(RUN)}")
        await second.rollout.respond(where, end)
        await second.until(ended)
        while (found := here.get(groups[1])) is None or not found.ended:
            await asyncio.sleep(0.01)
    finally:
        await second.gateway.shut(1.0)


@pytest.mark.parametrize(
    "words",
    [("--add", ""), ("--add", " "), ("--add", "a\tb"), ("--revoke", ""), ("--revoke", "*"), ("--training",),
     ("--rate", "5"), ("--tokens", "5"), ("--scope", "turns")],
)  # fmt: skip
async def test_a_command_that_means_nothing_is_one_sentence(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, told = await Command(server, tmp_path, capsys)(*words)
    assert code == 2 and told.startswith("headrace: ") and len(told.splitlines()) == 1


async def test_closed_streams_are_one_sentence(server: Server, tmp_path: Path) -> None:
    """`headrace keys --add acme >&-` made a key that nobody saw, and ended with a traceback."""
    config = tmp_path / "elsewhere.toml"
    config.write_text(f'[run]\nid = "{RUN}"\n[bus]\nurl = "{server.url}"\ncredentials = "{server.credentials}"\n')
    line, env = f"{sys.executable} -m headrace.cli keys --config {config}", os.environ | {"PYTHONPATH": str(ROOT)}

    async def shell(words: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_shell(
            f"{line} {words}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path, env=env
        )
        _, error = await process.communicate()
        assert process.returncode is not None
        return process.returncode, error.decode()

    assert await shell("--add acme > key") == (0, "")
    code, told = await shell(">&-")
    assert code == 3 and told.startswith("headrace: standard output") and len(told.splitlines()) == 1
    async with await Bus.connect(server.url, role="operator", credentials=server.credentials) as operator:
        before = len(await entries(operator))
        for words, status in (("--add acme >&-", 3), ("--add acme >/dev/full", 3)):
            code, told = await shell(words)
            assert code == status and len(told.splitlines()) == 1, told
        assert len(await entries(operator)) == before
