"""Fixtures that the tests of every folder share: a real broker with every stream, and connections in any role."""

import gc
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: two OpenMP threads on two busy cores spin against each other (measured: a test of
# seconds did not end in minutes). Actors run with one as well.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import structlog

from headrace import registry
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.bus.runtime.actor import Actor
from tests.support import watchdog
from tests.support.keys import as_writers

CONNECT_S = 60.0
"""For a busy machine: an actor itself gives up sooner, and its supervisor tries again."""

Connect = Callable[..., Awaitable[Bus]]


def pytest_configure(config: pytest.Config) -> None:
    """Reports where a hanging test waits. A logged error has a plain traceback: with `rich`, which some package
    installs, structlog prints every local of every frame, and a trainer's tensors took seconds."""
    watchdog.register(config)
    *processors, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure([*processors, renderer])


LONGEST = (
    "vmhost/images/test_images.py",
    "laws/test_unreadable_commands.py",
    "launch/test_up.py",
    "kernels/test_triton.py",
    "actors/environment/test_holders.py",
    "chaos/test_chaos.py",
    "vmhost/node/test_operations.py",
    "vmhost/backends/test_conformance.py",
    "engines/embedded/test_engine.py",
    "engines/embedded/test_exact.py",
    "vmhost/test_network.py",
    "actors/environment/test_actor.py",
    "vmhost/node/test_scarcity.py",
)
"""Files that take long. They come first: a long file that starts last leaves the other workers without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of `LONGEST` first, the others in the order of their files."""
    rank = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """The collector of garbage would visit 450,000 objects of imports and collected tests again and again: 3.5 % of the
    suite's processor time was spent in the collections of its workers, and 2.2 % with this."""
    import hypothesis  # noqa: F401 - its plugin for trio asks for references to an object, and frozen ones do not count

    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test admits its own parts from outside; those of one test are unknown in the next."""
    monkeypatch.setattr(registry, "_admitted", {})


@pytest.fixture(autouse=True)
def failures_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print the error with which an actor fails: without a supervisor nothing else reports why its test waits."""
    fail = Actor.fail

    def printed(actor: Actor, error: BaseException) -> None:
        traceback.print_exception(error)
        fail(actor, error)

    monkeypatch.setattr(Actor, "fail", printed)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run as actors do: asyncio on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def server(anyio_backend: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A real nats-server of this module, with every stream declared and a user per role."""
    folder: Path = tmp_path_factory.mktemp("broker")
    async with Server(folder) as broker:
        async with await Bus.connect(
            broker.url, role="admin", credentials=broker.credentials, timeout=CONNECT_S
        ) as admin:
            await declare(admin)
        yield broker


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    """``await connect(role)``: a Bus in that role, closed after the test. Keywords as of `Bus.connect`. The admin's
    records have the signature of a role that may write them."""
    opened: list[Bus] = []

    async def one(role: str = "admin", **options: Any) -> Bus:
        keywords: dict[str, Any] = {"credentials": server.credentials, "timeout": CONNECT_S} | options
        opening = (
            as_writers(server.url, **keywords) if role == "admin" else Bus.connect(server.url, role=role, **keywords)
        )
        bus = await opening
        opened.append(bus)
        return bus

    yield one
    for bus in opened:
        await bus.close()
