"""Tools of the web: pages as text and results of a search service, through the list of destinations of a sandbox."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec
import pytest

from headrace.config import Environment
from headrace.harness.tools.toolbox import Toolbox, tools_of, with_web_search
from headrace.messages.rollout import ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import DEFAULT_TOOLS, Task, TaskRef, TestPlan
from headrace.vmhost.node.host import Host
from tests.support import hosts

pytestmark = pytest.mark.anyio
NUMBERS = itertools.count()

WEB = ("web_fetch", "web_search")
PAGES: dict[str, tuple[str, bytes]] = {
    "/page": (
        "text/html; charset=latin-1",
        b"<head><title>no</title></head><h1>A  title</h1><script>var x = '<p>no</p>'</script><p>gr\xfcn &amp; rot"
        b"<br>next</p>\n\n<pre>a\n  b</pre>",
    ),
    "/text": ("text/plain", b"\n".join(b"%d" % number for number in range(1, 10))),
    "/picture": ("image/png", b"\x89PNG"),
    "/search?q=numpy%20mean%20%26&format=json": (
        "application/json",
        msgspec.json.encode(
            {"results": [{"url": "https://a.example/", "title": "A", "content": "of\nmeans"}, {"url": "https://b/"}]}
        ),
    ),
}


def task_with(*tools: str, network: tuple[str, ...] = ()) -> Task:
    ref, plan = TaskRef("s", "t"), TestPlan()
    return Task(ref=ref, family="f", prompt="p", files={}, allowed=("**",), tests=plan, tools=tools, network=network)


class Site(NamedTuple):
    """A server, and a sandbox that may reach it."""

    place: str
    sandbox: Sandbox

    async def call(self, name: str, **arguments: str) -> ToolResult:
        task = with_web_search(
            task_with(*WEB, network=(self.place,)), f"http://{self.place}/search?q={{query}}&format=json"
        )
        call = ToolCall(id=f"{next(NUMBERS)}.0", name=name, arguments=arguments)
        return await Toolbox(tools_of(task)).run(call, self.sandbox, task)


@pytest.fixture(params=["process", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])], scope="module")
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        kind, body = PAGES.get(path, ("text/plain", b""))
        status = b"200 OK" if path in PAGES else b"404 Not Found"
        head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        writer.write(head % (status, kind.encode(), len(body)) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    place = f"localhost.:{port}"  # the sandbox's proxy is not asked for localhost without the dot
    machines = Environment(backend="process") if request.param == "process" else hosts.environment()
    here = ("localhost:*", "127.0.0.1:*")
    host = await Host.open(msgspec.structs.replace(machines, private_places=here))
    async with server:
        listed = (f"localhost:{port}", f"127.0.0.1:{port}")
        yield Site(place, await host.acquire(hosts.ask(0, group="web", isolation="episode", network=listed)))
        await host.close()


async def test_a_page_is_read_as_text_and_by_lines(site: Site) -> None:
    page = await site.call("web_fetch", url=f"http://{site.place}/page")
    assert (page.ok, page.output) == (True, "A title\n\ngrün & rot\nnext\n\na\n  b")
    part = await site.call("web_fetch", url=f"http://{site.place}/text", lines="3-4")
    assert (part.ok, part.output) == (True, "3\n4")


async def test_a_page_that_cannot_be_read_says_why(site: Site) -> None:
    for url, reason in {
        f"http://{site.place}/none": "answered 404 Not Found",
        f"http://{site.place}/picture": "is image/png, not a text",
        "http://other.invalid/": "other.invalid",
        "file:///etc/passwd": "url: expected an address such as https://docs.python.org/3/, got 'file:///etc/passwd'",
    }.items():
        answer = await site.call("web_fetch", url=url)
        assert not answer.ok and reason in answer.output, answer.output
    assert (await site.call("web_fetch", url=f"http://{site.place}/text", lines="20")).output == "the text has 9 lines"


async def test_the_results_of_the_search_service_are_shown(site: Site) -> None:
    results = await site.call("web_search", query="numpy mean &")
    assert (results.ok, results.output) == (True, "A\nhttps://a.example/\nof means\n\n\nhttps://b/")
    missing = await site.call("web_search", query="other")
    assert not missing.ok and "answered 404 Not Found" in missing.output
    assert "expected 1 to 500 characters, got 0" in (await site.call("web_search", query=" ")).output


def test_only_a_task_that_allows_network_offers_the_web() -> None:
    assert not set(WEB) & set(DEFAULT_TOOLS)
    assert tools_of(task_with("read_file", *WEB)) == ("read_file",)
    connected = task_with("read_file", *WEB, network=("a.example:443",))
    assert tools_of(connected) == ("read_file", "web_fetch"), "no search service is named"
    searching = with_web_search(connected, "https://a.example/?q={query}")
    assert tools_of(searching) == ("read_file", *WEB)
    assert with_web_search(searching, "https://b.example/?q={query}") is searching, "a task's own service goes first"
    call = ToolCall(id="0.0", name="web_fetch", arguments={"url": "https://a.example/"})
    box = Toolbox(tools_of(searching))
    assert not box.repeatable(call) and box.repeatable(msgspec.structs.replace(call, name="read_file"))
